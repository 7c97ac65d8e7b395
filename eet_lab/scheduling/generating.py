"""Requests that generate in warped time: a scheduler plans their passes, and a cost table says how long each takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import isnan
from typing import NamedTuple

from eet_lab.scheduling.cost import DecoderCost, PassSize
from eet_lab.scheduling.pages import Slab
from eet_lab.scheduling.prefix_caching import SharedPageLedger
from eet_lab.scheduling.queued import Queued
from eet_lab.scheduling.record import Record
from eet_lab.scheduling.request import Request
from eet_lab.scheduling.scheduler import Scheduler

KEPT_SIZES = 2**16
"""Sizes of passes whose times are kept: many are as large as one before, and a table takes long to interpolate."""
TimesOf = Callable[[PassSize], tuple[float, float]]
"""Milliseconds of the host and of the device for a pass."""


def times_of(cost: DecoderCost) -> TimesOf:
    """What the table says of a pass, looked up once for each size."""
    return lru_cache(KEPT_SIZES)(lambda size: (cost.host_ms(size), cost.pass_ms(size)))


class Launched(NamedTuple):
    """A pass: when the host was done with it, when it ends, and who gets a first or a last token from it."""

    host_ms: float
    end_ms: float
    first: tuple[int, ...]
    last: tuple[int, ...]


class Generating:
    """Requests in a scheduler, by their numbers.

    Most passes are decode steps of the same rows, none of which ends: the scheduler need not plan those. It is told of
    them (`_settle`) before it plans again.
    """

    def __init__(self, scheduler: Scheduler, times_of: TimesOf, record: Record) -> None:
        self.scheduler, self._times_of, self._record = scheduler, times_of, record
        self._number_of: dict[Request, int] = {}
        self._has_room = type(scheduler.ledger) is Slab  # for all columns that a request will fill
        self._alike = self._untold = 0  # steps to come that nobody ends, and those of them that were launched
        self._columns = 0  # that the rows of the next one see

    def add(self, group: Sequence[Queued]) -> None:
        if not self.scheduler.is_full:  # else nobody joins before one of those that run has left
            self._settle()
        is_shared = isinstance(self.scheduler.ledger, SharedPageLedger)
        for number, length, new_tokens, _ in group:
            # Requests have nothing in common, so none shall find another's tokens in the cache.
            request = Request((number,) * length if is_shared else _prompt(length), new_tokens)
            self.scheduler.add(request)
            self._number_of[request] = number

    def step(self, now_ms: float) -> float:
        """One pass, after which the host reads what it has made, and the steps before it that nobody ends.

        Returns when it ends.
        """
        while self._alike:
            now_ms = self._launched_alike(now_ms, 0.0).end_ms
        launched = self.launched(now_ms, 0.0)
        self.read(launched, launched.end_ms)
        return launched.end_ms

    def launched(self, now_ms: float, before_ms: float) -> Launched:
        """One pass that the host begins now, while the device computes others until `before_ms`."""
        if self._alike:
            return self._launched_alike(now_ms, before_ms)
        self._settle()
        rows, record, number_of = self.scheduler.next(), self._record, self._number_of
        size = PassSize.of(rows)
        host_ms, begin_ms, end_ms = self._timed(size, now_ms, before_ms)
        first = []
        for request, _, start, count, tells in rows:
            # One that is read again, since it gave way, had a start before.
            if start == request.cached and isnan(record.start[number_of[request]]):
                record.start[number_of[request]] = begin_ms
            if tells:
                request.generated.append(0)
                if start + count == len(request.prompt):
                    first.append(number_of[request])
        last = tuple(number_of.pop(request) for request in self.scheduler.advance(rows))
        self._look_ahead()
        return Launched(host_ms, end_ms, tuple(first), last)

    def _launched_alike(self, now_ms: float, before_ms: float) -> Launched:
        """The same of a decode step that nobody ends."""
        num, columns = len(self.scheduler.running), self._columns
        host_ms, _, end_ms = self._timed(PassSize(num, num, 0, 0, columns), now_ms, before_ms)
        self._alike, self._untold, self._columns = self._alike - 1, self._untold + 1, columns + num
        return Launched(host_ms, end_ms, (), ())

    def _timed(self, size: PassSize, now_ms: float, before_ms: float) -> tuple[float, float, float]:
        """When the host is done with a pass, and when the device begins and ends it."""
        on_host, on_device = self._times_of(size)
        host_ms, begin_ms = now_ms + on_host, max(now_ms, before_ms)
        end_ms = max(begin_ms + on_device, host_ms)
        self._record.add(begin_ms, end_ms, size.rows, size.prompt_tokens, size.decoded, size.pads)
        return host_ms, begin_ms, end_ms

    def _look_ahead(self) -> None:
        """How many steps come that the scheduler need not plan: those in which all rows read a token of an answer."""
        running, somebody_joins = self.scheduler.running, self.scheduler.waiting and not self.scheduler.is_full
        if not self._has_room or not running or somebody_joins:
            return
        if all(len(each.prompt) <= each.read == each.length - 1 for each in running):
            self._alike = min(each.full_length - each.length for each in running) - 1
            self._columns = sum(each.read + 1 for each in running)

    def _settle(self) -> None:
        """Tell the scheduler of the steps that it has not planned."""
        if num := self._untold:
            for request in self.scheduler.running:
                request.read, request.length = request.read + num, request.length + num
                request.generated += [0] * num
        self._alike = self._untold = 0

    def read(self, launched: Launched, now_ms: float) -> None:
        """What a pass has made is on the host now."""
        for number in launched.first:
            self._record.first[number] = now_ms
        for number in launched.last:
            self._record.last[number] = now_ms
        self._record.done += len(launched.last)


@cache
def _prompt(length: int) -> tuple[int, ...]:
    """A prompt of that length; requests of the same length share one."""
    return (0,) * length
