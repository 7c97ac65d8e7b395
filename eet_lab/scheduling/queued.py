"""The queue of a simulator: requests that will come, and those that have come and wait for a policy to take them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from math import inf
from typing import NamedTuple

from eet_lab.errors import ScheduleError
from eet_lab.scheduling.cost import Costs
from eet_lab.scheduling.policy import Plan, Policy
from eet_lab.scheduling.traffic import Traffic


class Queued(NamedTuple):
    """A request in the queue of a simulator."""

    number: int
    length: int
    new_tokens: int
    arrival_ms: float


class Queue:
    """Those that have come and wait, the oldest first, and those that will."""

    def __init__(self, traffic: Traffic) -> None:
        columns = (range(len(traffic)), traffic.lengths, traffic.new_tokens, traffic.arrival_ms)
        self._coming = map(Queued, *(column if isinstance(column, range) else column.tolist() for column in columns))
        self._next = next(self._coming, None)
        self._by_number: OrderedDict[int, Queued] = OrderedDict()

    @property
    def waiting(self) -> Collection[Queued]:
        """Those that have come, the oldest first."""
        return self._by_number.values()

    @property
    def next_ms(self) -> float:
        """When the next one comes; infinite where none does."""
        return inf if self._next is None else self._next.arrival_ms

    def admit(self, now_ms: float) -> None:
        """All that have come by now wait."""
        while self._next is not None and self._next.arrival_ms <= now_ms:
            self._by_number[self._next.number] = self._next
            self._next = next(self._coming, None)

    def take(self, group: Sequence[Queued]) -> None:
        """These wait no longer. ScheduleError where a policy gave somebody twice, or nobody."""
        if not group:
            raise ScheduleError("The policy gave a pass to nobody. Leave out empty groups.")
        for each in group:
            if self._by_number.pop(each.number, None) is None:
                raise ScheduleError(f"The policy gave request {each.number} to a pass, which does not wait (any more).")

    def after(self, now_ms: float, plan: Plan[Queued], policy: Policy) -> float:
        """When to ask again a policy that waits for company. ScheduleError for one that waits for ever."""
        wake_ms = min(inf if plan.wake_ms is None else plan.wake_ms, self.next_ms)
        if not now_ms < wake_ms < inf:
            raise ScheduleError(f"{policy.name} serves none of {len(self.waiting):,} requests that wait: they starve.")
        return wake_ms


def groups_of(queue: Queue, policy: Policy, cost: Costs, clock: list[float]) -> Iterator[Sequence[Queued]]:
    """The groups of a policy, as soon as `clock`, which whoever runs them sets forward, lets it plan them."""
    while True:
        queue.admit(clock[0])
        if not queue.waiting:
            if queue.next_ms == inf:
                return
            clock[0] = queue.next_ms
            continue
        plan = policy.next(queue.waiting, clock[0], cost)
        if not plan.groups:
            clock[0] = queue.after(clock[0], plan, policy)
            continue
        for group in plan.groups:
            queue.take(group)
            yield group
