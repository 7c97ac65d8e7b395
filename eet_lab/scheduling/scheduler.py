"""Who reads how many tokens in the next pass: admits, chunks, preempts. It never sees a token's value."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from eet_lab.errors import ScheduleError
from eet_lab.scheduling.pages import Ledger, PageLedger
from eet_lab.scheduling.request import Request, Row, check_length
from eet_lab.scheduling.schedule import Schedule
from eet_lab.scheduling.whole import MOST
from eet_lab.words import told


class Scheduler:
    """Plans one pass after the other: `rows = next()`, launch it, `advance(rows)`. For one thread.

    Requests are served in the order of their arrival: those in `running`, then those in `waiting`, oldest first. Each
    that runs has the pages for all its tokens, so only rows that decode ask for more. Where none is free, the newest
    gives way: it returns to the front of `waiting`, and reads all its tokens again. So the oldest never gives way, and
    since it reads at least a token in each pass, all come to their end.
    """

    def __init__(self, schedule: Schedule, ledger: Ledger, context: int) -> None:
        self.num_slots = schedule.max_rows or ledger.num_slots
        if ledger.num_slots < self.num_slots:
            raise ScheduleError(
                f"max_rows is {self.num_slots:,}, but the KV cache has {ledger.num_slots:,} slots. Give it as many, "
                "or ask for fewer rows."
            )
        self.schedule, self.ledger, self.context = schedule, ledger, context
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preempted = 0
        self._is_short = False  # one gave way since the last pass; with shared pages, it might come back before it
        self._free_slots = list(range(self.num_slots))  # a heap: low slots first, so that a small batch is compact

    @property
    def idle(self) -> bool:
        """There is nothing to do until a request is added."""
        return not self.running and not self.waiting

    @property
    def is_full(self) -> bool:
        """No request could be let in before one has left."""
        return len(self.running) >= self.num_slots

    def add(self, request: Request) -> None:
        """Queue a new request; PromptError for one that could never be served."""
        if not isinstance(request, Request) or request.status != "new":
            raise ScheduleError(f"{_named(request)} cannot be added: each is added once. Make a new Request.")
        self.check(request)
        request.status = "waiting"
        self.waiting.append(request)

    def check(self, request: Request, *more: str) -> None:
        """PromptError for one that could never be served; with more columns it would also need what `more` says."""
        columns, is_paged = self.ledger.most_columns, isinstance(self.ledger, PageLedger)
        check_length(request, self.context, f"the model's context of {self.context:,} tokens")
        cache = f"the KV cache, which holds {columns:,} columns"
        columns_of = "pages (memory_reuse:pages)" if is_paged else "columns"
        check_length(request, columns + 1, cache, " and ".join((f"give the KV cache more {columns_of}", *more)))

    def next(self) -> list[Row]:
        """What the next pass reads: a token of each row that decodes, then as much of the prompts as fits beside them.

        It counts nothing, so without `advance` it plans the same again. Empty if there is nothing to do, or if the
        values of a preempted request's tokens have not all come to the host yet.
        """
        if self.waiting and not self._is_short:
            self._admit()
        columns, rows, prompts = self.ledger.columns, list[Row](), list[Request]()
        row_of = Row._make  # takes half the time of Row(...), between two steps of a GPU
        for request in self.running:  # those that give way leave at its end, where none has been looked at yet
            start, length = request.read, request.length
            slot: int = request.slot  # type: ignore[assignment]  # it runs, so it has one
            if length - start > 1:
                prompts.append(request)
            elif request.pad + length <= columns[slot] or self._grow(request, slot):
                rows.append(row_of((request, slot, start, 1, True)))
        left, chunk = (self.schedule.budget or MOST) - len(rows), self._chunk() if prompts else 0
        for request in prompts:
            start, missing = request.read, request.length - request.read
            count = min(missing, chunk, left)
            if not count:
                break
            rows.append(row_of((request, request.slot, start, count, count == missing)))
            left -= count
        return rows

    def advance(self, rows: Iterable[Row]) -> list[Request]:
        """Once the pass is launched: count what it reads and tells. The requests that have thereby all they asked for
        are returned: they have left.

        Rows whose request has left since `next` do not count.
        """
        done, self._is_short = [], False
        for request, slot, start, count, tells in rows:
            if request.slot != slot or request.read != start:
                continue
            request.read = start + count
            if tells:
                request.length = length = request.length + 1
                if length == request.full_length:
                    done.append(request)
        for request in done:
            self._give_back(request)
            request.status = "finished"
        if done:
            self.running = [request for request in self.running if request.slot is not None]
        return done

    def finish(self, request: Request) -> None:
        """A stop token was seen: the request leaves now, if it has not done so already."""
        if request.status != "finished":
            self._leave(request)

    def cancel(self, request: Request) -> None:
        """The request leaves now; ScheduleError for one that has left, or was never here."""
        if isinstance(request, Request) and request.status == "finished":
            raise ScheduleError(f"{request!r} cannot be cancelled: it was cancelled before, or has all its tokens.")
        self._leave(request)

    def _leave(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
            self._give_back(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            raise ScheduleError(f"{_named(request)} is unknown to this scheduler. Cancel it where it was added.")
        request.status = "finished"

    def _admit(self) -> None:
        """Admit the oldest waiting requests while a slot is free and there are pages for all their tokens.

        Where pages are shared, one waits too while a request that runs is about to read what both begin with.
        One page for each running request must stay free. Otherwise the next row that grows would preempt the newcomer,
        and the newcomer would have to read its tokens again.
        """
        joins = self.schedule.joins
        if self.running and not joins:
            return
        if self.schedule.aligned:
            group = [self.waiting[place] for place in range(min(len(self.waiting), self.num_slots))]
            for request, pad in zip(group, self.schedule.pads([each.length for each in group]), strict=True):
                request.pad = pad
        while self.waiting and len(self.running) < self.num_slots:
            request, slot = self.waiting[0], self._free_slots[0]
            if request.known < request.length:  # preempted, and some of its tokens are on the device alone
                return
            self.ledger.skip(slot, request.pad)
            cached = self.ledger.join(slot, request, patient=joins, spare=len(self.running) if joins else 0)
            if cached is None:
                return
            heapq.heappop(self._free_slots)
            request.slot, request.status, request.read, request.cached = slot, "running", cached, cached
            self.running.append(self.waiting.popleft())

    def _chunk(self) -> int:
        """Most tokens of a prompt in the next pass."""
        if self.schedule.shortest_first and all(request.read == 0 for request in self.running):
            return min(request.length for request in self.running)
        return self.schedule.chunk or MOST

    def _grow(self, request: Request, slot: int) -> bool:
        """Take a page for a row that decodes; False where it is itself the newest, and gives way."""
        while not self.ledger.reach(slot, request.pad + request.length):
            if self._preempt_newest() is request:
                return False
        return True

    def _preempt_newest(self) -> Request:
        request = self.running.pop()
        self._give_back(request)
        request.read, request.status = 0, "waiting"
        self.waiting.appendleft(request)
        self.num_preempted += 1
        self._is_short = True
        return request

    def _give_back(self, request: Request) -> None:
        slot, request.slot = request.slot, None
        assert slot is not None
        self.ledger.release(slot)
        heapq.heappush(self._free_slots, slot)


def _named(request: object) -> str:
    return repr(request) if isinstance(request, Request) else told(request)
