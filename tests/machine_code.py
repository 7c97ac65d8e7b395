"""The machine code that tests read, of all its sources at once, and what was found good of it.

The same text gives the same machine code: `CHECKED` has a line for each check of each source that passed. As a program
this makes what is still to be read, where there is what makes it. It needs nothing but Python's standard library, so
that `make test` runs it beside pip, which leaves cores idle.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from eet_lab.errors import KernelBuildError, SetupError
from eet_lab.ops import native
from eet_lab.ops.native import toolchain
from eet_lab.ops.native.build import FLAGS
from eet_lab.paths import csrc_dir

CHECKED = Path(__file__).with_name("checked_kernels.txt")

MACHINE_CODE = ("-fatbin", "-Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error")
"""And nothing else: the compiler of kernels reads launchers too, and finds their errors. To compile and link them for
the host takes a quarter of the time, and `host_code` does so with some."""
RINGS = (
    "linear",
    "vector_linear",
    "register_linear",
    "wgmma_linear",
    "vector_layer",
    "int8_linear",
    "stream_attention",
    "balanced_attention",
    "hopper_attention",
)
"""Kernels that leave a stage of shared memory to whoever fills it next."""
SMALL = "append"
"""A source that two ways of assembling are compared with."""


def machine_code(names: tuple[str, ...]) -> dict[str, Path]:
    """For an H100, in the cache."""
    return native.build(names, arch="90a", extra_flags=MACHINE_CODE)


def unchecked(
    check: str, names: Sequence[str], folder: Path, by: Path | None = None
) -> tuple[list[str], tuple[str, ...]]:
    """The lines of these sources in `folder` that `CHECKED` would have, and the names of those that it has not.

    `by`: a file whose text decides what is good.
    """
    found, known = digests(folder, by), CHECKED.read_text().splitlines()
    lines = {name: f"{check} {name} {found[name]}" for name in names}
    return [*lines.values()], tuple(name for name, line in lines.items() if line not in known)


def unread() -> tuple[list[str], tuple[str, ...]]:
    """The same of `RINGS`, by the test that reads their machine code."""
    return unchecked("rings", RINGS, csrc_dir(), Path(__file__).with_name("test_machine_code.py"))


def write_down(file: Path, check: str, lines: Iterable[str]) -> None:
    """These are all lines of this check; those of others stay, also where another process writes them now."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        others = [line for line in file.read_text().splitlines() if not line.startswith(f"{check} ")]
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as whole:
            whole.write("".join(f"{line}\n" for line in sorted([*others, *lines])))
        os.chmod(whole.name, file.stat().st_mode)
        os.replace(whole.name, file)  # whoever reads it meanwhile finds the one or the other
    finally:
        os.close(folder)


def digests(folder: Path, by: Path | None) -> dict[str, str]:
    """Of each source a hash of all that its machine code, and a check, depend on. Any header may be one of it."""
    compiler = toolchain.nvcc_version(toolchain.find_nvcc()), FLAGS, MACHINE_CODE
    common = hashlib.sha256(repr(compiler).encode())
    if by is not None:
        common.update(by.read_bytes())
    for file in sorted(folder.rglob("*.cuh"), key=lambda file: str(file.relative_to(folder))):
        common.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    found = {}
    for name in native.all_names():
        whole = common.copy()
        whole.update(folder.joinpath(f"{name}.cu").read_bytes())
        found[name] = whole.hexdigest()
    return found


if __name__ == "__main__":
    with suppress(KernelBuildError, SetupError):  # tests tell of it, or are skipped
        machine_code((*unread()[1], SMALL))
