"""Whether an op's inputs fit into memory, told before any of them is made."""

from __future__ import annotations

from pathlib import Path

import torch

from eet_lab.bench.ops.workload import OpWorkload
from eet_lab.errors import OutOfMemory

DRAWN_BYTES = 4  # random numbers are drawn on the host in fp32
EXACT_BYTES = 8  # the reference computes in fp64
GIB = 2**30


def check_room(workload: OpWorkload, device: str, dtype: torch.dtype, num_copies: int) -> None:
    """OutOfMemory where what is sure to be made is more than what is free.

    That is the numbers as they are drawn, `num_copies` of the inputs, each again as a provider lays it out, and, on the
    CPU, the reference in fp64: a GPU without room for that is timed unchecked.
    """
    numbers = workload.shape.held_bytes(1)
    host, copies = numbers * (DRAWN_BYTES + dtype.itemsize), 2 * num_copies * numbers * dtype.itemsize
    if device == "cpu":
        _check(workload, "this machine", host + copies + 2 * numbers * EXACT_BYTES, host_free_bytes())
    else:
        _check(workload, "this machine", host, host_free_bytes())
        _check(workload, "the GPU", copies, torch.cuda.mem_get_info()[0])


def host_free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What programs may still take without swapping, as Linux estimates it; None where that is not told."""
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _check(workload: OpWorkload, where: str, needed: int, free: int | None) -> None:
    if free is not None and needed > free:
        raise OutOfMemory(
            f"{workload} needs about {needed / GIB:,.1f} GiB, but {where} has {free / GIB:,.1f} GiB free. "
            "Give smaller sizes, or half precision."
        )
