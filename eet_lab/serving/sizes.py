"""What profiles of encoders and decoders share: which sizes are measured, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from eet_lab.bench.timing import SHARED, check
from eet_lab.progress import Cancel
from eet_lab.scheduling.cost import Provenance

REPEATS = 3
"""How often each time is taken, after a pass that warms up."""


def powers(first: int, factor: int, most: int) -> tuple[int, ...]:
    """first, first * factor, ..., and `most` itself."""
    found = []
    while first < most:
        found.append(first)
        first *= factor
    return (*found, most)


class Timed(NamedTuple):
    """A pass that was timed, and whether other programs kept the processor from it meanwhile."""

    ms: float
    was_disturbed: bool


def median_of(run: Callable[[], Timed], repeats: int, cancel: Cancel | None) -> Timed:
    """The median of so many, after one that warms up; those that were disturbed count only if all were."""
    found = []
    for _ in range(1 + repeats):
        check(cancel)
        found.append(run())
    quiet = [timed for timed in found[1:] if not timed.was_disturbed]
    return Timed(median(timed.ms for timed in quiet or found[1:]), not quiet)


def noted(source: Provenance, times: Iterable[Timed]) -> Provenance:
    """The provenance, which says so where the processor was shared."""
    if not any(timed.was_disturbed for timed in times):
        return source
    return replace(source, note="; ".join(filter(None, (source.note, SHARED))))
