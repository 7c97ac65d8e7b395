"""Exercises of lesson 6: how the tokens of a pass are shared out, and how many passes a batch takes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from eet_lab.lessons.continuous_batching import CHUNK, REQUESTS, SLOTS
from eet_lab.lessons.exercise import Exercise, Wrong, ask, formula, named, whole
from eet_lab.lessons.show import table
from eet_lab.scheduling import Schedule, Scheduler
from eet_lab.scheduling.simulate import simulate

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


CASES = (
    Case(0, (40,), 16, 64),
    Case(3, (160,), 64, 256),
    Case(2, (5, 9), 16, 64),
    Case(3, (30, 30), 16, 20),
    Case(4, (50, 50, 50), 100, 64),
    Case(8, (10,), 16, 8),
    Case(6, (), 16, 64),
)
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


def _judge_split(answer: Split) -> tuple[str, tuple[Any, ...]]:
    cases = [*CASES, *stream_cases()]
    given = [_counts(case, ask(answer, case.decoding, list(case.missing), case.chunk, case.budget)) for case in cases]
    right = [split(*case[:4]) for case in cases]
    for case, mine, ours in zip(cases, given, right, strict=True):
        if mine != ours:
            raise Wrong(f"{_named(case)}: you return {mine}, and it should be {ours}. {_why(given, case, mine)}")
    lines = [
        [f"{case.decoding}", ", ".join(map(str, case.missing)) or "none", f"{case.chunk}", f"{case.budget}", f"{ours}"]
        for case, ours in zip(CASES, right, strict=False)
    ]
    message = (
        f"And in all {len(cases) - len(CASES)} passes of the lesson's stream, with a budget of {BUDGET}, your function "
        "reads what the scheduler reads. A row that decodes never waits; the newest prompt does."
    )
    return message, (table(["rows that decode", "missing", "chunk", "budget", "prompts read"], lines),)


def _counts(case: Case, value: Any) -> list[int]:
    try:
        found = [whole(each) for each in value]
    except Exception:  # noqa: BLE001  whatever a reader's object does when it is iterated
        found = [None]
    if len(found) != len(case.missing) or None in found:
        wanted = f"a list of {len(case.missing)} whole numbers, one for each prompt"
        raise Wrong(f"{_named(case)}: return {wanted}; you returned {named(value)}.")
    counts = [each for each in found if each is not None]
    if counts and min(counts) < 0:
        raise Wrong(f"{_named(case)}: {named(value)} has a number below 0. Where nothing is left, a prompt reads 0.")
    return counts


def _why(given: Sequence[Sequence[int]], wrong: Case, mine: Sequence[int]) -> str:
    """The slip that explains all that was given, or else this case."""
    cases = [*CASES, *stream_cases()]
    for words, slip in SLIPS.items():
        if all(list(slip(*case[:4])) == list(each) for case, each in zip(cases, given, strict=True)):
            return words
    for words, slip in SLIPS.items():
        if list(slip(*wrong[:4])) == list(mine):
            return words
    return "Give each prompt the least of three numbers: what it is missing, the chunk, and what is left of the budget."


def _named(case: Case) -> str:
    decoding, missing, chunk, budget, where = case
    return f"{where}For split({decoding}, {list(missing)}, {chunk}, {budget})"


sharing = Exercise(_judge_split, split)
"""Share out the budget of a pass."""


def passes(answers: Sequence[int], slots: int) -> tuple[int, int]:
    """A group lasts as long as its longest answer; a request that joins takes the slot that is free first."""
    groups = sum(max(answers[at : at + slots]) for at in range(0, len(answers), slots))
    free_at = [0] * slots
    for tokens in answers:
        heapq.heapreplace(free_at, free_at[0] + tokens)
    return groups, max(free_at)


def _round_robin(answers: Sequence[int], slots: int) -> int:
    return max(sum(answers[slot::slots]) for slot in range(slots))


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
        "That is the work over the slots. It is never less, but a long answer cannot be split over two slots.": (
            lambda answers, slots: (None, -(-sum(answers) // slots))
        ),
        "The free slot goes to the request that waits longest, not to the longest answer: nobody knows that one.": (
            lambda answers, slots: (None, passes(sorted(answers, reverse=True), slots)[1])
        ),
        "The next request takes the slot that is free first, not the next slot in turn.": (
            lambda answers, slots: (None, _round_robin(answers, slots))
        ),
        "A group holds its rows until its longest answer is done. Add up the longest of each group.": (
            lambda answers, slots: (-(-sum(answers) // slots), None)
        ),
        "The longest answer of all does not set the pace of each group: each has a longest of its own.": (
            lambda answers, slots: (max(answers) * -(-len(answers) // slots), None)
        ),
        "Groups are formed in the order of arrival, not by length.": (
            lambda answers, slots: (passes(sorted(answers, reverse=True), slots)[0], None)
        ),
        "Groups run one after the other: add up what each takes.": lambda answers, slots: (max(answers), None),
        "Slots run side by side: do not add up all answers.": lambda answers, slots: (sum(answers), sum(answers)),
    },
    "Where all answers are equally long, joining saves nothing. It saves most where each group has one long answer.",
    names=("passes in groups", "passes joining"),
    otherwise="Write down for each slot when it is free. The next request takes the one that is free first.",
)
