"""A full GPU, told in words: which buffer did not fit, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from eet_lab.errors import OutOfMemory

REMEDY = "Use fewer or shorter prompts, fewer new tokens, a smaller model, or half precision."


@contextmanager
def memory_for(
    what: str | Callable[[], str], *, remedy: str = REMEDY, free: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Turn torch's out-of-memory error into OutOfMemory, which names the buffer and its size; also a decorator.

    `what` is the buffer, or tells it when asked; `free` gives back what else the caller holds. By the time the error
    is raised, the memory of whatever ran inside is free again.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # its frames hold the tensors that must be freed
        free()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        buffer = what if isinstance(what, str) else what()
        raise OutOfMemory(
            f"The GPU's memory is full: {buffer} could not be allocated ({_wanted(error)}). What was begun has "
            f"ended and its memory is free again. {remedy}"
        ) from error


def _wanted(error: torch.OutOfMemoryError) -> str:
    """The sentence that tells the size."""
    sentences = str(error).split(". ")
    return next((each.strip() for each in sentences if "Tried to allocate" in each), str(error))
