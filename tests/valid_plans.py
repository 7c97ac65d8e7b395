"""Can tensors live where a plan puts them?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from eet_lab.errors import PlanError
from eet_lab.memory.lifetimes import ALIGNMENT, Chunk, Lifetime, Plan

Placed = tuple[Lifetime, int]


def validate(plan: Plan, alignment: int = ALIGNMENT) -> Plan:
    """The same plan, if it can be used; PlanError, naming who is in whose way, if not.

    Each tensor has an offset, a multiple of `alignment` bytes; lies in one of the plan's chunks, which are disjoint
    and in order; and shares no byte with another that lives at the same time.
    """
    placed = list(_placed(plan.lifetimes, plan.offsets, alignment))
    for one, other in _together(placed):
        if one[1] < _end(other) and other[1] < _end(one):
            raise PlanError(
                f"{_told(one)} and {_told(other)} are alive together and share bytes. Move one of them to where the "
                "other is not."
            )
    _validate_chunks(plan.chunks, placed)
    return plan


def _placed(lifetimes: Sequence[Lifetime], offsets: Sequence[int], alignment: int) -> Iterator[Placed]:
    """All that have bytes, with their offsets."""
    if len(offsets) != len(lifetimes):
        raise PlanError(f"There are {len(lifetimes)} tensors, but {len(offsets)} offsets; give one for each, in order.")
    for life, offset in zip(lifetimes, offsets, strict=True):
        if not isinstance(offset, int) or offset < 0 or offset % alignment:
            raise PlanError(f"{life.name} is at {offset!r}; an offset is a multiple of {alignment} from 0 on.")
        if life.num_bytes:
            yield life, offset


def _together(placed: list[Placed]) -> Iterator[tuple[Placed, Placed]]:
    """All pairs that are alive at the same time."""
    by_first = sorted(placed, key=lambda entry: entry[0].first)
    for i, one in enumerate(by_first):
        for other in by_first[i + 1 :]:
            if other[0].first > one[0].last:
                break
            yield one, other


def _validate_chunks(chunks: Sequence[Chunk], placed: list[Placed]) -> None:
    for one, other in pairwise(chunks):
        if one.end > other.start:
            raise PlanError(
                f"chunk {one.id} (bytes {one.start} to {one.end}) and chunk {other.id} (bytes {other.start} to "
                f"{other.end}) overlap or are not in order of their start."
            )
    starts = [chunk.start for chunk in chunks]
    for entry in placed:
        at = bisect_right(starts, entry[1]) - 1
        if at < 0 or _end(entry) > chunks[at].end:
            raise PlanError(f"{_told(entry)} lies in no chunk, or crosses a chunk's end. Move it into a chunk.")


def _end(entry: Placed) -> int:
    return entry[1] + entry[0].num_bytes


def _told(entry: Placed) -> str:
    life, offset = entry
    return f"{life.name} (requests {life.first} to {life.last}, bytes {offset} to {_end(entry)})"
