"""TurboTransformers' planner: a list of chunks, which grows and shrinks as requests of varying length come.

Source: Fang et al., "TurboTransformers: An Efficient GPU Serving System For Transformer Models" (PPoPP 2021), and its
published artifact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from eet_lab.errors import PlanError
from eet_lab.memory.gaps import Occupancy
from eet_lab.memory.lifetimes import ALIGNMENT, Chunk, Lifetime, Plan, aligned
from eet_lab.memory.pools import LedgerPool

ORDERS = ("arrival", "ascending")
RELEASES = {"immediate": 1, "idle": 8, "never": inf}
"""When a chunk is given back: after so many requests in a row that left it empty."""


class ChunkedPool(LedgerPool):
    """Chunks of at least `chunk_bytes`; the largest tensor first, each in the first chunk with a gap for it.

    In a chunk it takes the smallest gap that fits. Where no chunk has one, a new chunk is made, `scale` times as large
    as the tensor, so that the next request may be a little longer. Chunks are searched in `order`: "arrival", as in the
    paper's Python, or "ascending" in size, as in its C++. `release` is one of RELEASES ("immediate": the paper's).

    `alignment` rounds the chunks' sizes up, and offsets are multiples of it.
    """

    def __init__(
        self,
        order: str = "arrival",
        release: str = "immediate",
        chunk_bytes: int = 2 * 2**20,
        scale: float = 1.2,
        alignment: int = ALIGNMENT,
    ) -> None:
        for what, value, known in (("order", order, ORDERS), ("release", release, tuple(RELEASES))):
            if value not in known:
                raise PlanError(f"{what} is {value!r}, but it must be one of {', '.join(known)}.")
        if chunk_bytes < 1 or scale < 1:
            raise PlanError(
                f"chunk_bytes is {chunk_bytes} and scale is {scale}, but both must be at least 1: a chunk holds the "
                "tensor that it is made for."
            )
        super().__init__()
        self._by_size = order == "ascending"
        self._patience = RELEASES[release]
        self._chunk_bytes, self._scale, self._alignment = chunk_bytes, scale, alignment
        self._idle: dict[Chunk, int] = {}  # requests in a row that left the chunk empty

    def place(self, lifetimes: Sequence[Lifetime]) -> Plan:
        offsets = [0] * len(lifetimes)
        inside = {chunk: Occupancy(self._alignment) for chunk in self._searched()}
        for i in sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i].num_bytes):
            life = lifetimes[i]
            if not life.num_bytes:
                break  # those that follow are empty as well
            found = next(_homes(life, inside), None)
            if found is None:
                found = self.allocate(self._new_bytes(life)), 0
                inside[found[0]] = Occupancy(self._alignment)
                inside = {chunk: inside[chunk] for chunk in self._searched()}
            chunk, offset = found
            inside[chunk].take(life, offset)
            offsets[i] = chunk.start + offset
        self._release(inside)
        return Plan(tuple(lifetimes), tuple(offsets), self.chunks)

    def _searched(self) -> list[Chunk]:
        return sorted(self.held, key=lambda chunk: chunk.num_bytes) if self._by_size else list(self.held)

    def _new_bytes(self, life: Lifetime) -> int:
        return max(self._chunk_bytes, aligned(int(life.num_bytes * self._scale), self._alignment))

    def _release(self, inside: dict[Chunk, Occupancy]) -> None:
        self._idle = {chunk: self._idle.get(chunk, 0) + 1 if taken.empty else 0 for chunk, taken in inside.items()}
        for chunk, idle in self._idle.items():
            if idle >= self._patience:
                self.free(chunk)


def _homes(life: Lifetime, inside: dict[Chunk, Occupancy]) -> Iterator[tuple[Chunk, int]]:
    """The chunks that have a gap for it, each with the start of the smallest; its end only where no other gap fits."""
    for chunk, taken in inside.items():
        *inner, (top, _) = taken.gaps(life)
        fitting = [(stop - start, start) for start, stop in inner if stop - start >= life.num_bytes]
        if fitting:
            yield chunk, min(fitting)[1]
        elif top + life.num_bytes <= chunk.num_bytes:
            yield chunk, top
