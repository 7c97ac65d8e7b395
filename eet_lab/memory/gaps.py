"""Which bytes are free for as long as a tensor lives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from eet_lab.memory.lifetimes import ALIGNMENT, Lifetime, aligned


class Occupancy:
    """What is taken of a range of addresses, request by request.

    It is kept by request because few tensors are alive at one, though a pass may have a thousand: to see who is in a
    tensor's way, only the requests of its own life are looked at. What is free begins at multiples of `alignment`.
    """

    def __init__(self, alignment: int = ALIGNMENT) -> None:
        self._alignment = alignment
        self._taken: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def take(self, life: Lifetime, start: int) -> None:
        """Take these bytes from now on, while `life` lasts."""
        if life.num_bytes:
            entry = start, start + aligned(life.num_bytes, self._alignment)
            for request in range(life.first, life.last + 1):
                self._taken[request].append(entry)

    def gaps(self, life: Lifetime) -> Iterator[tuple[int, int]]:
        """The (start, stop) of all that stays free while `life` lasts, below the highest taken byte; lowest first.

        The last one is (top, top): from there on everything is free.
        """
        taken, top = self._taken, 0
        requests = range(life.first, life.last + 1)
        for start, stop in sorted({entry for request in requests for entry in taken.get(request, ())}):
            if start > top:
                yield top, start
            top = max(top, stop)
        yield top, top

    @property
    def empty(self) -> bool:
        return not self._taken
