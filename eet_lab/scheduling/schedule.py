"""The batching policy: how many requests share a pass, how much of it each may read, and where their prompts lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eet_lab.errors import ScheduleError
from eet_lab.scheduling.whole import MOST, check_whole
from eet_lab.words import told

MOST_ROWS = 2**16 - 1
"""What the second dimension of a kernel's grid takes."""


@dataclass(frozen=True)
class Schedule:
    """A value for each layout: no limits at all read whole prompts in one pass, `chunk=1` reads them token by token.

    Continuous batching is `joins=True`; with a chunk or a budget, a long prompt is read in pieces beside rows that
    decode, so that their next token does not wait for all of it.
    """

    chunk: int | None = None  # most tokens that a row reads in a step; None: all that it has
    budget: int | None = None  # most tokens of a step, one for each slot at least; None: any number
    max_rows: int | None = None  # slots: requests that run at the same time; None: as many as come together
    joins: bool = False  # requests join while others run; without it, a group starts when none runs
    aligned: bool = False  # prompts of a group end in the same column, with pads on the left that its first pass reads
    shortest_first: bool = False  # the first pass of a group reads as much of each prompt as the shortest one has

    def __post_init__(self) -> None:
        for name in ("chunk", "budget"):
            if (value := getattr(self, name)) is not None:
                check_whole(ScheduleError, name, value, 1, MOST, ", or None for no limit")
        if self.max_rows is not None:
            check_whole(ScheduleError, "max_rows", self.max_rows, 1, MOST_ROWS, ", or None for all that come together")
        for name in ("joins", "aligned", "shortest_first"):
            if not isinstance(value := getattr(self, name), bool):
                raise ScheduleError(f"{name} is {told(value)}, but it must be True or False.")
        if self.aligned and (self.chunk or self.budget or self.joins or self.shortest_first):
            raise ScheduleError(
                "aligned is True, so the prompts of a group are read in one pass; leave out chunk, budget, joins and "
                "shortest_first, or aligned."
            )
        if self.shortest_first and (self.chunk != 1 or self.budget or self.joins):
            raise ScheduleError(
                "shortest_first is True, so a group begins together and goes on token by token; set chunk to 1, and "
                "leave out budget and joins."
            )
        if self.max_rows is None and (self.budget or self.joins or (self.chunk or 1) > 1):
            raise ScheduleError(
                "max_rows is None, so a batch begins together and its prompts are read whole or token by token; set "
                "max_rows, or leave out budget, joins and a chunk of more than 1."
            )
        if self.budget and self.max_rows and self.budget < self.max_rows:
            raise ScheduleError(
                f"budget is {self.budget:,}, but it must be at least max_rows, which is {self.max_rows:,}: a row that "
                "decodes reads a token in every step. Give a larger budget, or fewer rows."
            )
        if self.max_rows is not None and (self.aligned or self.shortest_first):
            raise ScheduleError("aligned and shortest_first are for all that come together; leave out max_rows.")

    def pads(self, lengths: Sequence[int]) -> list[int]:
        """The columns before each prompt of a group."""
        longest = max(lengths) if self.aligned else 0
        return [longest - length if self.aligned else 0 for length in lengths]

    def first_counts(self, lengths: Sequence[int]) -> list[int]:
        """How many tokens of each prompt of a group its first pass reads, where there is no budget."""
        most = min(lengths) if self.shortest_first else self.chunk or MOST
        return [min(length, most) for length in lengths]

    def most_tokens(self, capacity: int) -> int:
        """The most tokens of a step, where requests have at most `capacity` tokens each."""
        return min(self.budget or MOST, (self.max_rows or MOST_ROWS) * min(self.chunk or MOST, capacity))

    def of_at_most(self, num_rows: int) -> Schedule:
        """The same with no more slots than so many; itself, where there are as many as come together."""
        return self if self.max_rows is None else replace(self, max_rows=min(self.max_rows, num_rows))


TOKEN_BY_TOKEN = Schedule(chunk=1)
"""The baseline: prompts are read one column a step, as FasterTransformer v3.1 did."""
UP_TO_THE_SHORTEST = Schedule(chunk=1, shortest_first=True)
"""FasterTransformer v4.0's way: in parallel up to the shortest prompt, the rest token by token."""
LEFT_PADDED = Schedule(aligned=True)
"""EET's way: all prompts end in the same column, and one parallel pass reads them with their pads."""
PACKED = Schedule()
"""Whole prompts end to end, without pads."""
