"""A simulation of the scheduler, pass by pass and without a model: it counts which request reads what in each pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eet_lab.scheduling.pages import Ledger, Slab
from eet_lab.scheduling.request import Request, Row
from eet_lab.scheduling.schedule import Schedule
from eet_lab.scheduling.scheduler import Scheduler
from eet_lab.scheduling.whole import MOST


@dataclass(frozen=True)
class Simulated:
    """A stream of requests and all its passes. Requests are told by their place in the stream, from 0."""

    requests: tuple[Request, ...]
    passes: tuple[tuple[Row, ...], ...]
    num_slots: int
    gave_way: tuple[tuple[int, int], ...]  # (request, the first pass that went without it), in order

    @property
    def idle_share(self) -> float:
        """The share of all slots in all passes that read nothing."""
        return 1 - sum(map(len, self.passes)) / (self.num_slots * len(self.passes))

    @property
    def read_twice(self) -> int:
        """Tokens that were read again, since their request had given way."""
        read = sum(row.count for rows in self.passes for row in rows)
        return read - sum(request.num_columns for request in self.requests)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """The tokens of each pass: those of rows that decode, and those of prompts."""
        found = []
        for rows in self.passes:
            decoded = sum(row.count for row in rows if row.start >= len(row.request.prompt))
            found.append((decoded, sum(row.count for row in rows) - decoded))
        return found

    def told(self, number: int) -> list[int]:
        """The passes, from 0, that told a request's tokens."""
        request = self.requests[number]
        return [at for at, rows in enumerate(self.passes) for row in rows if row.request is request and row.tells]


def simulate(
    lengths: Sequence[tuple[int, int]],
    schedule: Schedule,
    ledger: Ledger | None = None,
    arrivals: Sequence[int] | None = None,
    shared_tokens: int = 0,
    on_pass: Callable[[Scheduler], None] | None = None,
) -> Simulated:
    """Requests of (prompt tokens, new tokens), until all are done; token values come to the host at once.

    `arrivals` are the passes before which they come, in order; None: all before the first one. Without a `ledger`,
    each slot has room for the longest request. All prompts begin with the same `shared_tokens`, as far as they go, and
    have nothing else in common: what a ledger with prefix caching finds. `on_pass` sees the scheduler when a pass is
    planned, before anything of it is counted. Errors: PromptError for a request that fits no cache.
    """
    requests = tuple(
        Request((0,) * min(prompt, shared_tokens) + (number,) * (prompt - shared_tokens), new)
        for number, (prompt, new) in enumerate(lengths, 1)
    )
    num_slots = schedule.max_rows or len(requests)
    room = ledger or Slab(num_slots, max(request.full_length for request in requests))
    scheduler, passes = Scheduler(schedule, room, MOST), list[tuple[Row, ...]]()
    gave_way = list[tuple[int, int]]()
    coming = list(zip(arrivals or [0] * len(requests), requests, strict=True))
    while coming or not scheduler.idle:
        while coming and coming[0][0] <= len(passes):
            scheduler.add(coming.pop(0)[1])
        before = list(scheduler.running)
        rows = scheduler.next()
        gave_way += [(requests.index(each), len(passes)) for each in before if each.slot is None]
        if on_pass is not None:
            on_pass(scheduler)
        scheduler.advance(rows)
        for row in rows:
            if row.tells:
                row.request.generated.append(0)
        passes.append(tuple(rows))
    return Simulated(requests, tuple(passes), num_slots, tuple(gave_way))
