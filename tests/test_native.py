"""The build of kernels: what nvcc makes of csrc/, and what happens when something is missing, wrong or stopped."""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eet_lab.errors import Cancelled, KernelBuildError, KernelError
from eet_lab.ops import native
from eet_lab.ops.native import launchers, toolchain
from eet_lab.ops.native.build import explain, includes, key, source
from eet_lab.ops.native.launchers import Library

build_module = importlib.import_module("eet_lab.ops.native.build")  # the name in `native` is the function

try:
    toolchain.find_nvcc(), toolchain.ninja(), toolchain.host_compiler()
    MISSING = None
except KernelBuildError as error:
    MISSING = str(error)

needs_nvcc = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
SMALL = """
#include <driver_types.h>
#include <cstdint>
#include "answer.cuh"
extern "C" const char* eet_error_string(int) { return "too bad"; }
extern "C" cudaError_t eet_answer(int* out, int64_t step, float scale, cudaStream_t stream) {
  if (step < 0) return cudaErrorInvalidValue;
  *out = ANSWER + int(step * scale);
  return cudaSuccess;
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small(tmp_path):
    (tmp_path / "answer.cuh").write_text("#define ANSWER 42\n")
    path = tmp_path / "small.cu"
    path.write_text(SMALL)
    return path


FOR_THE_HOST = ("-x=c++",)
"""The small source has no kernels. Without a look for them, nvcc takes a tenth of the time; all else is as ever."""


@needs_nvcc
def test_a_build_is_done_once_and_again_when_a_header_changes(cache, small):
    messages = []
    report = lambda done, total, message: messages.append((done, total, message))  # noqa: E731
    how = {"arch": "80", "extra_flags": FOR_THE_HOST}
    first = native.build([small], **how, progress=report)[str(small)]
    assert messages[0][:2] == (0, 1)
    assert messages[-1] == (1, 1, "small.cu")
    assert native.build([small], **how, progress=report)[str(small)] == first
    assert len(messages) == 2
    (small.parent / "answer.cuh").write_text("#define ANSWER 43\n")
    second = native.build([small], **how)[str(small)]
    assert second != first
    assert [run(path) for path in (first, second)] == [42, 43]
    assert (cache / "eet-lab").stat().st_mode & 0o777 == 0o700


def run(path: Path) -> int:
    out = ctypes.c_int()
    Library(path, SMALL).eet_answer(out=ctypes.addressof(out), step=0, scale=1.0, stream=None)
    return out.value


@needs_nvcc
def test_a_launcher_passes_its_arguments_and_raises_on_an_error(cache, small):
    library = Library(native.build([small], arch="80")[str(small)], SMALL)
    out = ctypes.c_int()
    library.eet_answer(out=ctypes.addressof(out), step=1 << 33, scale=2.0**-33, stream=0)
    assert out.value == 43
    with pytest.raises(KernelError, match=r"eet_answer failed: too bad \(CUDA error 1\) \(step=-5, scale=1.0\)"):
        library.eet_answer(out=None, step=-5, scale=1.0, stream=None)
    with pytest.raises(AttributeError, match="Did you mean 'eet_answer'"):
        _ = library.eet_anser


@needs_nvcc
def test_a_compile_error_shows_the_line(cache, small):
    small.write_text(SMALL.replace("ANSWER +", "no_such_thing +"))
    with pytest.raises(KernelBuildError, match="no_such_thing") as caught:
        native.build([small], arch="80")
    assert "*out = no_such_thing + int(step * scale);" in str(caught.value)
    small.write_text(SMALL)
    assert run(native.build([small], arch="80", extra_flags=FOR_THE_HOST)[str(small)]) == 42


@needs_nvcc
def test_stop_ends_a_build_at_once_and_the_next_one_works(cache, small):
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        native.build(["prefill_attention"], arch="80", cancel=stop)
    assert time.monotonic() - began < 2
    assert not list(cache.glob("eet-lab/kernels/sm_80/*.so"))
    assert run(native.build([small], arch="80", extra_flags=FOR_THE_HOST)[str(small)]) == 42


TRIES = """
import ctypes, os, sys
from eet_lab.ops import native  # once, since that takes seconds
path, text = sys.argv[1:]
for _ in sys.stdin:
    if os.fork() == 0:
        library, out = native.build([path], arch="80", extra_flags=("-x=c++",))[path], ctypes.c_int()
        native.Library(library, text).eet_answer(out=ctypes.addressof(out), step=0, scale=1.0, stream=None)
        print(library, out.value, end="", flush=True)
        os._exit(0)
    os.wait()
    print(flush=True)
"""
"""For each line that it is given, builds and calls a library in a process: to load a damaged one ends it."""


@needs_nvcc
def test_a_library_that_is_not_what_was_built_is_built_again(small, cache):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", TRIES, small, SMALL], **pipes) as process:

        def told() -> str:
            print(file=process.stdin, flush=True)
            return process.stdout.readline()

        first = told()
        path, _, answer = first.rpartition(" ")
        assert answer == "42\n"
        whole = Path(path).read_bytes()
        half = len(whole) // 2
        for damage, damaged in {
            "cut short": whole[:half],
            "half zeros": whole[:half] + bytes(half),
            "a flipped bit": whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :],
            "empty": b"",
            "garbage": b"garbage",
        }.items():
            Path(path).write_bytes(damaged)
            assert told() == first, damage
            assert Path(path).read_bytes() != damaged


@needs_nvcc
def test_a_cells_kernel_that_was_cut_short_on_disk_is_written_again(cache, monkeypatch):
    monkeypatch.setattr(toolchain, "architecture", lambda: "80")
    text = SMALL.replace('#include "answer.cuh"', "#define ANSWER 42")
    built = native.compile_source(text, "mine").path
    [written] = cache.glob("eet-lab/sources/*.cu")
    written.write_text(text[:40])
    assert native.compile_source(text, "mine").path == built
    assert written.read_text() == text


@needs_nvcc
@pytest.mark.parametrize("who", ["Python", "the compiler"])
def test_a_full_disk_is_told_in_one_line(cache, small, monkeypatch, who):
    def full(*args, **keywords):
        if who == "Python":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise KernelBuildError("A CUDA kernel does not compile:\nld: final link failed: No space left on device")

    monkeypatch.setattr(build_module, "_run_ninja", full)
    with pytest.raises(KernelBuildError, match=r"^The disk is full: .* 100 MiB, .* MiB in .*kernels.sm_80") as told:
        native.build([small], arch="80")
    assert "\n" not in str(told.value) and "XDG_CACHE_HOME" in str(told.value)


@needs_nvcc
@pytest.mark.parametrize("name", ["small-*.sha256", "small-*.so", "build.ninja", "lock", ""])
def test_what_is_in_the_way_of_a_build_is_named(cache, small, name):
    library = native.build([small], arch="80", extra_flags=FOR_THE_HOST)[str(small)]
    [path] = library.parent.glob(name) if name else [library.parent]
    if name in ("build.ninja", "lock"):
        library.unlink()  # they are for what is built alone
    (path.unlink if name else lambda: shutil.rmtree(path))()
    (path.mkdir if name else path.touch)()
    with pytest.raises(
        KernelBuildError, match=rf"{path} cannot be used.*{'Is a directory' if name else 'File exists'}.* Remove it"
    ):
        native.build([small], arch="80", extra_flags=FOR_THE_HOST)
    (path.rmdir if name else path.unlink)()
    assert run(native.build([small], arch="80", extra_flags=FOR_THE_HOST)[str(small)]) == 42


@needs_nvcc
def test_a_killed_build_leaves_no_lock(cache, small):
    script = "from eet_lab.ops import native; native.build(['append'], arch='80')"  # its compiler goes on without it
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    while not (cache / "eet-lab" / "kernels" / "sm_80" / "build.ninja").exists():
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    assert run(native.build([small], arch="80", extra_flags=FOR_THE_HOST)[str(small)]) == 42
    assert time.monotonic() - began < 20


@needs_nvcc
def test_two_processes_build_the_same_at_once(cache, small):
    script = f"""
import os, sys
from eet_lab.ops import native
if all(os.fork() for _ in range(3)):
    sys.exit(any([os.wait()[1] for _ in range(3)]))
print(native.build([{str(small)!r}], arch="80", extra_flags={FOR_THE_HOST}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    assert len(told) == 3 and len(set(told)) == 1
    assert run(native.build([small], arch="80", extra_flags=FOR_THE_HOST)[str(small)]) == 42


def test_a_lock_that_another_holds_can_be_given_up(tmp_path):
    import fcntl

    from eet_lab.ops.native.build import _locked

    stop = threading.Event()
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        threading.Timer(0.1, stop.set).start()
        with pytest.raises(Cancelled), _locked(tmp_path / "lock", stop):
            pytest.fail("the lock was taken twice")


@needs_nvcc
def test_the_headers_found_by_name_are_those_that_the_preprocessor_reads():
    """nvcc has the host compiler do that; here it leaves out CUDA's own headers, which are much the most."""
    preprocess = [toolchain.host_compiler(), "-M", "-MG", "-nostdinc", "-xc++", "-D__CUDACC__"]
    for name in native.all_names():
        told = subprocess.run(
            [*preprocess, f"-I{source(name).parent}", source(name)], capture_output=True, text=True, check=True
        ).stdout
        read = {Path(part).resolve() for part in told.replace("\\\n", " ").split()[1:]}
        ours = {path for path in read if path.is_relative_to(source(name).parent)}
        assert ours == includes(source(name))


def test_the_key_depends_on_flags(small, monkeypatch):
    monkeypatch.setattr(toolchain, "nvcc_version", lambda nvcc: "13.0.0")
    assert key(small, Path("nvcc"), ["-O3"]) != key(small, Path("nvcc"), ["-O2"])


def test_a_key_follows_its_headers_and_reads_nothing_while_they_stay(small, monkeypatch):
    monkeypatch.setattr(toolchain, "nvcc_version", lambda nvcc: "13.0.0")
    header = small.parent / "told.cuh"
    header.write_text("// one")
    small.write_text(f'#include "told.cuh"\n{small.read_text()}')
    keys = [key(small, Path("nvcc"), [])]
    with monkeypatch.context() as closed:
        closed.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
        assert key(small, Path("nvcc"), []) == keys[0]
    for change in (lambda: header.write_text("// two!"), header.unlink):
        change()
        keys.append(key(small, Path("nvcc"), []))
    header.write_text("// one")
    assert len(set(keys)) == 3 and key(small, Path("nvcc"), []) == keys[0]


def test_what_is_loaded_is_prepared_again_only_once_a_file_was_written(small, monkeypatch):
    """It is asked before every request: no build is looked for, and no path is resolved."""
    built, loaded = [], {}

    def build(names, **how):
        built.append(tuple(names))
        return {name: Path(f"{len(built)}.so") for name in names}

    monkeypatch.setattr(launchers, "build", build)
    monkeypatch.setattr(launchers, "_current", loaded)
    monkeypatch.setattr(launchers, "_at", lambda name, path: loaded.__setitem__(name, path))
    monkeypatch.setattr(launchers, "_prepared", {})
    header, names = small.parent / "answer.cuh", [str(small)]
    for change, builds in (
        (lambda: None, 1),
        (lambda: None, 1),
        (lambda: header.write_text("#define ANSWER 4321\n"), 2),
        (lambda: None, 2),
        (loaded.clear, 3),
        (header.unlink, 4),
    ):
        change()
        native.prepare(iter(names))
        assert len(built) == builds and loaded == {str(small): Path(f"{builds}.so")}


def test_no_nvcc_is_an_error_that_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "_nvcc_candidates", lambda: iter([tmp_path / "nvcc"]))
    toolchain.find_nvcc.cache_clear()
    try:
        with pytest.raises(KernelBuildError, match=r"nvcc is missing: looked at .*pip install -c \S+ .*\[cuda\]'"):
            toolchain.find_nvcc()
    finally:
        toolchain.find_nvcc.cache_clear()


def test_no_ninja_and_no_compiler_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KernelBuildError, match="pip install ninja"):
        toolchain.ninja()
    with pytest.raises(KernelBuildError, match="apt-get install g"):
        toolchain.host_compiler()


def test_a_source_that_does_not_exist_is_named():
    with pytest.raises(KernelBuildError, match=r"nothing\.cu.*Sources in csrc/:.*linear"):
        native.build(["nothing"], arch="80")


def test_a_cpu_has_no_kernels():
    assert "NVIDIA GPU" in native.available("cpu")


def test_a_linker_error_is_not_hidden():
    log = ["[1/1] x.cu", "FAILED: x.so", "nvcc x.cu", "/usr/bin/ld: cannot find -lfoo", "ninja: build stopped."]
    assert "cannot find -lfoo" in explain(log)


@pytest.mark.parametrize("name", ["a b", "../x", ""])
def test_a_cells_kernel_needs_a_plain_name(name):
    with pytest.raises(KernelBuildError, match="cannot name a kernel source"):
        native.compile_source("", name)
