"""Slots on the device, the scheduler that says who reads what in them, and the passes that do so.

T tokens of a pass, B slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from threading import current_thread
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from eet_lab.engine.clock import RequestClock
from eet_lab.engine.logprobs import LogprobLog
from eet_lab.engine.meta_trace import RequestShape, pass_name
from eet_lab.engine.stream import PassTokens, StepTokens, open_stream
from eet_lab.engine.token_buffer import Arrival, RequestSettings, SlotTable, num_numbers_of_changes
from eet_lab.ops.types import Batch, Choice, Keys
from eet_lab.parts.batches import batch_of, decode_batch
from eet_lab.parts.buckets import mixed, rounded_up
from eet_lab.parts.steps import Replays
from eet_lab.progress import Cancel
from eet_lab.scheduling import Held, Request, Row, Schedule, Scheduler
from eet_lab.scheduling.request import check_length

if TYPE_CHECKING:
    from eet_lab.engine.engine import Engine

COLUMNS = 1024
"""The columns of a slot, where nothing says how long requests will be."""

FEW_TOKENS, LEAST_TOKENS = 64, 8
"""Up to so many tokens ops choose by how many there are. Passes of more ask for the same things, none for more than the
largest one. And the least that a pass computes on a GPU.
"""

Spans = tuple[tuple[int, int], ...]


class NewToken(NamedTuple):
    """A token that has come to the host, and when: ms since the slots were opened, without setup."""

    request: Request
    token: int
    t_ms: float


class _Join(NamedTuple):
    """A pass that reads prompts, as a graph has it, and what chooses its tokens."""

    batch: Batch
    choice: Choice
    tells_logprobs: bool


class Slots:
    """Slots for requests that run side by side: those of a batch, which begin together, or such that join and leave.

    An idle slot is an ordinary row whose limit is its first column: it reads that one again and again, and its tokens
    are dropped. So a captured step serves requests that come and go. Where every row reads one token
    that is on the device already, the pass is a decode step; else it is sent from the host.
    """

    def __init__(self, engine: Engine, schedule: Schedule, num_slots: int, capacity: int) -> None:
        """For requests of at most `capacity` tokens."""
        self._engine, self.schedule, self.capacity = engine, schedule, capacity
        self.num_slots, self.thread = num_slots, current_thread()
        self.has_sizes = engine.model.device.type == "cuda"  # else any number of tokens is one
        self.is_batch = schedule.max_rows is None
        engine.staging.hold(num_numbers_of_changes(num_slots))
        self.table = SlotTable(engine.slot_staging, self.num_slots, capacity)
        self._launches: dict[tuple[Choice, bool], Any] = {}
        self._replays: Replays | None = None  # of passes that are no decode steps
        self._choices: tuple[Choice, ...] = ()  # for which there is a place in the arena
        self._choice = Choice.GREEDY  # of the next pass: the most general one of the requests that are in slots
        self._logprobs: LogprobLog | None = None  # once a request has asked for them
        self._tells_logprobs = False  # of the next pass: whether a request in a slot asks for them
        self._generation = -1
        self._unfinished: dict[Request, RequestSettings] = {}

    def begin(self, clock: RequestClock, shape: RequestShape, ran_last: bool, lead_ms: float) -> None:
        """Start to count time and passes, where nothing runs and nothing is on its way.

        `ran_last`: no others have used the same memory since. `lead_ms` is of passes that a device is given.
        """
        engine, cache = self._engine, self._engine.cache
        self.clock, self._choice, self._tells_logprobs = clock, Choice.GREEDY, False
        if self.is_batch or not ran_last:
            self._choices = shape.choices
        self._stream = open_stream(clock, engine.model.device, self.num_slots, lead_ms)
        if self.is_batch or not ran_last:
            cache.open(shape.num_pad, self.capacity, shape.ends)
        if not ran_last:
            self.table.fill([])
            self._owners = list[Request | None]([None] * self.num_slots)  # as the device knows them
        elif not self.is_batch:
            self.table.buffer.num_passes.zero_()
        if cache.generation != self._generation:  # what was captured is void
            padded = self.schedule.aligned and self.num_slots > 1
            keys = Keys(self.table.begin, cache.block_table, padded=padded)
            self._generation, self._next = cache.generation, decode_batch(self.table.buffer, keys, self.capacity)
            self.void()
        ledger = Held(cache.ledger) if self.is_batch else cache.ledger
        self.scheduler = Scheduler(self.schedule, ledger, engine.model.config.context)
        self._pads = shape.num_pad
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

    @property
    def captures(self) -> int:
        """Decode steps captured so far; 0 where the launch part captures nothing."""
        return sum(getattr(launch, "captures", 0) for launch in self._launches.values())

    def add(self, request: Request, settings: RequestSettings) -> None:
        """Queue a request. Errors: those of `check`."""
        self.check([request])
        self._make_room(settings.choice)
        if settings.logprobs is not None and self._logprobs is None:
            model, self._engine._allocating = self._engine.model, "log-probabilities"
            self._logprobs = LogprobLog(self.num_slots, model.config.vocab_size, model.device)
        self.scheduler.add(request)
        self._unfinished[request] = settings
        if self.is_batch:
            self._added.append(request)
            # Until all have left: nothing is captured on the way.
            self._choice = max(self._choice, settings.choice)
            self._tells_logprobs |= settings.logprobs is not None

    def _make_room(self, choice: Choice) -> None:
        """A place in the arena for passes that choose like that. A batch has it from the beginning."""
        if self.is_batch or choice in self._choices:
            return
        self._choices = (*self._choices, choice)
        self._place(self.schedule.most_tokens(self.capacity), reserved=True)

    def _place(self, T: int, *, reserved: bool) -> None:
        """Memory for passes of T tokens, and for the longest decode step, by whatever chooses their tokens."""
        passes = self._engine.tracer.mixed(self.schedule, self.capacity, self._choices, T, self.capacity)
        self._engine.place(passes, reserved=reserved)

    def check(self, requests: Sequence[Request]) -> None:
        """PromptError for one that is longer than a slot, or than all pages."""
        longest = max(requests, key=lambda each: each.full_length)
        slot = f"its slot, whose room is {self.capacity:,} tokens"
        check_length(longest, self.capacity, slot, "make room by Engine.reserve while no request is in flight")
        self.scheduler.check(longest)

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
        and is not captured, between two ops: Cancelled, after which these slots are of no use.
        """
        rows = self.scheduler.next()
        if not rows:
            return self.drain()
        engine = self._engine
        engine.cache.mirror()
        changes = self._changes(rows)
        if self._is_decode(rows):
            if changes:
                self.table.change(engine.staging.receive(changes))
            self._decode_step(rows)
        else:
            self._other_pass(rows, changes, cancel)
        self._in_flight.append([(row.request, row.slot) for row in rows if row.tells])
        log = self._written
        self.scheduler.advance(rows)
        arrived = self._stream.push(self.table.buffer, None if log is None else log.rows, self.scheduler.is_full)
        engine.cache.keep([request.read for request in (self._added if self.is_batch else self.scheduler.running)])
        return self._read(arrived)

    def close(self) -> None:
        """Let go of graphs, which refer to the slots as these do to them; and of all requests: nothing more comes."""
        self.void()
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

    @property
    def _written(self) -> LogprobLog | None:
        """What the next pass writes beside its tokens, if a request in a slot asks for it."""
        return self._logprobs if self._tells_logprobs else None

    def _is_decode(self, rows: Sequence[Row]) -> bool:
        """Whether each that runs reads one token, which the device knows; the first pass of a batch is sent."""
        joined = not self.is_batch
        return len(rows) == len(self.scheduler.running) and all(
            row.count == 1 and (row.start or joined) for row in rows
        )

    def _decode_step(self, rows: Sequence[Row]) -> None:
        """Launch the pass that reads one token in every slot."""
        ends = {row.slot: row.request.pad + row.start + 1 for row in rows}
        max_kv = max(ends.values())
        self._seen: Spans | None = None
        if not self._engine.parts.is_captured:  # a replay would show its ops the numbers of another step
            self._seen = tuple((pad, ends.get(slot, max_kv)) for slot, pad in enumerate(self._pads))
        kind = self._choice, self._tells_logprobs
        if kind not in self._launches:  # the last column is never read
            self._launches[kind] = self._engine.parts.launch(self._decode, self.capacity - 1)
        self._launches[kind](max_kv)

    def _decode(self, max_kv: int) -> None:
        batch = self._next._replace(max_kv=max_kv)
        if self._seen is not None:
            spans = tuple((slot, 1) for slot in range(self.num_slots))
            batch = batch._replace(spans=spans, keys=batch.keys._replace(spans=self._seen))
        self._run("decode", batch)

    def _other_pass(self, rows: Sequence[Row], changes: list[Tensor], cancel: Cancel | None) -> None:
        """A pass that reads prompts: replayed where requests join, if it is small enough and attention allows it."""
        engine, size = self._engine, None
        if not self.is_batch:
            size = self.pass_size(sum(row.count for row in rows))
        batch = batch_of(rows, self.num_slots, reads_pads=self.schedule.aligned, size=size)
        self._plan(batch)
        if len(batch.rows) <= self.most_captured:
            if changes:
                self.table.change(engine.staging.receive(changes))
            self._replay(batch)
            return
        engine._cancel = cancel
        try:
            self._run("prefill", self._sent(rows, batch, changes))
        finally:
            engine._cancel = None

    @cached_property
    def most_captured(self) -> int:
        """The most tokens of a pass that is captured though it is no decode step; 0: none is."""
        launch = self._engine.parts.captures_joins
        return launch.tokens if launch is not None else 0

    def _replay(self, batch: Batch) -> None:
        """Run a pass by the graph of its sizes; of each the first runs as it is, and the second is captured."""
        if self._replays is None:
            launch, device = self._engine.parts.captures_joins, self._engine.model.device
            assert launch is not None
            self._replays = Replays(self._captured, device, launch.graphs, shown=lambda given: given, frees_first=False)
        self._replays(_Join(mixed(batch, self.capacity), self._choice, self._tells_logprobs))

    def _captured(self, join: _Join) -> Tensor:
        """Such a pass, on the device: whatever it reads, the token buffer has it."""
        batch = join.batch
        ids = self.table.buffer.tokens[batch.rows, batch.columns]
        return self._run("prefill", batch._replace(ids=ids, keys=self._next.keys))

    def void(self) -> None:
        """What was captured refers to memory that is not there any more."""
        self._launches, self._replays = {}, None

    def _run(self, name: str, batch: Batch) -> Tensor:
        engine = self._engine
        engine.memory.enter(pass_name(name, self._choice, self._choices))
        hidden = engine._hidden(batch)
        sampling = self.table.sampling._replace(choice=self._choice)
        token = engine.task(engine.model, engine.ops, hidden, batch, sampling)
        engine.ops.advance(self.table.buffer, token, batch.count)
        if (log := self._written) is not None:
            engine._allocating = "log-probabilities"
            log.write(engine.model, engine.parts.ops.norm_linear, hidden, batch, self.table.buffer)
        return token

    def _changes(self, rows: Sequence[Row]) -> list[Tensor]:
        """What the device has to know of those who come and leave, before this pass. A batch is sent whole."""
        came = [row for row in rows if row.start == row.request.cached]
        arrivals = [Arrival.of(row, self._unfinished[row.request]) for row in came]
        for row in came:
            self._owners[row.slot] = row.request
        if self.is_batch and came:
            self.table.fill(arrivals)
            return []
        left = [slot for slot, owner in enumerate(self._owners) if owner is not None and owner.slot != slot]
        for slot in left:
            self._owners[slot] = None
        if (came or left) and not self.is_batch:
            here = [self._unfinished[owner] for owner in self._owners if owner is not None]
            self._choice = max((each.choice for each in here), default=Choice.GREEDY)
            self._tells_logprobs = any(each.logprobs is not None for each in here)
        return self.table.changes(arrivals, left)

    def _sent(self, rows: Sequence[Row], batch: Batch, changes: Sequence[Tensor]) -> Batch:
        """A pass that is no decode step, on the device, and what changes with it, in one copy."""
        on_host = [part for part in batch if isinstance(part, Tensor)]
        arrived = self._engine.staging.receive([*changes, *on_host])
        if changes:
            self.table.change(arrived[: len(changes)])
        ids, positions, owner, columns, last, first, count = arrived[len(changes) :]
        if any(row.start + row.count > row.request.known for row in rows):  # the device alone knows some of them
            ids = self.table.buffer.tokens[owner, columns]
        keys = self._next.keys._replace(spans=batch.keys.spans)
        return Batch(ids, positions, owner, columns, last, first, count, keys, *batch[8:])

    def pass_size(self, tokens: int) -> int:
        """How many tokens a pass computes that reads so many where requests join.

        Each number of them is a shape of its own, for which a GPU's libraries choose and load kernels when it first
        comes: 4 to 12 ms; and up to `FEW_TOKENS` it has a trace of its own, too. So there are few sizes, of which at
        most a sixteenth is dummy from 1,024 tokens on.
        """
        if not self.has_sizes:
            return tokens
        few = max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        size = few if tokens <= FEW_TOKENS else rounded_up(tokens, FEW_TOKENS, 16)
        return min(size, max(tokens, self.schedule.most_tokens(self.capacity)))

    def _plan(self, batch: Batch) -> None:
        """Memory for a pass of such a size; that of a batch is planned before it begins.

        There is room for the largest one, so one of its kind, whatever it reads, needs no trace of its own.
        """
        if self.is_batch:
            return
        engine, T = self._engine, len(batch.rows)
        if T > FEW_TOKENS or not engine.parts.ops.kernels:  # only kernels are chosen by how few tokens there are
            T = self.schedule.most_tokens(self.capacity)
        self._place(T, reserved=False)  # it recurs, so it is no setup

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
                assert self._logprobs is not None and step.logprobs is not None
                told = self._logprobs.of(step.logprobs[slot], settings.logprobs)
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
