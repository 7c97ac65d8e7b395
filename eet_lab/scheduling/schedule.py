"""The batching policy: how many requests share a pass, and how much of it each may read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eet_lab.errors import ScheduleError
from eet_lab.scheduling.whole import MOST, check_whole
from eet_lab.words import told

MOST_ROWS = 2**16 - 1
"""What the second dimension of a kernel's grid takes."""


@dataclass(frozen=True)
class Schedule:
    """Layouts are values of it: `chunk=1` reads prompts token by token, no limits at all read them in one pass.

    Continuous batching is `joins=True`; with a chunk or a budget, a long prompt is read in pieces beside rows that
    decode, so that their next token does not wait for all of it.
    """

    chunk: int | None = None  # most tokens that a row reads in a step; None: all that it has
    budget: int | None = None  # most tokens of a step; None: any number
    max_rows: int = 64  # slots: requests that run at the same time
    joins: bool = False  # requests join while others run; without it, a group starts when none runs

    def __post_init__(self) -> None:
        for name in ("chunk", "budget"):
            if (value := getattr(self, name)) is not None:
                check_whole(ScheduleError, name, value, 1, MOST, ", or None for no limit")
        check_whole(ScheduleError, "max_rows", self.max_rows, 1, MOST_ROWS)
        if not isinstance(self.joins, bool):
            raise ScheduleError(f"joins is {told(self.joins)}, but it must be True or False.")

    def most_tokens(self, capacity: int) -> int:
        """Of a step, where requests have at most `capacity` tokens each."""
        return min(self.budget or MOST, self.max_rows * min(self.chunk or MOST, capacity))

    def of_at_most(self, num_rows: int) -> Schedule:
        """The same with no more slots than so many."""
        return replace(self, max_rows=min(self.max_rows, num_rows))

    @property
    def most_running(self) -> int:
        """Requests that run at the same time: no more than a step has tokens, since each is due one in every step.

        One more would hold a slot and pages, and wait all the same.
        """
        return min(self.max_rows, self.budget or self.max_rows)
