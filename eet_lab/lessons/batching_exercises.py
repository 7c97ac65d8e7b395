"""Exercises of lessons 4, 6 and 7: what a batch is worth, how a pass is filled, and which requests share one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from eet_lab.lessons import decode_step
from eet_lab.lessons.continuous_batching import CHUNK, REQUESTS, SLOTS
from eet_lab.lessons.exercise import Exercise, Wrong, ask, explained, formula, listed, named, whole
from eet_lab.lessons.roofline import H200_GB_PER_S, H200_TFLOPS
from eet_lab.lessons.show import table
from eet_lab.scheduling import Schedule, Scheduler
from eet_lab.scheduling.dynamic_program import FIGURE_8, FIGURE_8_LENGTHS
from eet_lab.scheduling.simulate import simulate
from eet_lab.words import counted

H200 = H200_GB_PER_S * 1e9, H200_TFLOPS * 1e12
LAUNCHING = round(decode_step.H200.kernel_us, 1), decode_step.H200.launch_us

CASES = {
    "GPT-2 XL, no context yet, H200": (1.556e9, 3.112e9, 0, *H200),
    "GPT-2 XL, 16 tokens, H200": (1.556e9, 3.112e9, 16 * 307_200, *H200),
    "GPT-2 XL, 192 tokens, H200": (1.556e9, 3.112e9, 192 * 307_200, *H200),
    "8 billion weights, 8 KV heads, 128 tokens, H200": (7.5e9, 15.0e9, 128 * 131_072, *H200),
    "the same weights in int8": (7.5e9, 7.5e9, 128 * 131_072, *H200),
}
"""Weights, their bytes, bytes of a row's keys and values, bytes a second, operations a second. In the third, each row
brings more bytes than operations: no batch is big enough.
"""


def floor_and_batch(
    num_weights: float, weight_bytes: float, row_kv_bytes: float, bytes_per_s: float, flops_per_s: float
) -> tuple[float, float]:
    """Two operations for each weight and row; weights are read once a step, keys and values once a row."""
    floor_ms = (weight_bytes + row_kv_bytes) / bytes_per_s * 1e3
    gained_s = 2 * num_weights / flops_per_s - row_kv_bytes / bytes_per_s
    batch = math.ceil(weight_bytes / bytes_per_s / gained_s) if gained_s > 0 else math.inf
    return floor_ms, batch


def _batch(weights: float, weight_bytes: float, kv: float, bytes_s: float, flops_s: float) -> int:
    """The batch if rows had no keys and values."""
    return math.ceil(weight_bytes / bytes_s / (2 * weights / flops_s))


floor = formula(
    floor_and_batch,
    CASES,
    {
        "That is in seconds; return milliseconds.": lambda *case: (floor_and_batch(*case)[0] / 1e3, None),
        "The row's keys and values must be read, too.": lambda n, w, kv, b, f: (w / b * 1e3, None),
        "That is the time of the arithmetic; the floor is that of the bytes.":
            lambda n, w, kv, b, f: (2 * n / f * 1e3, None),
        "Each weight is multiplied and added: 2 operations.": lambda n, *case: (None, _batch(n / 2, *case)),
        "Each further row has keys and values to read.": lambda *case: (None, _batch(*case)),
        "You are one off: the least whole number at which arithmetic takes at least as long as reading.":
            lambda *case: (None, floor_and_batch(*case)[1] - 1),
        "You are one off: that is one row more than the least.": lambda *case: (None, floor_and_batch(*case)[1] + 1),
    },
    "Up to that batch a further row is nearly free: that is why servers batch. With more than a few dozen tokens per "
    "row, GPT-2 XL never reaches it; fewer KV heads or smaller weights change that.",
    names=("floor in ms", "batch"),
    otherwise="Floor: bytes over bandwidth, in ms. Batch: set the time of 2 x weights x batch operations equal to that "
    "of weight_bytes + batch x row_kv_bytes; where a row brings more bytes than operations, return math.inf.",
)  # fmt: skip


def most_launches(floor_ms: float, kernel_us: float, launch_us: float) -> int:
    """The host's time, launches x launch_us, is at most the device's, the floor and launches x kernel_us."""
    return math.floor(floor_ms * 1e3 / (launch_us - kernel_us))


launches = formula(
    most_launches,
    {
        "GPT-2 XL on an H200": (0.732, *LAUNCHING),
        "8 billion weights on an H200": (3.42, *LAUNCHING),
        "a small model": (0.004, *LAUNCHING),
    },
    {
        "The kernels' starts and ends are the device's time, and give the host more of it.":
            lambda floor, kernel, launch: math.floor(floor * 1e3 / launch),
        "The floor is in milliseconds, the others in microseconds.":
            lambda floor, kernel, launch: math.floor(floor / (launch - kernel)),
        "Host and device work at the same time: the slower one counts, not their sum.":
            lambda floor, kernel, launch: math.floor(floor * 1e3 / (launch + kernel)),
        "That is one too many: the host would take longer than the device.": lambda *case: most_launches(*case) + 1,
    },
    "In the table above, the baseline makes more than 1,100 launches for a step of GPT-2 XL with one row. Five kernels "
    "per layer are still 240. A CUDA graph needs one.",
    names=("launches",),
    otherwise="Set launches x launch_us equal to floor_ms x 1,000 + launches x kernel_us, and round down.",
)  # fmt: skip


Split = Callable[[int, Sequence[int], int, int], Sequence[int]]


def split(decoding: int, missing: Sequence[int], chunk: int, budget: int) -> list[int]:
    """Rows that decode read one token each; what is left goes to prompts, the oldest first, a chunk at most."""
    left, counts = budget - decoding, []
    for tokens in missing:
        counts.append(min(tokens, chunk, left))
        left -= counts[-1]
    return counts


class Case(NamedTuple):
    """What the learner's function is given, and where it comes from."""

    decoding: int
    missing: tuple[int, ...]
    chunk: int
    budget: int
    where: str = ""


SPLIT_CASES = (
    Case(0, (40,), 16, 64), Case(3, (160,), 64, 256), Case(2, (5, 9), 16, 64), Case(3, (30, 30), 16, 20),
    Case(4, (50, 50, 50), 100, 64), Case(8, (10,), 16, 8), Case(6, (), 16, 64),
)  # fmt: skip
BUDGET = 24


@cache
def stream_cases() -> tuple[Case, ...]:
    """Each pass of the lesson's stream, as the scheduler found it: a row with one token left to read is one that
    decodes.
    """
    found = list[Case]()

    def watch(scheduler: Scheduler) -> None:
        unread = [request.length - request.read for request in scheduler.running]
        missing = tuple(tokens for tokens in unread if tokens > 1)
        where = f"Pass {len(found) + 1} of the lesson's stream. "
        found.append(Case(len(unread) - len(missing), missing, CHUNK, BUDGET, where))

    simulate(REQUESTS, Schedule(CHUNK, BUDGET, SLOTS, joins=True), on_pass=watch)
    return tuple(found)


def _evenly(decoding: int, missing: Sequence[int], chunk: int, budget: int) -> list[int]:
    share = (budget - decoding) // max(len(missing), 1)
    return [min(tokens, chunk, share) for tokens in missing]


SLIPS: dict[str, Split] = {
    "Rows that decode come first: each takes a token of the budget.": lambda d, m, c, b: split(0, m, c, b),
    "A prompt reads a chunk at most.": lambda d, m, c, b: split(d, m, max(c, b), b),
    "All together may read no more than the budget.": lambda d, m, c, b: [min(tokens, c) for tokens in m],
    "A prompt cannot read more tokens than it has left.": lambda d, m, c, b: split(d, [max(c, b)] * len(m), c, b),
    "The oldest prompt is served first, not all evenly: else each first token comes late.": _evenly,
    "The oldest prompt stands first in the list.": lambda d, m, c, b: split(d, m[::-1], c, b)[::-1],
}
LEAST = "Give each prompt the least of three numbers: what it is missing, the chunk, and what is left of the budget."


def _judge_split(answer: Split) -> tuple[str, tuple[Any, ...]]:
    cases = [*SPLIT_CASES, *stream_cases()]
    given = [_counts(case, ask(answer, case.decoding, list(case.missing), case.chunk, case.budget)) for case in cases]
    right = [split(*case[:4]) for case in cases]

    def fits(slip: Split, at: int) -> bool:
        return list(slip(*cases[at][:4])) == given[at]

    for at, (mine, ours) in enumerate(zip(given, right, strict=True)):
        if mine != ours:
            why = explained(SLIPS, fits, range(len(cases)), at) or LEAST
            raise Wrong(f"{_named(cases[at])}: you return {mine}, and it should be {ours}. {why}")
    lines = [
        [f"{case.decoding}", ", ".join(map(str, case.missing)) or "none", f"{case.chunk}", f"{case.budget}", f"{ours}"]
        for case, ours in zip(SPLIT_CASES, right, strict=False)
    ]
    message = (
        f"And in all {len(cases) - len(SPLIT_CASES)} passes of the lesson's stream, with a budget of {BUDGET}, your "
        "function reads what the scheduler reads. A row that decodes never waits; the newest prompt does."
    )
    return message, (table(["rows that decode", "missing", "chunk", "budget", "prompts read"], lines),)


def _counts(case: Case, value: Any) -> list[int]:
    counts = listed(value, len(case.missing), whole)
    if counts is None:
        wanted = f"a list of {counted(len(case.missing), 'whole number')}, one for each prompt"
        raise Wrong(f"{_named(case)}: return {wanted}; you returned {named(value)}.")
    if counts and min(counts) < 0:
        raise Wrong(f"{_named(case)}: {named(value)} has a number below 0. Where nothing is left, a prompt reads 0.")
    return counts


def _named(case: Case) -> str:
    decoding, missing, chunk, budget, where = case
    return f"{where}For split({decoding}, {list(missing)}, {chunk}, {budget})"


sharing = Exercise(_judge_split, split, SLIPS)
"""Share out the budget of a pass."""


def passes(answers: Sequence[int], slots: int) -> tuple[int, int]:
    """A group lasts as long as its longest answer; a request that joins takes the slot that is free first."""
    groups = sum(max(answers[at : at + slots]) for at in range(0, len(answers), slots))
    free_at = [0] * slots
    for tokens in answers:
        heapq.heapreplace(free_at, free_at[0] + tokens)
    return groups, max(free_at)


count_passes = formula(
    passes,
    {
        "answers of 5, 1, 4 and 2 tokens, 2 slots": ([5, 1, 4, 2], 2),
        "answers of 1, 6, 1 and 6 tokens, 2 slots": ([1, 6, 1, 6], 2),
        "five answers, 2 slots": ([3, 3, 3, 3, 9], 2),
        "eight answers of 10 tokens, 4 slots": ([10] * 8, 4),
        "three answers, 4 slots": ([7, 2, 5], 4),
        "this lesson's answers, 4 slots": ([new for _, new in REQUESTS], SLOTS),
    },
    {
        "That is the work over the slots. It is never less, but a long answer cannot be split over two slots.":
            lambda answers, slots: (None, -(-sum(answers) // slots)),
        "The free slot goes to the request that waits longest, not to the longest answer: no length is known before.":
            lambda answers, slots: (None, passes(sorted(answers, reverse=True), slots)[1]),
        "The next request takes the slot that is free first, not the next slot in turn.":
            lambda answers, slots: (None, max(sum(answers[slot::slots]) for slot in range(slots))),
        "A group holds its rows until its longest answer is done. Add up the longest of each group.":
            lambda answers, slots: (-(-sum(answers) // slots), None),
        "The longest answer of all does not set the pace of each group: each has a longest of its own.":
            lambda answers, slots: (max(answers) * -(-len(answers) // slots), None),
        "Groups are formed in the order of arrival, not by length.":
            lambda answers, slots: (passes(sorted(answers, reverse=True), slots)[0], None),
        "Groups run one after the other: add up what each takes.": lambda answers, slots: (max(answers), None),
        "Slots run side by side: do not add up all answers.": lambda answers, slots: (sum(answers), sum(answers)),
    },
    "Where all answers are equally long, joining saves nothing. It saves most where each group has one long answer.",
    names=("passes in groups", "passes joining"),
    otherwise="Write down for each slot when it is free. The next request takes the one that is free first.",
)  # fmt: skip


Cost = Callable[[int, int], float]


def figure_8_cost(length: int, rows: int) -> float:
    """TurboTransformers' milliseconds; infinite for batches that the figure does not show."""
    return FIGURE_8.get((length, rows), math.inf)


def flat_cost(length: int, rows: int) -> float:
    """A GPU with nothing else to do: nearly all of it is the launch."""
    return 5.0 + 0.001 * length * rows


def steep_cost(length: int, rows: int) -> float:
    """A processor that is full with one text: a batch saves nothing, and pads cost what tokens do."""
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


def _cut(lengths: Sequence[int], cost: Cost, most: int, padded_to: Callable = max) -> float:
    """The best cut of the queue as it stands."""
    best = [0.0]
    for n in range(1, len(lengths) + 1):
        sizes = range(1, min(n, most) + 1)
        best.append(min(best[n - k] + cost(padded_to(lengths[n - k : n]), k) for k in sizes))
    return best[-1]


def _groups(lengths: Sequence[int], rows: int) -> list[Sequence[int]]:
    return [lengths[at : at + rows] for at in range(0, len(lengths), rows)]


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
        "That is each request on its own. Try larger batches, too.":
            lambda lengths, cost, most: sum(cost(length, 1) for length in lengths),
        "That is all requests in full batches. Smaller ones may cost less: they have fewer pads.":
            lambda lengths, cost, most: sum(cost(max(group), len(group)) for group in _groups(sorted(lengths), most)),
        "Sort the requests by length first: only then is some best cut one of neighbours.": _cut,
        "A batch is padded to its longest request: its cost is cost(longest, k).":
            lambda lengths, cost, most: _cut(sorted(lengths), cost, most, min),
    },
    "Figure 8 comes out to the hundredth of a millisecond. On a flat table it makes the largest batches, on a steep "
    "one the smallest: the cost table decides, and it must be yours.",
    names=("ms",),
    otherwise="Sort by length. The n shortest take best[n] = the least of best[n - k] + cost(length of the n-th, k).",
)  # fmt: skip
"""TurboTransformers' dynamic program."""


def pads_and_passes(lengths: Sequence[int], rows: int, budget: int) -> tuple[int, int]:
    """Padded batches of `rows` in the order of arrival; packed passes of at most `budget` tokens in the same order."""
    pads = sum(len(group) * max(group) - sum(group) for group in _groups(lengths, rows))
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
        "The last batch may be smaller: rows that do not exist are no pads.":
            lambda lengths, rows, budget: (
                sum(rows * max(group) - sum(group) for group in _groups(lengths, rows)), None
            ),
        "Each batch is padded to its own longest request, not to the longest of all.":
            lambda lengths, rows, budget: (len(lengths) * max(lengths) - sum(lengths), None),
        "Batches are formed in the order of arrival, not by length.":
            lambda lengths, rows, budget: (pads_and_passes(sorted(lengths), rows, budget)[0], None),
        "That is the whole rectangle. Pads are what is left of it without the tokens.":
            lambda lengths, rows, budget: (pads_and_passes(lengths, rows, budget)[0] + sum(lengths), None),
        "That is the work over the budget. It is never less, but a request is not cut in two here.":
            lambda lengths, rows, budget: (None, -(-sum(lengths) // budget)),
        "A request that does not fit begins a pass, and later ones go behind it: none is put into an earlier pass.":
            lambda lengths, rows, budget: (None, _first_fit(lengths, budget)),
        "Passes are formed in the order of arrival, not by length.":
            lambda lengths, rows, budget: (None, pads_and_passes(sorted(lengths), rows, budget)[1]),
    },
    "Pads depend on which requests happen to share a batch; a packed pass has none, whatever comes. In the order of "
    "arrival no request is overtaken.",
    names=("pads", "packed passes"),
    otherwise="Cut the list every `rows` requests and count the pads of each piece. Then walk through it once more, "
    "with what is left of the budget.",
)  # fmt: skip
"""What naive padding wastes, and how a token budget cuts the same queue."""
