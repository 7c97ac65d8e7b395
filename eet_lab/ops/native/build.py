"""One `.cu` becomes one shared library, in a private cache, built by ninja in parallel.

A library's file name carries a key of everything that went into it (source, headers, flags, nvcc), so a changed source
is a new file, an unchanged one is never built again, and no process can be handed another one's half-written library.
What is no longer what was built (`digests`) is built again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eet_lab.errors import Cancelled, KernelBuildError
from eet_lab.files import lock
from eet_lab.ops.native import digests, toolchain
from eet_lab.paths import cache_dir, csrc_dir
from eet_lab.progress import Cancel, Progress

POLL_S = 0.05
MIB = 2**20
NEEDED_MIB = 100
"""Disk space for the libraries and the files that nvcc writes on the way."""
FLAGS = ("-O3", "-std=c++17", "-lineinfo", "-shared", "-Xcompiler=-fPIC")


def build(
    names: Iterable[str | Path] | None = None,
    arch: str | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    extra_flags: tuple[str, ...] = (),
) -> dict[str, Path]:
    """Build what is not in the cache yet: {name: shared library}.

    names: sources in csrc/ by stem, or paths to other `.cu` files; None means all of csrc/.
    arch: as nvcc names it, "80" or "90a"; None means the present GPU.
    progress(done, total, message) is called while it builds; `cancel` is looked at every 50 ms.
    Raises KernelBuildError with nvcc's message, or Cancelled.
    """
    sources = {str(name): source(name) for name in (all_names() if names is None else names)}
    arch = arch or toolchain.architecture()
    nvcc = toolchain.find_nvcc()
    # NVIDIA's wheels keep the CUDA runtime in lib, where their nvcc does not look by itself.
    runtime = f"-L{nvcc.parent.parent / 'lib'}"
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    flags = (*FLAGS, *toolchain.parallel(nvcc), target, f"-I{csrc_dir()}", runtime, *extra_flags)
    folder = cache_dir() / "kernels" / f"sm_{arch}"
    with _told(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    built = {name: folder / f"{path.stem}-{key(path, nvcc, flags)}.so" for name, path in sources.items()}
    if not all(map(digests.is_whole, built.values())):
        toolchain.host_compiler()
        with _told(folder), _locked(folder / "lock", cancel):
            missing = {library: sources[name] for name, library in built.items() if not digests.is_whole(library)}
            for library in missing:
                digests.discard(library)
            (folder / "build.ninja").write_text("".join(_ninja_file(nvcc, flags, missing)))
            try:
                _run_ninja(folder, len(missing), progress, cancel)
            finally:
                for library in filter(Path.exists, missing):  # they are whole: a build that failed or was stopped
                    digests.seal(library)  # keeps what it finished
            edited = [library for library, path in missing.items() if key(path, nvcc, flags) not in library.name]
            for library in edited:  # nvcc may have read either text: what it made belongs to neither key
                digests.discard(library)
        if edited:
            return build(list(sources), arch, progress, cancel, extra_flags)
    return built


def all_names() -> list[str]:
    """The sources of csrc/, the largest first, since the slowest should not start last."""
    return [path.stem for path in sorted(csrc_dir().glob("*.cu"), key=lambda path: -path.stat().st_size)]


def source(name: str | Path) -> Path:
    """The `.cu` file that a name or path means. Raises KernelBuildError when there is none."""
    path = Path(name) if Path(name).suffix == ".cu" else csrc_dir() / f"{name}.cu"
    if not path.is_file():
        raise KernelBuildError(f"There is no CUDA source {path}. Sources in csrc/: {', '.join(all_names())}.")
    return path.resolve()


Stamps = dict[Path, tuple[int, ...]]
"""Files, and when each was written."""

_keys: dict[tuple, tuple[Stamps, str]] = {}


def key(path: Path, nvcc: Path, flags: Iterable[str]) -> str:
    """A hash of all that the library depends on. It is asked before every run, so files are read only when written."""
    asked = (path, toolchain.nvcc_version(nvcc), str(nvcc), *flags)
    stamps, known = _keys.get(asked, ({}, ""))
    if not stamps or not are_current(stamps):
        stamps = {file: _stamp(file) for file in sorted(includes(path))}
        digest = hashlib.sha256(repr(asked[1:]).encode())
        for file in filter(Path.is_file, stamps):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        known = digest.hexdigest()[:16]
        _keys[asked] = stamps, known
    return known


def stamps_of(names: Iterable[str | Path]) -> Stamps:
    """The stamps of all files that these sources include."""
    return {file: _stamp(file) for file in set().union(*(includes(source(name)) for name in names))}


def are_current(stamps: Stamps) -> bool:
    """Whether none of the files was written since."""
    return all(_stamp(file) == stamp for file, stamp in stamps.items())


def _stamp(file: Path) -> tuple[int, ...]:
    """When a file was written, its size and its place on the disk; nothing if it is gone."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return ()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def includes(path: Path) -> set[Path]:
    """The source and every header that it includes with quotes, directly or not; for a missing one, where it may be."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        if not file.is_file():
            continue
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(), re.MULTILINE):
            homes = [home.resolve() for home in (file.parent / name, csrc_dir() / name)]
            waiting += [home for home in homes if home.is_file()][:1] or homes
    return found


@contextmanager
def _locked(path: Path, cancel: Cancel | None) -> Iterator[None]:
    """Hold a file lock. The kernel drops it when its holder dies, so a killed build cannot hang the next one."""
    with path.open("w") as file:
        lock(file.fileno(), lambda: _stop_if(cancel))
        yield


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """KernelBuildError in one line for a file that cannot be used, or a full disk, whoever meets it: Python or nvcc."""
    try:
        yield
    except (OSError, KernelBuildError) as error:
        full = error.errno == errno.ENOSPC if isinstance(error, OSError) else os.strerror(errno.ENOSPC) in str(error)
        if isinstance(error, OSError) and not full:
            is_in_the_way = error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
            remedy = "Remove it" if is_in_the_way else "Make it usable, or set XDG_CACHE_HOME to another folder"
            why = f"{error.filename or folder} cannot be used ({error.strerror or error})"
            raise KernelBuildError(f"The kernels cannot be built: {why}. {remedy}, and try again.") from error
        if not full:
            raise
        places = dict.fromkeys((folder, Path(tempfile.gettempdir())))
        free = " and ".join(f"{shutil.disk_usage(place).free / MIB:,.0f} MiB in {place}" for place in places)
        raise KernelBuildError(
            f"The disk is full: building the kernels needs {NEEDED_MIB} MiB, and there are {free}. Free some space, or "
            "set XDG_CACHE_HOME (and TMPDIR) to a folder with more."
        ) from error


def _stop_if(cancel: Cancel | None) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled("Stopped while CUDA kernels were being built; what was finished is kept.")


def _ninja_file(nvcc: Path, flags: Iterable[str], missing: dict[Path, Path]) -> Iterator[str]:
    """Each library is built under a name of its own and then renamed, so that it is whole as soon as it exists."""
    yield "rule nvcc\n"
    options = " ".join(_escaped(shlex.quote(flag)) for flag in flags)
    yield f"  command = {_escaped(shlex.quote(str(nvcc)))} {options} -MD -MT $out -MF $out.d -o $out.$$$$ $in"
    yield " && mv -f $out.$$$$ $out\n"
    yield "  depfile = $out.d\n  deps = gcc\n  description = $name\n"
    for library, path in missing.items():
        yield f"build {_escaped(library.name)}: nvcc {_escaped(str(path))}\n  name = {_escaped(path.name)}\n"


def _escaped(text: str) -> str:
    return re.sub(r"([$ :\n])", r"$\1", text)


def _run_ninja(folder: Path, total: int, progress: Progress | None, cancel: Cancel | None) -> None:
    report = progress or (lambda done, total, message: None)
    report(0, total, f"building {total} CUDA source{'s'[: total > 1]}")
    process = subprocess.Popen(
        [toolchain.ninja(), "-C", folder, "-k", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
        start_new_session=True,  # a group of its own: ninja and its compilers end together
    )
    try:
        log = []
        for line in _lines(process, cancel):
            if finished := re.match(r"\[(\d+)/(\d+)\] (.+)", line):
                report(int(finished[1]), int(finished[2]), finished[3])
            log.append(line)
        if process.wait():
            raise KernelBuildError(explain(log))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdout
        process.stdout.close()


def _lines(process: subprocess.Popen, cancel: Cancel | None) -> Iterator[str]:
    """What the process prints, line by line, looking at `cancel` all the while."""
    assert process.stdout
    pipe, rest = process.stdout.fileno(), b""
    while True:
        _stop_if(cancel)
        if not select.select([pipe], [], [], POLL_S)[0]:
            continue
        data = os.read(pipe, 65536)
        if not data:
            break
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    yield rest.decode(errors="replace")


def explain(log: list[str]) -> str:
    """nvcc's errors, each with the line of source that it is about."""
    explained = []
    for line in log:
        if error := re.match(r"(.+?)\((\d+)\): (?:catastrophic )?error", line):
            explained.append(f"{line}\n    {error[2]} | {_source_line(Path(error[1]), int(error[2]))}")
    if not explained:  # the linker, ptxas, a full disk: everything but ninja's echo of commands
        explained = [line for line in log if line.strip() and not re.match(r"\[\d+/\d+\]|ninja: |FAILED", line)][-20:]
    return "A CUDA kernel does not compile:\n" + "\n".join(explained)


def _source_line(path: Path, number: int) -> str:
    try:
        return path.read_text().splitlines()[number - 1].strip()
    except (OSError, IndexError):
        return "(source not readable)"
