"""One run of many requests: what any way of serving them comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ServingRun(NamedTuple):
    """Seconds in all, and for each request the ms to its first token and to its last, and how many tokens it got.

    What it got is told by `tokens`, or by `texts` where only these came.
    """

    total_s: float
    first_ms: Sequence[float]
    last_ms: Sequence[float]
    counts: Sequence[int]
    tokens: Sequence[Sequence[int]] | None = None
    texts: Sequence[str] | None = None

    @property
    def tok_s(self) -> float:
        return sum(self.counts) / self.total_s

    @property
    def tpot_ms(self) -> list[float]:
        """The times of the requests that have more than one token."""
        each = zip(self.first_ms, self.last_ms, self.counts, strict=True)
        return [(last - first) / (count - 1) for first, last, count in each if count > 1]
