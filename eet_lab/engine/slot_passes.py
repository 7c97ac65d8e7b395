"""The passes over slots: where their activations lie, and how each is laid out, launched and captured.

T tokens of a pass, B slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from eet_lab.engine.logprobs import LogprobLog
from eet_lab.engine.meta_trace import RequestShape, pass_name
from eet_lab.engine.token_buffer import SlotTable, num_numbers_of_changes
from eet_lab.ops.types import Batch, Choice, Keys, Sampling, TokenBuffer
from eet_lab.parts.batches import batch_of, decode_batch
from eet_lab.parts.buckets import mixed, rounded_up
from eet_lab.parts.launch import GraphPool, Graphs
from eet_lab.parts.steps import Replays
from eet_lab.progress import Cancel
from eet_lab.scheduling import Row, Schedule

if TYPE_CHECKING:
    from eet_lab.engine.engine import Engine

FEW_TOKENS, LEAST_TOKENS = 64, 8
"""Up to so many tokens ops choose by how many there are. Passes of more ask for the same things, none for more than the
largest one. And the least that a pass computes on a GPU.
"""

FEW_SLOTS = 8
"""A captured decode step has one row, or so many, or a doubling of that; at most one for each slot."""

Spans = tuple[tuple[int, int], ...]
_Kind = tuple[Choice, bool, int]


class _Read(NamedTuple):
    """A pass that reads prompts, as a graph has it, and what chooses its tokens."""

    batch: Batch
    choice: Choice
    tells_logprobs: bool


class _DecodeStep(NamedTuple):
    """A decode step of the first slots."""

    batch: Batch
    buffer: TokenBuffer
    sampling: Sampling


class SlotPasses:
    """Runs passes over slots: decode steps, in which each slot reads a token of its own, and those that read prompts.

    An idle slot is an ordinary row whose limit is its first column: it reads that one again and again, and its tokens
    are dropped. So a captured step serves requests that come and go. Requests take the first slots that are free, and
    a step has the first rows alone, up to the last slot that is taken: rounded up where steps are captured
    (`step_size`), so that few sizes serve all.
    """

    def __init__(self, engine: Engine, schedule: Schedule, num_slots: int, capacity: int) -> None:
        """For requests of at most `capacity` tokens."""
        self._engine, self.schedule, self.capacity, self.num_slots = engine, schedule, capacity, num_slots
        self.has_sizes = engine.model.device.type == "cuda"  # else any number of tokens is one
        self.is_batch = schedule.max_rows is None
        engine.staging.hold(num_numbers_of_changes(num_slots))
        self.table = SlotTable(engine.slot_staging, num_slots, capacity)
        self.logprobs: LogprobLog | None = None  # once a request has asked for them
        self._launches: dict[_Kind, Callable[[int], None]] = {}
        self._steps: dict[int, _DecodeStep] = {}  # by the number of their rows
        self._placed = 0, num_slots  # tokens and rows of the passes that have their places in the arena
        self._replays: Replays | None = None  # of passes that are no decode steps
        self._pool = GraphPool()  # of what is in no plan, as log-probabilities: passes run one after the other
        self._choices: tuple[Choice, ...] = ()  # for which there is a place in the arena
        self._generation = -1

    def begin(self, shape: RequestShape, ran_last: bool) -> None:
        """The first pass is the next. `ran_last`: no others have used the same memory since."""
        cache = self._engine.cache
        self._pads, self._choice, self._tells_logprobs = shape.num_pad, Choice.GREEDY, False
        if self.is_batch or not ran_last:
            self._choices, self._placed = shape.choices, (self.schedule.most_tokens(self.capacity), self.num_slots)
            cache.open(shape.num_pad, self.capacity, shape.ends)
        if not ran_last:
            self.table.fill([])
        elif not self.is_batch:
            self.table.buffer.num_passes.zero_()
        if cache.generation != self._generation:  # what was captured is void
            padded = self.schedule.aligned and self.num_slots > 1
            self._keys, self._steps = Keys(self.table.begin, cache.block_table, padded=padded), {}
            self._generation = cache.generation
            self.void()

    def make_room(self, choice: Choice, tells_logprobs: bool) -> None:
        """Memory for passes that choose like that, and tell log-probabilities; a batch has its arena from the start."""
        if not self.is_batch and choice not in self._choices:
            self._choices = (*self._choices, choice)
            self._place(self.schedule.most_tokens(self.capacity), reserved=True)
        if tells_logprobs and self.logprobs is None:
            model, self._engine._allocating = self._engine.model, "log-probabilities"
            self.logprobs = LogprobLog(self.num_slots, model.config.vocab_size, model.device)

    def choose(self, choice: Choice, tells_logprobs: bool) -> None:
        """Let the next passes choose like this, the most general way of the requests in slots; and tell how likely."""
        self._choice, self._tells_logprobs = choice, tells_logprobs

    def void(self) -> None:
        """Let go of graphs, as where memory that they refer to has moved."""
        self._launches, self._replays = {}, None

    @property
    def written(self) -> Tensor | None:
        """What the last pass wrote beside its tokens, in the row of its number: log-probabilities, if it tells any."""
        return self.logprobs.rows if self._tells_logprobs and self.logprobs is not None else None

    @property
    def captures(self) -> int:
        """Decode steps captured so far; 0 where the launch part captures nothing."""
        return sum(getattr(launch, "captures", 0) for launch in self._launches.values())

    def decode(self, rows: Sequence[Row], changes: Sequence[Tensor]) -> None:
        """Launch the pass that reads one token in each slot up to the last one of `rows`, after what has changed."""
        self._change(changes)
        ends = {row.slot: row.request.pad + row.start + 1 for row in rows}
        max_kv, num_rows = max(ends.values()), self.step_size(1 + max(ends))
        self._seen: Spans | None = None
        if not self._engine.parts.is_captured:  # a replay would show its ops the numbers of another step
            self._seen = tuple((pad, ends.get(slot, max_kv)) for slot, pad in enumerate(self._pads[:num_rows]))
        kind, (T, placed_rows) = (self._choice, self._tells_logprobs, num_rows), self._placed
        if self.has_sizes and num_rows != placed_rows and not self._is_replayed(kind, max_kv):
            self._place(T, num_rows, reserved=False)  # before a capture, and it may end all graphs
        if kind not in self._launches:
            decode, longest = partial(self._decode, num_rows), self.capacity - 1  # the last column is never read
            self._launches[kind] = self._engine.parts.launch(decode, longest, self._pool)
        self._launches[kind](max_kv)

    def _is_replayed(self, kind: _Kind, max_kv: int) -> bool:
        launch = self._launches.get(kind)
        return isinstance(launch, Graphs) and launch.is_replayed(max_kv)

    def _decode(self, num_rows: int, max_kv: int) -> None:
        step = self._steps.get(num_rows) or self._new_step(num_rows)
        batch = step.batch._replace(max_kv=max_kv)
        if self._seen is not None:
            spans = tuple((slot, 1) for slot in range(num_rows))
            batch = batch._replace(spans=spans, keys=batch.keys._replace(spans=self._seen))
        self._run("decode", batch, step.buffer, step.sampling)

    def _new_step(self, num_rows: int) -> _DecodeStep:
        """A decode step of so many rows. It is kept: graphs hold the addresses of what it reads."""
        (buffer, sampling), keys = self.table.of_first(num_rows), self._keys
        table = None if keys.table is None else keys.table[:num_rows]
        keys = keys._replace(begin=keys.begin[:num_rows], table=table)
        step = self._steps[num_rows] = _DecodeStep(decode_batch(buffer, keys, self.capacity), buffer, sampling)
        return step

    def read_prompts(self, rows: Sequence[Row], changes: Sequence[Tensor], cancel: Cancel | None) -> None:
        """A pass that is no decode step: replayed, if it is small enough and attention allows it.

        `cancel` ends one that is not replayed, between two ops.
        """
        engine, size = self._engine, None
        if not self.is_batch:
            size = self.pass_size(sum(row.count for row in rows))
        batch = batch_of(rows, self.num_slots, reads_pads=self.schedule.aligned, size=size)
        self._plan(batch)
        engine._cancel = cancel
        try:
            if len(batch.rows) <= self.most_captured:
                self._change(changes)
                self._replay(batch)
            else:
                self._run("prefill", self._sent(rows, batch, changes), self.table.buffer, self.table.sampling)
        finally:
            engine._cancel = None

    @cached_property
    def most_captured(self) -> int:
        """The most tokens of a pass that is captured though it is no decode step; 0: none is."""
        launch = self._engine.parts.captures_prompts
        return launch.tokens if launch is not None else 0

    def _change(self, changes: Sequence[Tensor]) -> None:
        if changes:
            self.table.change(self._engine.staging.receive(changes))

    def _replay(self, batch: Batch) -> None:
        """Run a pass by the graph of its sizes; of each the first runs as it is, and the second is captured.

        Where requests join, few sizes serve all passes. A batch begins with one alone, whose graph serves prompts of
        the very same lengths: it computes nothing that the pass would not.
        """
        if self._replays is None:
            launch, device = self._engine.parts.captures_prompts, self._engine.model.device
            assert launch is not None
            self._replays = Replays(
                self._captured, device, launch.graphs,
                shown=lambda given: given, frees_first=False, staging=self._engine.staging, pool=self._pool,
            )  # fmt: skip
        given = batch if self.is_batch else mixed(batch, self.capacity)
        self._replays(_Read(given, self._choice, self._tells_logprobs))

    def _captured(self, read: _Read) -> Tensor:
        """Such a pass, on the device: where requests join, the token buffer has what it reads."""
        batch = read.batch
        ids = batch.ids if self.is_batch else self.table.buffer.tokens[batch.rows, batch.columns]
        keys = self._keys._replace(spans=batch.keys.spans)
        return self._run("prefill", batch._replace(ids=ids, keys=keys), self.table.buffer, self.table.sampling)

    def _run(self, name: str, batch: Batch, buffer: TokenBuffer, sampling: Sampling) -> Tensor:
        engine = self._engine
        engine.memory.enter(pass_name(name, self._choice, self._choices))
        hidden = engine._hidden(batch)
        token = engine.task(engine.model, engine.ops, hidden, batch, sampling._replace(choice=self._choice))
        engine.ops.advance(buffer, token, batch.count)
        if self._tells_logprobs and self.logprobs is not None:
            engine._allocating = "log-probabilities"
            self.logprobs.write(engine.model, engine.parts.ops.norm_linear, hidden, batch, buffer)
        return token

    def _place(self, T: int, decode_rows: int | None = None, *, reserved: bool) -> None:
        """Memory for passes of T tokens, and for the longest decode step of so many rows; None: of all slots. By
        whatever chooses their tokens.
        """
        self._placed = T, decode_rows or self.num_slots
        passes = self._engine.tracer.mixed(
            self.schedule, self.capacity, self._choices, T, self.capacity, self._placed[1]
        )
        self._engine.place(passes, reserved=reserved)

    def _sent(self, rows: Sequence[Row], batch: Batch, changes: Sequence[Tensor]) -> Batch:
        """A pass that is no decode step, on the device, and what changes with it, in one copy."""
        on_host = [part for part in batch if isinstance(part, Tensor)]
        arrived = self._engine.staging.receive([*changes, *on_host])
        if changes:
            self.table.change(arrived[: len(changes)])
        ids, positions, owner, columns, last, first, count = arrived[len(changes) :]
        if any(row.start + row.count > row.request.known for row in rows):  # the device alone knows some of them
            ids = self.table.buffer.tokens[owner, columns]
        keys = self._keys._replace(spans=batch.keys.spans)
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

    def step_size(self, num_taken: int) -> int:
        """How many rows a decode step has, where the last of so many slots is the last one that is taken.

        Captured steps have few sizes. What Python launches on a GPU has one: kernels are chosen by how many rows there
        are, and each choice has a plan of memory of its own.
        """
        if self.is_batch or (self.has_sizes and not self._engine.parts.is_captured):
            return self.num_slots
        if self.has_sizes and num_taken > 1:
            num_taken = max(FEW_SLOTS, 1 << (num_taken - 1).bit_length())
        return min(num_taken, self.num_slots)

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
