"""What the assembler made of kernels with rings: a stage is left only when what was loaded from it has arrived, no
branch waits for a table, and no product of a warpgroup for the one before it.

`mbarrier.arrive` orders the loads before it, but the assembler (CUDA 13.0) lets it go while loads from shared memory
are under way, and where another kernel's loads hold those up, it overtakes them. So a kernel has to use what it loaded
first; whether it does shows in the machine code alone.
"""

from __future__ import annotations

import re
import shutil
import site
import subprocess
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from machine_code import CHECKED, SMALL, machine_code, unread, write_down

from eet_lab.ops.native import toolchain

WGMMA = ("wgmma_linear", "hopper_attention")
"""Kernels that multiply by warpgroups."""
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/")
CONTROL = re.compile(r"/\* (0x[0-9a-f]{16}) \*/")


def cuobjdump() -> str | None:
    """Of a CUDA toolkit, or of the wheel that the tests bring."""
    wheels = (Path(folder) / "nvidia" / "cu13" / "bin" / "cuobjdump" for folder in site.getsitepackages())
    return shutil.which("cuobjdump") or next((str(path) for path in wheels if path.exists()), None)


def instructions(library: Path) -> Iterator[tuple[str, str, int]]:
    """Of all kernels: place, text, and the bits that say what it waits for and what waits for it."""
    command = [str(cuobjdump()), "-sass", "-arch", "sm_90a", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines, kernel = listed.splitlines(), ""
    for line, below in pairwise(lines):
        if "Function :" in line:
            kernel = line.split()[-1]
        elif found := INSTRUCTION.match(line):
            control = CONTROL.search(below)
            assert control, below
            yield f"{kernel} {found[1]}", found[2], int(control[1], 16) >> 41


def early_arrivals(code: Iterable[tuple[str, str, int]]) -> tuple[int, list[str]]:
    """How many arrivals there are, and those with loads from shared memory under way that nothing has waited for."""
    num_arrivals, early, under_way, kernel = 0, [], dict[int, str](), ""
    for place, text, control in code:
        if place.split()[0] != kernel:
            kernel, under_way = place.split()[0], {}
        signals, waits = control >> 5 & 7, control >> 11 & 63
        under_way = {scoreboard: load for scoreboard, load in under_way.items() if not waits >> scoreboard & 1}
        if re.search(r"\bLDSM?\b", text) and signals != 7:
            under_way[signals] = place
        if "SYNCS.ARRIVE.TRANS64.A1T0" in text:
            num_arrivals += 1
            early += [place] * bool(under_way)
    return num_arrivals, early


def serialized(code: Iterable[tuple[str, str, int]]) -> list[str]:
    """The kernels whose products of a warpgroup wait for each other: all of them are committed, and none is pending.

    The assembler says so (C7518), but as information: it made a layer's products 6 % slower (LOG).
    """
    committed = dict[str, list[bool]]()
    for place, text, _ in code:
        if "HGMMA" in text:
            committed.setdefault(place.split()[0], []).append("gsb0" in text)
    return [kernel for kernel, products in committed.items() if all(products)]


@pytest.fixture(scope="module", autouse=True)
def reads_machine_code() -> None:
    if not cuobjdump():
        pytest.skip("cuobjdump is not here: it comes with a whole CUDA toolkit, or with pip install '.[test]' on Linux")


@pytest.mark.timeout(600)
def test_several_cores_assemble_what_one_does(monkeypatch):
    together = machine_code((SMALL,))[SMALL]
    monkeypatch.setattr(toolchain, "parallel", lambda nvcc: ())
    alone = machine_code((SMALL,))[SMALL]
    assert alone != together
    assert (found := list(instructions(alone))) and found == list(instructions(together))


@pytest.mark.timeout(600)
def test_no_arrival_goes_ahead_of_loads_and_nothing_waits_for_a_table_or_for_another_product():
    """Of each source that this very test did not find good before (`CHECKED`).

    A branch by a table reads constant memory, for which a kernel would wait when the one ahead has ended (LOG).
    """
    now, new = unread()
    for name, library in machine_code(new).items() if new else ():
        code = list(instructions(library))
        num_arrivals, early = early_arrivals(code)
        assert num_arrivals and not early, name
        assert not [place for place, text, _ in code if re.search(r"\bBRX\b", text)], name
        assert any("HGMMA" in text for _, text, _ in code) == (name in WGMMA) and not serialized(code), name
    if new:
        write_down(CHECKED, "rings", now)


def test_products_that_wait_for_each_other_are_noticed():
    pending, last = "HGMMA.64x32x16.F32 R24, gdesc[UR12], R24", "HGMMA.64x32x16.F32 R24, gdesc[UR12], R24, gsb0"
    together = [("one 0a10", pending, 0), ("one 0a20", last, 0), ("one 0a30", "WARPGROUP.DEPBAR.LE gsb0, 0x1", 0)]
    apart = [("two 0a10", last, 0), ("two 0a20", "WARPGROUP.DEPBAR.LE gsb0, 0x0", 0), ("two 0a30", last, 0)]
    assert serialized([*together, *apart]) == ["two"]


def test_an_assembler_that_may_not_know_of_several_cores_is_not_told(monkeypatch):
    for version, has_it in (("12.9.86", False), ("13.0.88", True), ("14.1.2", True)):
        monkeypatch.setattr(toolchain, "nvcc_version", lambda nvcc, version=version: version)
        assert bool(toolchain.parallel(Path("nvcc"))) == has_it
