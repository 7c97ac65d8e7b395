"""Python's garbage collector: when it runs, and which objects it skips."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 20_000
"""How many new objects start a collection in a process that answers requests; Python's default is 700."""


@contextmanager
def no_collection() -> Iterator[None]:
    """No collection starts within the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def freeze_heap() -> None:
    """Let the collector skip all objects that exist now, mostly modules, for good. Only for a process of ours.

    To walk all of them takes 100 ms and more, again and again under load, and nothing is answered meanwhile.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """The same within the block alone, in any process that has not done so itself. Garbage waits for its end."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def collect_rarely() -> None:
    """Let the collector run less often, for good. Only for a process of ours in which no cycle may hold a tensor.

    Requests in flight are new objects, which it would walk in vain, for 5 ms and more at a time.
    """
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
