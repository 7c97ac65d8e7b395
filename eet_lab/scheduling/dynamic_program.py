"""TurboTransformers' dynamic program: the partition of a queue into padded batches that takes the least time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def cheapest(
    lengths: Sequence[int], costs: Callable[[int, int], np.ndarray | Sequence[float]], most_rows: int
) -> list[tuple[int, int]]:
    """The cheapest partition of requests of such lengths, which must not fall, into batches of at most `most_rows`: the
    slices [begin, end) of the batches, in order.

    `costs(length, rows)` are the times of batches of 1, 2, ... and so many requests, padded to `length`; one must be
    finite for some batch that ends with each request, such as itself alone. best[i] = min over k of best[i - k] + the
    time of k requests padded to lengths[i - 1]. With sorted lengths some optimal partition is contiguous, if no time
    falls with the length. N requests take N min(N, most_rows) additions, so many at a time.
    Source: Fang et al., TurboTransformers (PPoPP 2021).
    """
    import numpy as np  # not above: policies are chosen where no numbers are computed

    best, sizes = np.zeros(len(lengths) + 1), [0]
    rows = min(len(lengths), most_rows)
    times = {length: np.asarray(costs(length, rows))[::-1] for length in dict.fromkeys(lengths)}  # the most rows first
    for number, length in enumerate(lengths, 1):
        most = min(number, rows)
        totals = best[number - most : number] + times[length][rows - most :]
        least = int(totals.argmin())
        best[number] = totals[least]
        sizes.append(most - least)
    slices, end = list[tuple[int, int]](), len(lengths)
    while end:
        slices.append((end - sizes[end], end))
        end -= sizes[end]
    return slices[::-1]


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


def figure_8_costs(length: int, rows: int) -> list[float]:
    """The figure's times of 1, 2, ... and so many requests; what it does not show is infinite."""
    return [FIGURE_8.get((length, each), inf) for each in range(1, rows + 1)]
