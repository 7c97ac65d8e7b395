"""Slots of requests: the scheduler says who reads what in them, and passes do so."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from threading import current_thread
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from eet_lab.engine.clock import RequestClock
from eet_lab.engine.meta_trace import RequestShape
from eet_lab.engine.slot_passes import SlotPasses
from eet_lab.engine.stream import PassTokens, StepTokens, open_stream
from eet_lab.engine.token_buffer import Arrival, RequestSettings
from eet_lab.errors import EngineBusy
from eet_lab.ops.types import Choice
from eet_lab.progress import Cancel
from eet_lab.scheduling import Held, Request, Row, Schedule, Scheduler
from eet_lab.scheduling.request import check_length

if TYPE_CHECKING:
    from eet_lab.engine.engine import Engine

COLUMNS = 1024
"""The columns of a slot, where nothing says how long requests will be."""


class NewToken(NamedTuple):
    """A token that has come to the host, and when: ms since the slots were opened, without setup."""

    request: Request
    token: int
    t_ms: float


class Slots:
    """Slots for requests that run side by side: those of a batch, which begin together, or such that join and leave.

    Where every row reads one token that is on the device already, the pass is a decode step; else it is sent from the
    host.
    """

    def __init__(self, engine: Engine, schedule: Schedule, num_slots: int, capacity: int) -> None:
        """For requests of at most `capacity` tokens."""
        self._engine, self.schedule, self.capacity = engine, schedule, capacity
        self.num_slots, self.thread = num_slots, current_thread()
        self.passes = SlotPasses(engine, schedule, num_slots, capacity)
        self.is_batch = self.passes.is_batch
        self._unfinished: dict[Request, RequestSettings] = {}

    def begin(self, clock: RequestClock, shape: RequestShape, ran_last: bool, lead_ms: float) -> None:
        """Start to count time and passes, where nothing runs and nothing is on its way.

        `ran_last`: no others have used the same memory since. `lead_ms` is of passes that a device is given.
        """
        engine, cache, self.clock = self._engine, self._engine.cache, clock
        self._stream = open_stream(clock, engine.model.device, self.num_slots, lead_ms)
        self.passes.begin(shape, ran_last)
        if not ran_last:
            self._owners = list[Request | None]([None] * self.num_slots)  # as the device knows them
        ledger = Held(cache.ledger) if self.is_batch else cache.ledger
        self.scheduler = Scheduler(self.schedule, ledger, engine.model.config.context)
        # Of each pass on its way to the host: who is told its tokens, and in which slot.
        self._in_flight: deque[list[tuple[Request, int]]] = deque()
        self._unfinished, self._added = {}, list[Request]()

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is on its way to the host."""
        return self.scheduler.idle and not self._in_flight

    @property
    def is_deserted(self) -> bool:
        """All that is on its way is for requests that were cancelled."""
        return self.scheduler.idle and not self._unfinished

    def check_thread(self, name: str) -> None:
        """EngineBusy where what is in flight belongs to another thread, which still lives; else it is this one's."""
        if self.idle or not self.thread.is_alive():
            self.thread = current_thread()
        if self.thread is not current_thread():
            raise EngineBusy(
                f"{name} was called on the thread {current_thread().name!r}, but the requests in flight belong to "
                f"{self.thread.name!r}. Call it there, such as by a queue that its loop over step() reads."
            )

    def add(self, request: Request, settings: RequestSettings) -> None:
        """Queue a request. Errors: those of `check`."""
        self.check([request])
        self.passes.make_room(settings.choice, settings.logprobs is not None)
        self.scheduler.add(request)
        self._unfinished[request] = settings
        if self.is_batch:
            self._added.append(request)

    def check(self, requests: Sequence[Request]) -> None:
        """PromptError for one that is longer than a slot, or than all pages."""
        longest = max(requests, key=lambda each: each.full_length)
        more = "make room by Engine.reserve while no request is in flight"
        if longest.full_length > self.capacity <= self.scheduler.ledger.most_columns:
            check_length(longest, self.capacity, f"its slot, whose room is {self.capacity:,} tokens", more)
        # Where the pages hold less, and its slot is too small as well, it needs both.
        self.scheduler.check(longest, *[more] * (longest.full_length > self.capacity))

    def cancel(self, request: Request) -> None:
        """The request leaves now, and its tokens that are still on their way to the host are dropped.

        Errors: ScheduleError for one that is unknown, or done.
        """
        is_here = isinstance(request, Request) and self._unfinished.pop(request, None) is not None
        if not is_here or request.status != "finished":
            self.scheduler.cancel(request)
        request.finish_reason = "cancelled"

    def step(self, cancel: Cancel | None = None) -> list[PassTokens]:
        """One pass for all that are in flight; returns what has come to the host meanwhile.

        Where there is nothing to read, it waits for what is on its way. `cancel` ends a pass that is no decode step,
        and is not replayed, between two ops: Cancelled, after which these slots are of no use.
        """
        rows = self.scheduler.next()
        if not rows:
            return self.drain()
        cache, passes = self._engine.cache, self.passes
        cache.mirror()
        changes = self._changes(rows)
        if self._is_decode(rows):
            passes.decode(rows, changes)
        else:
            passes.read_prompts(rows, changes, cancel)
        self._in_flight.append([(row.request, row.slot) for row in rows if row.tells])
        self.scheduler.advance(rows)
        arrived = self._stream.push(passes.table.buffer, passes.written, self.scheduler.is_full)
        cache.keep([request.read for request in (self._added if self.is_batch else self.scheduler.running)])
        return self._read(arrived)

    def close(self) -> None:
        """Let go of graphs, which refer to the slots as these do to them; and of all requests: nothing more comes."""
        self.passes.void()
        for request in self._unfinished:
            request.status, request.finish_reason = "finished", "cancelled"
        self._unfinished = {}

    def drain(self) -> list[PassTokens]:
        """Wait for all that is on its way to the host."""
        return self._read(self._stream.drain())

    def num_passes(self, requests: Sequence[Request]) -> int:
        """The approximate number of passes that these requests take, if no other request is here."""
        lengths, schedule = [len(request.prompt) for request in requests], self.schedule
        chunk = schedule.chunk or max(lengths)
        at_once = min(lengths) if schedule.shortest_first else chunk
        reads = 1 + -(-max(max(lengths) - at_once, 0) // chunk)
        waves = -(-len(requests) // self.num_slots)
        return waves * (reads - 1 + max(request.max_new_tokens for request in requests))

    def _is_decode(self, rows: Sequence[Row]) -> bool:
        """Whether each that runs reads one token, which the device knows; the first pass of a batch is sent."""
        joined = not self.is_batch
        return len(rows) == len(self.scheduler.running) and all(
            row.count == 1 and (row.start or joined) for row in rows
        )

    def _changes(self, rows: Sequence[Row]) -> list[Tensor]:
        """What the device has to know of those who come and leave, before this pass. A batch is sent whole."""
        came = [row for row in rows if row.start == row.request.cached]
        arrivals = [Arrival.of(row, self._unfinished[row.request]) for row in came]
        for row in came:
            self._owners[row.slot] = row.request
        if self.is_batch and came:
            self.passes.table.fill(arrivals)
            self._choose(self._unfinished.values())  # until all have left: nothing is captured on the way
            return []
        left = [slot for slot, owner in enumerate(self._owners) if owner is not None and owner.slot != slot]
        for slot in left:
            self._owners[slot] = None
        if (came or left) and not self.is_batch:
            self._choose([self._unfinished[owner] for owner in self._owners if owner is not None])
        return self.passes.table.changes(arrivals, left)

    def _choose(self, here: Collection[RequestSettings]) -> None:
        """The next pass chooses tokens, and tells of them, as the most demanding of these requests asks."""
        choice = max((each.choice for each in here), default=Choice.GREEDY)
        self.passes.choose(choice, any(each.logprobs is not None for each in here))

    def _read(self, arrived: Sequence[StepTokens]) -> list[PassTokens]:
        """What the passes that have arrived told, to those that are still interested."""
        return [PassTokens(step.t_ms, self._told(step)) for step in arrived]

    def _told(self, step: StepTokens) -> list[tuple[Request, int]]:
        """The tokens of the next pass on its way."""
        found = []
        for request, slot in self._in_flight.popleft():
            settings = self._unfinished.get(request)
            if settings is None:
                continue  # it has left: cancelled, or stopped by an earlier token
            token, is_last = step.ids[slot], len(request.generated) + 1 == request.max_new_tokens
            if is_forced := is_last and settings.last is not None:
                token = settings.last
            request.generated.append(token)
            if settings.logprobs is not None:
                assert self.passes.logprobs is not None and step.logprobs is not None
                told = self.passes.logprobs.of(step.logprobs[slot], settings.logprobs)
                request.logprobs.append(told._replace(logprob=0.0) if is_forced else told)
            found.append((request, token))
            if token in settings.stop:
                request.finish_reason = "stop"
                self.scheduler.finish(request)
            elif len(request.generated) == request.max_new_tokens:
                request.finish_reason = "length"
            if request.done:
                del self._unfinished[request]
        return found
