"""The queue of a simulator: requests that will come, and those that have come and wait for a policy to take them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from math import inf
from typing import NamedTuple

from eet_lab.errors import ScheduleError
from eet_lab.scheduling.cost import Costs
from eet_lab.scheduling.policy import BasePolicy, Plan
from eet_lab.scheduling.traffic import Traffic


class Queued(NamedTuple):
    """A request in the queue of a simulator."""

    number: int
    length: int
    new_tokens: int
    arrival_ms: float


class Queue:
    """Those that have come and wait, the oldest first, and those that will; and the time, which passes set forward."""

    def __init__(self, traffic: Traffic) -> None:
        columns = (traffic.lengths, traffic.new_tokens, traffic.arrival_ms)
        self._coming = map(Queued, range(len(traffic)), *(column.tolist() for column in columns))
        self._next = next(self._coming, None)
        self._by_number: OrderedDict[int, Queued] = OrderedDict()
        self.now_ms = 0.0

    @property
    def waiting(self) -> Collection[Queued]:
        """Those that have come, the oldest first."""
        return self._by_number.values()

    @property
    def next_ms(self) -> float:
        """When the next one comes; infinite where none does."""
        return inf if self._next is None else self._next.arrival_ms

    def admit(self) -> None:
        """All that have come by now wait."""
        while self._next is not None and self._next.arrival_ms <= self.now_ms:
            self._by_number[self._next.number] = self._next
            self._next = next(self._coming, None)

    def take(self, group: Sequence[Queued]) -> None:
        """These wait no longer. ScheduleError where a policy gave somebody twice, or nobody."""
        if not group:
            raise ScheduleError("The policy gave a pass to nobody. Leave out empty groups.")
        for each in group:
            if self._by_number.pop(each.number, None) is None:
                raise ScheduleError(f"The policy gave request {each.number} to a pass, which does not wait (any more).")

    def wait(self, plan: Plan[Queued], policy: BasePolicy) -> None:
        """Set the time forward to when something may happen, where nothing runs.

        ScheduleError for a policy that waits for ever while requests do.
        """
        wake_ms = self.next_ms if plan.wake_ms is None else min(plan.wake_ms, self.next_ms)
        if not self.now_ms < wake_ms < inf:
            raise ScheduleError(f"{policy.name} serves none of {len(self.waiting):,} requests that wait: they starve.")
        self.now_ms = wake_ms

    def groups(self, policy: BasePolicy, costs: Costs) -> Iterator[Sequence[Queued]]:
        """The groups of a policy, one after the other has run; it plans more of them whenever these are all done."""
        while True:
            self.admit()
            if not self.waiting and self.next_ms == inf:
                return
            plan = policy.next(self.waiting, self.now_ms, costs) if self.waiting else Plan[Queued]([])
            if not plan.groups:
                self.wait(plan, policy)
            for group in plan.groups:
                self.take(group)
                yield group
