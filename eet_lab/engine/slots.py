"""Requests that join and leave while others run: rows of one state, which they come to and go from.

T tokens of a pass, B slots, S columns of the canvas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import current_thread
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eet_lab.engine.clock import RequestClock
from eet_lab.engine.session import Runner
from eet_lab.engine.settings import Settings
from eet_lab.engine.stream import StepTokens, open_stream
from eet_lab.errors import PromptError
from eet_lab.ops.reference import noise_keys
from eet_lab.ops.types import Span, Step
from eet_lab.parts.prompts import nobody
from eet_lab.parts.trace import Rehearsal
from eet_lab.scheduling import Request, Row, Schedule, Scheduler

if TYPE_CHECKING:
    from eet_lab.engine.engine import Engine

COLUMNS = 1024
"""Of a slot, where nothing says how long requests will be."""

NOBODY = -1
"""The noise key of a slot that no request has."""

EXTENT_STEP = 256
"""Passes are rehearsed with the columns of the cache rounded up to a multiple of this, so that few shapes come up."""

TOKEN_STEP = 64
"""The same of their tokens, where these are more: only below it do ops choose by how many there are."""


class NewToken(NamedTuple):
    """A token that has come to the host, and when: ms since the slots were opened, without setup."""

    request: Request
    token: int
    t_ms: float


class Slots(Runner):
    """A state of B rows, its KV cache, and the scheduler that says which request reads what in the next pass.

    A slot that nobody has is an ordinary row whose limit is its first column: it reads that one again and again, and
    what it says is for nobody. So a captured step serves requests that come and go. Where every row reads one token,
    the pass is a decode step; else it reads each row's tokens end to end.
    """

    def __init__(self, engine: Engine, key: tuple, schedule: Schedule, capacity: int, settings: Settings) -> None:
        """For requests of at most `capacity` tokens. `settings` tell how all of them are drawn, but for the seed."""
        self.key, self.settings, self.schedule, self.thread = key, settings, schedule, current_thread()
        B, device = schedule.max_rows, engine.model.device
        engine.cache.open([0] * B, capacity)
        sampling = settings.sampling(B, device)
        sampling.noise.fill_(NOBODY)
        state, spans = nobody(B, capacity, device), [Span(row, 1, 0) for row in range(B)]
        super().__init__(engine, state, torch.zeros_like(sampling.noise), sampling, spans, capacity)
        self._owners: list[Request | None] = [None] * B  # as the device knows it: those that left are still there
        self.scheduler = Scheduler(schedule, engine.cache.ledger, engine.model.config.context)
        self._most_tokens = schedule.most_tokens(capacity)
        engine._allocating = "the arena of activations"
        engine.memory.reserve(self._passes(self._most_tokens, capacity), like=engine.model.words)

    def begin(self, clock: RequestClock) -> None:
        """Start to count time and passes, where nothing runs and nothing is on its way."""
        self.clock = clock
        self.state.num_passes.zero_()
        self._stream = open_stream(self.clock, self._engine.model.device, self.schedule.max_rows)
        # Of each pass on its way to the host: who is told its tokens, and in which slot.
        self._in_flight: deque[list[tuple[Request, int]]] = deque()
        self._unfinished: dict[Request, RequestSettings] = {}

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is on its way to the host."""
        return self.scheduler.idle and not self._in_flight

    @property
    def is_deserted(self) -> bool:
        """All that is on its way is for requests that were cancelled."""
        return self.scheduler.idle and not self._unfinished

    def check_alike(self, settings: Settings) -> None:
        """PromptError for what cannot share a pass with those that are in flight."""
        for name in ("temperature", "top_k", "top_p"):
            mine, theirs = getattr(settings, name), getattr(self.settings, name)
            if mine != theirs:
                raise PromptError(
                    f"{name} is {mine}, but the requests in flight have {theirs}, and a pass draws all its tokens in "
                    "one way. Ask for the same, wait until they are done, or use another Engine: weights are shared."
                )

    def add(self, request: Request, settings: RequestSettings) -> None:
        """Queue a request. Errors: those of `check`."""
        self.check([request])
        self.scheduler.add(request)
        self._unfinished[request] = settings

    def check(self, requests: Sequence[Request]) -> None:
        """PromptError for one that is longer than a slot, or than all pages."""
        longest = max(requests, key=lambda each: each.full_length)
        self.scheduler.check(longest)
        if longest.full_length > self.capacity:
            raise PromptError(
                f"The prompt has {len(longest.prompt):,} tokens; with {longest.max_new_tokens:,} new ones it would "
                f"pass its slot, whose room is {self.capacity:,} tokens. Ask for fewer, or make room by Engine.reserve "
                "while no request is in flight."
            )

    def cancel(self, request: Request) -> None:
        """The request leaves now, and what is on its way to it is for nobody.

        Errors: ScheduleError for one that is unknown, or done.
        """
        if self._unfinished.pop(request, None) is None or request.status != "finished":
            self.scheduler.cancel(request)
        request.finish_reason = "cancelled"

    def step(self) -> list[NewToken]:
        """One pass for all that are in flight; returns the tokens that have come to the host meanwhile.

        Where there is nothing to read, it waits for those that are on their way.
        """
        rows = self.scheduler.next()
        if not rows:
            return self.drain()
        self._engine.cache.mirror()
        step = self._received(rows)
        if step is None:
            extent = max(row.start for row in rows) + 1
            self.launch(extent)
        else:
            self._run("prefill", step._replace(ids=self.state.tokens[step.rows, step.columns]))
        self._in_flight.append([(row.request, row.slot) for row in rows if row.tells])
        arrived = self._stream.push(self.state)
        self.scheduler.advance(rows)
        self._engine.cache.keep([request.read for request in self.scheduler.running])
        return self._read(arrived)

    def close(self) -> None:
        """Let go of graphs, and of all requests: nothing more will come for them."""
        super().close()
        for request in self._unfinished:
            request.finish_reason = "cancelled"
        self._unfinished = {}

    def drain(self) -> list[NewToken]:
        """Wait for all that is on its way to the host."""
        return self._read(self._stream.drain())

    def num_steps(self, requests: Sequence[Request]) -> int:
        """About how many passes tell tokens of these, if nobody else is here."""
        waves = -(-len(requests) // self.schedule.max_rows)
        return waves * max(request.max_new_tokens for request in requests)

    def _decode(self, extent: int, exact: bool = False) -> None:
        super()._decode(extent, exact=False)  # rows end in columns of their own

    def _received(self, rows: Sequence[Row]) -> Step | None:
        """Send what the pass needs that is not on the device: who joins and leaves, and the step.

        None for the step where every request that runs reads one token: that one is there already.
        """
        came = [row for row in rows if row.start == 0]
        left = [slot for slot, owner in enumerate(self._owners) if owner is not None and owner.slot != slot]
        alike = len(rows) == len(self.scheduler.running) and all(row.count == 1 for row in rows)
        moved = _moved(came, left, self._unfinished) if came or left else []
        step = [] if alike else _step(rows, self.schedule.max_rows)
        for slot in left:
            self._owners[slot] = None
        for row in came:
            self._owners[row.slot] = row.request
        if not moved and not step:
            return None
        engine = self._engine
        arrived = engine.inbox.receive([*moved, *step])
        if moved:
            slots, *values, where, columns, ids = arrived[: len(moved)]
            state = self.state
            kept = (state.end, state.limit, state.columns, state.ids, state.positions, self._sampling.noise)
            for part, new in zip(kept, values, strict=True):
                part.index_copy_(0, slots, new)
            state.tokens.index_put_((where, columns), ids)
        if alike:
            return None
        positions, owner, last, first, count = arrived[len(moved) :]
        spans = tuple(Span(*span, 0) for span in zip(step[3].tolist(), step[4].tolist(), strict=True))
        extent = max(row.start + row.count for row in rows)
        return self._placed(
            Step(positions, positions, owner, positions, last, self._next.num_pad, first, count, spans, extent, False)
        )

    def _placed(self, step: Step) -> Step:
        """The same, once its memory is planned."""
        memory, generation, T = self._engine.memory, self._engine.memory.generation, len(step.rows)
        extent = min(_rounded(step.extent, EXTENT_STEP), self.capacity)
        T = T if T <= TOKEN_STEP else min(_rounded(T, TOKEN_STEP), self._most_tokens)
        memory.plan(self._passes(T, extent), like=self._engine.model.words)  # it recurs, so it is no setup
        if memory.generation != generation:
            self.launch = self._new_launch()
        return step

    def _passes(self, T: int, extent: int) -> dict[str, Rehearsal]:
        """A pass over so many tokens, whosever they are, and the longest decode step; to be rehearsed."""
        return self._engine.rehearser.joined(self.schedule.max_rows, self.capacity, self._sampling, T, extent)

    def _read(self, arrived: Sequence[StepTokens]) -> list[NewToken]:
        """What the passes that have arrived told, to those that are still interested."""
        found = []
        for ids, t_ms in arrived:
            for request, slot in self._in_flight.popleft():
                settings = self._unfinished.get(request)
                if settings is None:
                    continue  # it has left: cancelled, or stopped by an earlier token
                token = ids[slot]
                request.generated.append(token)
                found.append(NewToken(request, token, t_ms))
                if token in settings.stop:
                    request.finish_reason = "stop"
                    self.scheduler.finish(request)
                elif len(request.generated) == request.max_new_tokens:
                    request.finish_reason = "length"
                if request.done:
                    del self._unfinished[request]
        return found


class RequestSettings(NamedTuple):
    """What a request asks for that the scheduler need not know."""

    stop: frozenset[int]
    noise: int  # key of its row's noise
    forced: tuple[int, ...] = ()  # what it shall generate, whatever the model says

    @classmethod
    def of(cls, settings: Settings, number: int = 0, forced: Sequence[int] = ()) -> RequestSettings:
        """Of the request of that number among those of one seed: as row `number` of a batch, it draws the same."""
        noise = int(noise_keys(settings.seed, 1, first=number))
        return cls(frozenset(() if forced else settings.stop), noise, tuple(forced))


def _moved(came: Sequence[Row], left: Sequence[int], settings: dict[Request, RequestSettings]) -> list[Tensor]:
    """Slots, and for each of them end, limit, column, id, position and noise key; then the prompts, token by token:
    slots, columns and ids. On the host.
    """
    values = {slot: (slot, 0, 0, 0, 0, 0, NOBODY) for slot in left}
    where, columns, ids = list[int](), list[int](), list[int]()
    for request, slot, *_ in came:
        known = (*request.prompt, *request.generated, *settings[request].forced[len(request.generated) :])
        values[slot] = slot, len(known), request.full_length - 1, 0, known[0], 0, settings[request].noise
        where += [slot] * len(known)
        columns += range(len(known))
        ids += known
    return [*map(_tensor, zip(*values.values(), strict=True)), *map(_tensor, (where, columns, ids))]


def _step(rows: Sequence[Row], num_slots: int) -> list[Tensor]:
    """Positions and rows [T]; last, first and count [B]; on the host. A slot without a row reads no token."""
    counts = np.array([row.count for row in rows], np.int64)
    slots = np.array([row.slot for row in rows], np.int64)
    starts = np.array([row.start for row in rows], np.int64)
    begins = counts.cumsum() - counts
    positions = np.arange(counts.sum()) + np.repeat(starts - begins, counts)
    first, count, last = (np.zeros(num_slots, np.int64) for _ in range(3))
    first[slots], count[slots], last[slots] = begins, counts, begins + counts - 1
    return list(map(torch.from_numpy, (positions, np.repeat(slots, counts), last, first, count)))


def _rounded(number: int, step: int) -> int:
    """Up to a multiple."""
    return -(-number // step) * step


def _tensor(numbers: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(numbers, np.int64))
