"""Exercises of lesson 7: the cheapest batches of a queue, and what padding and packing make of the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from eet_lab.lessons.exercise import formula
from eet_lab.scheduling.dynamic_program import FIGURE_8, FIGURE_8_LENGTHS

Cost = Callable[[int, int], float]


def figure_8_cost(length: int, rows: int) -> float:
    """TurboTransformers' milliseconds; infinite for batches that the figure does not show."""
    return FIGURE_8.get((length, rows), inf)


def flat_cost(length: int, rows: int) -> float:
    """A GPU with nothing else to do: nearly all of it is the launch."""
    return 5.0 + 0.001 * length * rows


def steep_cost(length: int, rows: int) -> float:
    """A processor that is full with one text: company saves nothing, and pads cost what tokens do."""
    return 0.1 * length * rows


def fitted_cost(length: int, rows: int) -> float:
    """An RTX 2060, fitted by eye to the chart of TurboTransformers' repository."""
    return 2.0 + 0.0185 * rows * length + 1.14e-5 * rows * length**2


def cheapest(lengths: Sequence[int], cost: Cost, most: int) -> float:
    """best[n] is the least time for the n shortest requests: try each size of the batch that ends with the n-th."""
    ordered, best = sorted(lengths), [0.0]
    for n in range(1, len(ordered) + 1):
        longest = ordered[n - 1]
        best.append(min(best[n - k] + cost(longest, k) for k in range(1, min(n, most) + 1)))
    return best[-1]


def _unsorted(lengths: Sequence[int], cost: Cost, most: int) -> float:
    best = [0.0]
    for n in range(1, len(lengths) + 1):
        sizes = range(1, min(n, most) + 1)
        best.append(min(best[n - k] + cost(max(lengths[n - k : n]), k) for k in sizes))
    return best[-1]


def _padded_to_the_shortest(lengths: Sequence[int], cost: Cost, most: int) -> float:
    ordered, best = sorted(lengths), [0.0]
    for n in range(1, len(ordered) + 1):
        best.append(min(best[n - k] + cost(ordered[n - k], k) for k in range(1, min(n, most) + 1)))
    return best[-1]


def _full_batches(lengths: Sequence[int], cost: Cost, most: int) -> float:
    ordered = sorted(lengths)
    groups = [ordered[at : at + most] for at in range(0, len(ordered), most)]
    return sum(cost(max(group), len(group)) for group in groups)


best_batches = formula(
    cheapest,
    {
        "figure 8, at most 5": (FIGURE_8_LENGTHS, figure_8_cost, 5),
        "a flat table, at most 8": ((40, 7, 90, 22, 61), flat_cost, 8),
        "a flat table, at most 2": ((40, 7, 90, 22, 61), flat_cost, 2),
        "a steep table, at most 8": ((40, 7, 90, 22, 61), steep_cost, 8),
        "an RTX 2060, at most 4": ((12, 480, 30, 25, 33, 470, 8, 210), fitted_cost, 4),
        "one request": ((64,), fitted_cost, 4),
    },
    {
        "At most `most` requests share a batch.": lambda lengths, cost, most: cheapest(lengths, cost, len(lengths)),
        "That is each request on its own. Try larger batches, too.": (
            lambda lengths, cost, most: sum(cost(length, 1) for length in lengths)
        ),
        "That is all requests in full batches. Smaller ones may cost less: they have fewer pads.": _full_batches,
        "Sort the requests by length first: only then is some best cut one of neighbours.": _unsorted,
        "A batch is padded to its longest request: its cost is cost(longest, k).": _padded_to_the_shortest,
    },
    "Figure 8 comes out to the hundredth of a millisecond. On a flat table it makes the largest batches, on a steep "
    "one the smallest: the cost table decides, and it must be yours.",
    names=("ms",),
    otherwise="Sort by length. The n shortest take best[n] = the least of best[n - k] + cost(length of the n-th, k).",
)
"""TurboTransformers' dynamic program."""


def pads_and_passes(lengths: Sequence[int], rows: int, budget: int) -> tuple[int, int]:
    """Padded batches of `rows` in the order of arrival; packed passes of at most `budget` tokens in the same order."""
    groups = [lengths[at : at + rows] for at in range(0, len(lengths), rows)]
    pads = sum(len(group) * max(group) - sum(group) for group in groups)
    passes, left = 0, 0
    for length in lengths:
        if length > left:
            passes, left = passes + 1, budget
        left -= length
    return pads, passes


def _first_fit(lengths: Sequence[int], budget: int) -> int:
    rooms = list[int]()
    for length in lengths:
        at = next((at for at, room in enumerate(rooms) if room >= length), None)
        if at is None:
            rooms.append(budget - length)
        else:
            rooms[at] -= length
    return len(rooms)


count_pads = formula(
    pads_and_passes,
    {
        "lengths 10, 50, 20, 40, rows 2, budget 64": ((10, 50, 20, 40), 2, 64),
        "lengths 60, 60, 4, 60, 4, rows 3, budget 64": ((60, 60, 4, 60, 4), 3, 64),
        "five equal ones, rows 2, budget 32": ((16,) * 5, 2, 32),
        "short ones and a long one, rows 4, budget 256": ((8, 12, 240, 9, 11, 7, 200, 10, 6), 4, 256),
        "four of 33, then four of 12, rows 4, budget 64": ((33,) * 4 + (12,) * 4, 4, 64),
        "one request, rows 8, budget 128": ((100,), 8, 128),
    },
    {
        "The last batch may be smaller: rows that nobody has are no pads.": (
            lambda lengths, rows, budget: (
                sum(
                    rows * max(lengths[at : at + rows]) - sum(lengths[at : at + rows])
                    for at in range(0, len(lengths), rows)
                ),
                None,
            )
        ),
        "Each batch is padded to its own longest request, not to the longest of all.": (
            lambda lengths, rows, budget: (len(lengths) * max(lengths) - sum(lengths), None)
        ),
        "Batches are formed in the order of arrival, not by length.": (
            lambda lengths, rows, budget: (pads_and_passes(sorted(lengths), rows, budget)[0], None)
        ),
        "That is the whole rectangle. Pads are what is left of it without the tokens.": (
            lambda lengths, rows, budget: (pads_and_passes(lengths, rows, budget)[0] + sum(lengths), None)
        ),
        "That is the work over the budget. It is never less, but a request is not cut in two here.": (
            lambda lengths, rows, budget: (None, -(-sum(lengths) // budget))
        ),
        "A request that does not fit begins a pass, and later ones go behind it: nobody is put into an earlier pass.": (
            lambda lengths, rows, budget: (None, _first_fit(lengths, budget))
        ),
        "Passes are formed in the order of arrival, not by length.": (
            lambda lengths, rows, budget: (None, pads_and_passes(sorted(lengths), rows, budget)[1])
        ),
    },
    "Pads depend on who happens to stand beside whom; a packed pass has none, whatever comes. In the order of arrival "
    "nobody is overtaken.",
    names=("pads", "packed passes"),
    otherwise="Cut the list every `rows` requests and count the pads of each piece. Then walk through it once more, "
    "with what is left of the budget.",
)
"""What naive padding wastes, and how a token budget cuts the same queue."""
