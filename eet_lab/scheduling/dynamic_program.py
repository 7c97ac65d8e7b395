"""TurboTransformers' dynamic program: the partition of a queue into padded batches that takes the least time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add
from typing import NamedTuple


class Partition(NamedTuple):
    """Slices [begin, end) of requests in order of their lengths, the shortest first, and what they cost together."""

    slices: tuple[tuple[int, int], ...]
    cost_ms: float


def cheapest(lengths: Sequence[int], cost: Callable[[int, int], float], most_rows: int) -> Partition:
    """The cheapest partition of requests of such lengths, which must not fall, into batches of at most `most_rows`.

    `cost(length, batch)` is the time of a batch that is padded to `length`; it must be finite for some batch that ends
    with each request, such as itself alone. best[i] = min over k of best[i - k] + cost(lengths[i - 1], k). With sorted
    lengths some optimal partition is contiguous, if cost never falls with the length. N requests take
    N min(N, most_rows) additions. Source: Fang et al., TurboTransformers (PPoPP 2021).
    """
    best, sizes = [0.0], [0]
    costs_of: dict[int, list[float]] = {}
    for number, length in enumerate(lengths, 1):
        most = min(number, most_rows)
        costs = costs_of.get(length)  # of most_rows, ..., 2, 1 requests
        if costs is None:
            costs = costs_of[length] = [cost(length, rows) for rows in range(min(len(lengths), most_rows), 0, -1)]
        totals = list(map(add, best[number - most :], costs[len(costs) - most :]))
        least = min(totals)
        best.append(least)
        sizes.append(most - totals.index(least))
    slices, end = list[tuple[int, int]](), len(lengths)
    while end:
        slices.append((end - sizes[end], end))
        end -= sizes[end]
    return Partition(tuple(reversed(slices)), best[-1])


FIGURE_8 = {
    (17, 1): 2.97,
    (18, 1): 2.97,
    (52, 1): 4.54,
    (63, 1): 4.61,
    (77, 1): 5.53,
    (18, 2): 4.35,
    (63, 2): 5.36,
}
"""TurboTransformers' own milliseconds of (length, batch), read off figure 8 of the paper: all that it shows.

Five requests of 52, 17, 63, 18 and 77 tokens take 20.62 ms one by one, and 15.24 ms as {17, 18}, {52, 63}, {77}. These
are 48.5 and 65.6 rounds a second, or 242 and 328 requests; the figure's caption counts rounds and says responses.
"""
FIGURE_8_LENGTHS = (52, 17, 63, 18, 77)
