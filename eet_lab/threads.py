"""Threads of torch on the CPU, of which one core is left to the page and the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_cpu_threads() -> int:
    """All cores that this process may use but one, and at least one.

    With every core taken, whatever else runs makes all threads of an operation wait for the one that it pushed aside.
    """
    return max(1, num_cores() - 1)


@contextmanager
def cpu_threads(device: str) -> Iterator[None]:
    """A block in which the calling thread runs torch's operations on `num_cpu_threads`, or fewer where fewer are set.

    No effect where `device` is not "cpu". torch keeps the setting per thread, so that others are not touched.
    """
    before = torch.get_num_threads()
    if device != "cpu" or before <= num_cpu_threads():
        yield
        return
    torch.set_num_threads(num_cpu_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)
