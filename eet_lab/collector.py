"""Python's garbage collector: when it waits, and what it leaves alone."""

from __future__ import annotations

import gc
from contextlib import contextmanager

TYPE_CHECKING = False  # as type checkers take it: `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_collection() -> Iterator[None]:
    """The collector waits until the end of the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def freeze_heap() -> None:
    """Let the collector leave alone what is there now, for good: modules, above all. Only for a process of ours.

    To walk all of them takes it 100 ms and more, in which nothing is answered, again and again under load.
    """
    gc.collect()
    gc.freeze()
