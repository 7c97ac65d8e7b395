"""A full memory, of a GPU or of the machine, told in words: which buffer did not fit, and what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from eet_lab.errors import OutOfMemory

OTHERS = "Another engine may hold memory: its close() gives it back."
REMEDY = f"Use fewer or shorter prompts, fewer new tokens, a smaller model, or half precision. {OTHERS}"
CPU_ALLOCATOR = "DefaultCPUAllocator"  # how torch's message about the CPU's memory names it
MESSAGES = (CPU_ALLOCATOR, "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory (CUDA error 2)")
"""What torch says of the CPU's memory, the driver of what it allocates itself, cuBLAS, and a launch of ours."""


@contextmanager
def memory_for(
    what: str | Callable[[], str],
    *,
    remedy: str | Callable[[], str] = REMEDY,
    free: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Turn torch's out-of-memory error into OutOfMemory, which names the buffer and its size; also a decorator.

    `what` is the buffer, or tells it when asked, and so does `remedy` when the memory is free again; `free` gives back
    what else the caller holds. By the time the error is raised, the memory of whatever ran inside is free again.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # its frames hold the tensors that must be freed
        free()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        buffer = what if isinstance(what, str) else what()
        whose = "This machine's" if CPU_ALLOCATOR in str(error) else "The GPU's"
        raise OutOfMemory(
            f"{whose} memory is full: {buffer} could not be allocated ({_wanted(error)}). What was begun has "
            f"ended and its memory is free again. {_told(remedy)}"
        ) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch found no memory: it has an error of its own for a GPU, but none for the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(name in str(error) for name in MESSAGES)


def _told(remedy: str | Callable[[], str]) -> str:
    """What to do; REMEDY where that cannot be told, since the error that it belongs to matters more."""
    if isinstance(remedy, str):
        return remedy
    try:
        return remedy()
    except Exception:  # noqa: BLE001  whatever it is
        return REMEDY


def _wanted(error: RuntimeError) -> str:
    """The sentence that tells the size, or else the first."""
    if in_bytes := re.search(r"tried to allocate (\d+) bytes", str(error)):
        return f"Tried to allocate {int(in_bytes[1]) / 2**30:,.2f} GiB"
    sentences = str(error).split(". ")
    return next((each.strip() for each in sentences if "Tried to allocate" in each), sentences[0])
