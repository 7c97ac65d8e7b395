"""How many threads torch may use on the CPU: one core is left to the page, the terminal, and whoever measures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Work = TypeVar("Work", bound=Callable[..., Any])


def num_cpu_threads() -> int:
    """All cores that this process may use but one, and at least one.

    With every core taken, whatever else runs makes all threads of an operation wait for the one that it pushed aside.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


@contextmanager
def cpu_threads(device: str) -> Iterator[None]:
    """Within the block the calling thread runs torch's operations on `num_cpu_threads`, or fewer where fewer are set.

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


def on_cpu_threads(work: Work) -> Work:
    """A decorator for functions of a model: they run within `cpu_threads` of its device."""

    @wraps(work)
    def within(model: Any, *args: Any, **keywords: Any) -> Any:
        with cpu_threads(model.device):
            return work(model, *args, **keywords)

    return cast(Work, within)
