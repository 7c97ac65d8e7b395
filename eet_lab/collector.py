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


YOUNG = 20_000
"""New objects that bring the collector of a process that answers requests; Python's own number is 700."""


def collect_rarely() -> None:
    """Let the collector come less often, for good. Only for a process of ours in which no cycle may hold a tensor.

    Requests in flight are new objects, which it would walk in vain, for 5 ms and more at a time.
    """
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
