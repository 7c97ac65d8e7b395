"""What threads tell the ui thread."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def drained(queue: SimpleQueue[T]) -> list[T]:
    """All that is in it now, without waiting."""
    taken = []
    while True:
        try:
            taken.append(queue.get_nowait())
        except Empty:
            return taken
