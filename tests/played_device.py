"""A scheduler's device that is played: it keeps tokens where keys would be, and tells values late."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate

from eet_lab.scheduling import HIDDEN, PageLedger, Request, Row, Schedule, Scheduler, SharedPageLedger, Slab

VOCAB, STOP = 60, 0
LATE = 8
"""Passes after which a value is on the host at the latest."""

CONTEXT = 64


def scheduler_of(ledger: PageLedger | Slab | None = None, **policy) -> Scheduler:
    made = Schedule(**{"max_rows": 4, "joins": True} | policy)
    return Scheduler(made, ledger or Slab(4, CONTEXT), CONTEXT)


def next_token(tokens: Sequence[int]) -> int:
    """A model: what it tells depends on every token before, so one that was misread changes all that follow."""
    return hash(tuple(tokens)) % VOCAB


def alone(request: Request) -> list[int]:
    """What the model tells where nobody else is there."""
    tokens, new = list(request.prompt), list[int]()
    while len(new) < request.max_new_tokens and new[-1:] != [STOP]:
        new.append(next_token(tokens + new))
    return new


class Device:
    """Runs passes in the order of their launches. It has a token buffer by slot, a block table that is written only
    where the ledger tells of changes, and memory, which holds tokens in the place of their keys, each with a digest of
    all before it, of which keys depend too.
    """

    def __init__(self, ledger: PageLedger | Slab) -> None:
        self.ledger = ledger
        self.tokens: list[list[int]] = [[] for _ in range(ledger.num_slots)]
        self.table: list[list[int]] = [[] for _ in range(ledger.num_slots)]
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}

    def mirror(self) -> None:
        for source, target in self.ledger.take_copies() if isinstance(self.ledger, SharedPageLedger) else ():
            for column in range(self.ledger.page):
                self.memory[target, column] = self.memory[source, column]
        for slot in self.ledger.take_changes() if isinstance(self.ledger, PageLedger) else ():
            self.table[slot] = list(self.ledger.table[slot])
        assert isinstance(self.ledger, Slab) or self.table == self.ledger.table

    def place(self, slot: int, column: int) -> tuple[int, int]:
        if isinstance(self.ledger, Slab):
            assert column < self.ledger.most_columns
            return slot, column
        page = self.table[slot][column // self.ledger.page]
        assert page != HIDDEN
        return page, column % self.ledger.page

    def run(self, rows: list[Row]) -> list[tuple[Request, int]]:
        for request, slot, start, count, _ in rows:
            if start == request.cached:  # the host writes what it knows
                self.tokens[slot] = [*request.prompt, *request.generated]
            new = self.tokens[slot][start : start + count]
            assert len(new) == count > 0
            for column, token in enumerate(new, start):
                before = self.memory[self.place(slot, column - 1)][1] if column else 0
                place = self.place(slot, column)
                if isinstance(self.ledger, SharedPageLedger):
                    check_unshared(self.ledger, place[0])
                self.memory[place] = token, hash((before, token))
        told = []
        for request, slot, start, count, tells in rows:
            assert tells == (start + count == len(self.tokens[slot]))
            if tells:
                seen, digests = zip(*(self.memory[self.place(slot, at)] for at in range(start + count)), strict=True)
                assert list(digests) == digests_of(seen), "keys of other tokens"
                self.tokens[slot].append(next_token(seen))
                told.append((request, self.tokens[slot][-1]))
        return told


def digests_of(tokens: Sequence[int]) -> list[int]:
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]


def check_unshared(ledger: SharedPageLedger, page: int) -> None:
    """A page that is written to belongs to one request at most, and nobody finds it."""
    assert ledger._users[page] <= 1, "a shared page is written to"
    assert page not in ledger._idle and not (page in ledger._by_page and ledger._by_page[page].is_read)


def check_shared(ledger: SharedPageLedger, device: Device) -> None:
    """Every page is free, cached or someone's, as often as its counter says; and holds what it is found by."""
    given = Counter(page for pages in ledger.table for page in pages)
    assert [given[page] for page in range(ledger.num_pages)] == ledger._users, "a counter is wrong"
    assert sorted([*given, *ledger._idle, *ledger._free]) == list(range(HIDDEN + 1, ledger.num_pages)), "a page is lost"
    assert ledger.num_shared == sum(count - 1 for count in given.values())
    assert {each.page: each for each in ledger._by_key.values()} == ledger._by_page
    assert all(each.key == key for key, each in ledger._by_key.items()) and set(ledger._idle) <= set(ledger._by_page)
    ends = {0: 0}  # the digest behind each page that can be found, by its number
    for key, each in sorted(ledger._by_key.items(), key=lambda item: item[1].number):
        if key[0] in ends and each.is_read:
            held = [device.memory[each.page, column] for column in range(ledger.page)]
            assert [token for token, _ in held] == list(key[1])
            before = ends[key[0]]
            for token, digest in held:
                before = hash((before, token))
                assert digest == before, "a page that follows other tokens"
            ends[each.number] = before


class Server:
    """What an engine does with a scheduler. It looks at the scheduler's promises before each pass."""

    def __init__(self, scheduler: Scheduler, draw: random.Random, cancels: float = 0.0) -> None:
        self.scheduler, self.draw, self.cancels = scheduler, draw, cancels
        self.device = Device(scheduler.ledger)
        self.added: dict[Request, int] = {}  # and when
        self.in_flight: deque[list[tuple[Request, int]]] = deque()
        self.finished: list[Request] = []  # those with all tokens, in the order of their ends
        self.stopped: set[Request] = set()
        self.cancelled: set[Request] = set()
        self.num_passes = 0

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.added[request] = len(self.added)

    def step(self) -> None:
        before = list(self.scheduler.running)
        rows = self.scheduler.next()
        self.check(rows, before)
        self.device.mirror()
        if not rows:
            assert self.in_flight or self.scheduler.idle, "nothing can be done, and nothing will change that"
            self.receive(0)
            return
        if self.draw.random() < 0.2:  # also between plan and launch
            self.receive(self.draw.randint(0, LATE))
        self.cancel_some()
        self.in_flight.append(self.device.run(rows))
        self.finished += self.scheduler.advance(rows)
        self.num_passes += 1
        self.receive(self.draw.randint(0, LATE))

    def receive(self, leave: int) -> None:
        """Values of all passes but the last few come to the host."""
        while len(self.in_flight) > leave:
            for request, token in self.in_flight.popleft():
                if request not in self.cancelled | self.stopped:
                    request.generated.append(token)
                    if token == STOP:
                        self.stopped.add(request)
                        self.scheduler.finish(request)

    def cancel_some(self) -> None:
        present = [*self.scheduler.running, *self.scheduler.waiting]
        if present and self.draw.random() < self.cancels:
            request = self.draw.choice(present)
            self.scheduler.cancel(request)
            self.cancelled.add(request)

    def check(self, rows: list[Row], before: list[Request]) -> None:
        scheduler, policy, ledger = self.scheduler, self.scheduler.schedule, self.scheduler.ledger
        running, waiting = scheduler.running, scheduler.waiting
        assert scheduler.next() == rows, "a plan counts nothing"
        assert sum(row.count for row in rows) <= (policy.budget or 10**9)
        assert all(1 <= row.count <= (policy.chunk or 10**9) for row in rows)
        slots = [request.slot for request in running]
        assert len(set(slots)) == len(slots) <= policy.max_rows and set(slots) <= set(range(policy.max_rows))
        assert len({row.slot for row in rows}) == len(rows)
        for request, slot, start, count, tells in rows:
            assert request in running and (slot, start) == (request.slot, request.read)
            assert start + count <= ledger.columns[slot]
            assert tells == (start + count == request.length)
        assert not running or running[0] in {row.request for row in rows}, "the oldest makes progress"
        assert {r for r in running if r.length - r.read == 1} <= {row.request for row in rows}, "decoding rows wait"
        assert all(r.status == "running" for r in running) and all(r.status == "waiting" for r in waiting)
        assert all((r.slot, r.read) == (None, 0) for r in waiting)
        arrival = [self.added[request] for request in (*running, *waiting)]
        assert arrival == sorted(arrival), "served in the order of arrival"
        if before and not policy.joins:
            assert set(running) <= set(before), "somebody joined"
        if isinstance(ledger, SharedPageLedger):
            check_shared(ledger, self.device)
        elif isinstance(ledger, PageLedger):
            given = [page for pages in ledger.table for page in pages]
            assert sorted([*given, *ledger._free]) == list(range(HIDDEN + 1, ledger.num_pages)), "a page has two owners"
        if isinstance(ledger, PageLedger):
            assert all(pages == [] for slot, pages in enumerate(ledger.table) if slot not in slots)

    def end(self) -> None:
        """Serve until all have left; then everybody has what they would have had alone, and everything is back."""
        while not self.scheduler.idle:
            self.step()
        self.receive(0)
        assert self.scheduler.next() == [] and not self.scheduler.running
        assert len(self.finished) == len(set(self.finished))
        assert set(self.finished) | self.stopped | self.cancelled == set(self.added), "somebody was lost"
        for request in self.added:
            assert (request.status, request.slot) == ("finished", None)
            whole = alone(request)
            if request in self.cancelled:
                assert request.generated == whole[: len(request.generated)]
            else:
                assert request.generated == whole
            if request in self.finished:
                assert request.length == request.full_length
        if isinstance(ledger := self.scheduler.ledger, PageLedger):
            assert ledger.free == ledger.num_pages - 1
        assert sorted(self.scheduler._free_slots) == list(range(self.scheduler.schedule.max_rows))
        # The oldest reads at least a token in each pass, and never reads one again once it is the oldest.
        assert self.num_passes <= sum(request.full_length for request in self.added)


def requests(draw: random.Random, number: int, most: int) -> list[Request]:
    """Some that need up to `most` columns."""
    made = []
    for _ in range(number):
        columns = draw.randint(1, most)
        length = draw.choice((1, columns, draw.randint(1, columns)))
        made.append(Request(tuple(draw.choices(range(VOCAB), k=length)), columns + 1 - length))
    return made


def serve(server: Server, arrivals: list[Request]) -> None:
    """Requests come while others run."""
    for request in arrivals:
        server.add(request)
        for _ in range(server.draw.choice((0, 0, 1, 5))):
            server.step()
    server.end()
