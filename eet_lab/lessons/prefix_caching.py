"""Lesson 6, prefix caching: the stream of requests again, with the same instructions in front of each prompt."""

from __future__ import annotations

from functools import cache
from statistics import mean

from eet_lab.figures.slot_lanes import lanes
from eet_lab.lessons.continuous_batching import CHUNK, PAGE, REQUESTS, SLOTS
from eet_lab.lessons.show import Shown, table
from eet_lab.scheduling import PageLedger, Schedule, SharedPageLedger
from eet_lab.scheduling.simulate import Simulated, simulate
from eet_lab.words import percent

INSTRUCTIONS = 52
"""Tokens that all prompts begin with: no whole number of pages."""

WITHOUT, WITH = "each reads its whole prompt", "prefix caching"


@cache
def served(shares: bool, instructions: int = INSTRUCTIONS) -> Simulated:
    """The twelve requests joining, with so many tokens of instructions in front of each prompt."""
    lengths = [(instructions + prompt, new) for prompt, new in REQUESTS]
    num_pages = 1 + SLOTS * -(-max(map(sum, lengths)) // PAGE)  # as many as slots of full length hold
    ledger = (SharedPageLedger if shares else PageLedger)(num_pages, PAGE, SLOTS)
    return simulate(lengths, Schedule(CHUNK, None, SLOTS, True), ledger, shared_tokens=instructions)


def shared() -> Shown:
    """Both ways on one axis of passes, and what is read."""
    runs, rows = {WITHOUT: served(False), WITH: served(True)}, []
    for name, run in runs.items():
        waits = mean(run.told(number)[0] + 1 for number in range(len(run.requests)))
        rows.append([name, f"{len(run.passes)}", f"{read(run)}", percent(found(run)), f"{waits:.1f}"])
    one, rest = INSTRUCTIONS // PAGE * PAGE, INSTRUCTIONS % PAGE
    return Shown(
        lanes(runs),
        table(["", "passes", "prompt tokens read", "of them found", "pass of the first token, mean"], rows),
        f"The instructions have {INSTRUCTIONS} tokens, and a page {PAGE}: {one} tokens fill pages, which all requests "
        f"share. The {rest} behind them are in a page with tokens of the request's own, and are read by each. Request "
        "1 reads the instructions, and whoever would join meanwhile waits: in the same passes it would only read the "
        "same. Nothing is saved on answers: a row that decodes reads one token in each pass, as before.",
    )


def read(run: Simulated) -> int:
    """Prompt tokens that were read."""
    return sum(prompts for _, prompts in run.tokens)


def found(run: Simulated) -> float:
    """The share of prompt tokens that were there."""
    return 1 - read(run) / sum(len(request.prompt) for request in run.requests)
