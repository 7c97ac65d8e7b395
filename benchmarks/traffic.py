"""What the kernels of a decode step read from memory, by Nsight Compute's counters, beside what their cases declare.

    python benchmarks/traffic.py          on a GPU whose counters may be read, with ncu on the PATH

Launches are made again in a process without PyTorch (sanitize/), each from a cold L2 cache. The exit status is 1 where
a kernel reads less or more than it says.
"""

from __future__ import annotations

import csv
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "sanitize"))

import torch
from record import Pass, built, record

from eet_lab.errors import EETError
from eet_lab.ops.cuda.launching import gpu
from eet_lab.ops.records import ALL_CASES

PLAY = Path(__file__).resolve().parent / "sanitize" / "play.py"
NAMES = frozenset(
    f"{size}{kind}"
    for size in ("t1/n4800/c1600", "t8/n4800/c1600", "t1/n1600/c6400", "t8/n1600/c6400")
    for kind in ("", "/int8")
) | {"b8/kv512/h25/d64", "b1/kv4096/h25/d64", "t1/c1600/f6400"}
"""Of bench shapes, each of one launch, that are large beside what a kernel reads of other things."""
METRIC = "dram__bytes_read.sum"
NOT_ALLOWED = "ERR_NVGPUCTRPERM"
LEAST, MOST = 0.97, 1.1
"""What a kernel may read of the bytes that its case declares: outputs are among these, and are not read."""


class Traffic(NamedTuple):
    """Of one launch, in bytes."""

    name: str
    declared: int
    read: float

    @property
    def is_as_declared(self) -> bool:
        return LEAST * self.declared <= self.read <= MOST * self.declared


class NoCounters(EETError):
    """Nsight Compute is missing, or may not read this GPU's counters."""


def traffic() -> list[Traffic]:
    """Of every launch of `NAMES`, fp16. Raises NoCounters."""
    if shutil.which("ncu") is None:
        raise NoCounters("ncu is not on the PATH. Install Nsight Compute, which comes with NVIDIA's CUDA toolkit.")
    if (found := torch.cuda.get_device_capability()) != (9, 0):
        raise NoCounters(
            f"Launches are recorded as a Hopper GPU has them (9.0), and this one is {found[0]}.{found[1]}. "
            "Run it on an H100 or H200."
        )
    cases = [replace(case, shapes=case.bench) for case in ALL_CASES if case.op != "masked_attention"]
    which = Pass(gpu().num_blocks, 1 << 30, {case.op for case in cases}, NAMES, {torch.float16})
    declared = [shape.read_bytes(2) for _, shape, _ in which.calls(cases)]
    calls = record(cases, [which], training=tuple)
    if others := [call.name for call in calls if len(call.launches) != 1]:
        raise RuntimeError(f"Not one launch: {', '.join(others)}.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "launches"
        file.write_bytes(pickle.dumps(built(calls)))
        how = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--metrics", METRIC]
        play = [sys.executable, str(PLAY), str(file)]
        done = subprocess.run(["ncu", *how, *play], capture_output=True, text=True, timeout=300, check=False)
    read, told = read_bytes(done.stdout.splitlines()), (done.stdout + done.stderr)[-1000:]
    if NOT_ALLOWED in told:
        raise NoCounters(
            f"This GPU's counters may not be read ({NOT_ALLOWED}). Run as root, or allow it in the driver."
        )
    if done.returncode or len(read) != len(declared):
        raise RuntimeError(f"ncu ended with {done.returncode} and saw {len(read)} of {len(declared)} launches: {told}")
    return [Traffic(call.name, *each) for call, *each in zip(calls, declared, read, strict=True)]


def read_bytes(lines: Iterable[str]) -> list[float]:
    """Of each kernel, in order, from ncu's table: a line of names, one of units, then one a kernel."""
    table = [line for line in lines if line.startswith('"')]
    values = (row.get(METRIC) or "" for row in csv.DictReader(table))
    return [float(value.replace(",", "")) for value in values if value[:1].isdigit()]


def main() -> int:
    """Print every launch; 1 if one is not as declared."""
    found = traffic()
    for each in found:
        told = "" if each.is_as_declared else "  not as declared"
        print(f"{each.name:70} reads {each.read:12,.0f} of {each.declared:12,d} bytes{told}")
    return int(not all(each.is_as_declared for each in found))


if __name__ == "__main__":
    sys.exit(main())
