"""live: a model serves traffic for real, in this process, by the policy and at the times that a simulator has too.

No HTTP is in between: what a client sees is that, and some milliseconds (`eet_lab.serving.load` measures those).
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from math import inf, isnan
from typing import Any, NamedTuple

from eet_lab.bench.timing import SHARED, UNDISTURBED
from eet_lab.collector import frozen_heap
from eet_lab.engine.encode import EncoderEngine
from eet_lab.engine.engine import Engine
from eet_lab.engine.in_flight import Run
from eet_lab.engine.settings import Settings
from eet_lab.engine.tasks import MEAN
from eet_lab.errors import ScheduleError
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device, on_its_encoders_device
from eet_lab.parts.passes import Batching, Text
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.scheduling import Request
from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.policy import BasePolicy, Plan
from eet_lab.scheduling.queued import Queue, Queued
from eet_lab.scheduling.record import Record
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.simulator import check_fits
from eet_lab.scheduling.traffic import Traffic
from eet_lab.serving.reader import under_policy
from eet_lab.serving.warm_up import random_texts, rectangle, warm_up_decoder, warm_up_encoder
from eet_lab.technique import Recipe

LOOK_S = 0.1
"""How often what goes on is told, and the longest sleep between two looks at Stop."""


class Look(NamedTuple):
    """What goes on: requests that have come and have no slot yet, those that run, and those that are done, of `total`.

    `ttft_ms` and `tpot_ms` are percentiles as in `Latencies.percentiles`: `ttft_ms` is of those whose first token was
    told, `tpot_ms` of those that are done.
    """

    at_s: float
    waiting: int
    running: int
    done: int
    total: int
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]


OnLook = Callable[[Look], None]


def serve_traffic(
    model: Model,
    traffic: Traffic,
    policy: BasePolicy,
    table: CostTable,
    *,
    engine: EncoderEngine | None = None,
    on_look: OnLook | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Served:
    """Serve random tokens of the traffic's lengths as they come, until all are done: what `simulate_traffic` predicts.

    The model runs under the recipe that its cost `table` was measured with, with the policy's limits. The clock starts
    once the engine has room for all slots and is warm. A decoder needs a policy that joins. An encoder may be run by an
    `engine` under `served_recipe`, which `warm_up_encoder` has made ready, and which stays open; another one is a
    ScheduleError. Stop is heeded after each pass. Errors: ScheduleError, CostError as in `simulate_traffic`;
    RecipeError, OutOfMemory, Cancelled.
    """
    traffic = check_fits(traffic, policy, table)
    if table.kind == "decoder" and not policy.joins:
        raise ScheduleError(
            f"{policy.name} runs groups of a decoder, which is simulated alone. Choose continuous_batching to serve it."
        )
    if engine is not None:
        _check_engine(engine, model, table, policy)
    clock = _Clock(traffic, on_look, progress, cancel)
    if table.kind == "decoder":
        _serve_decoder(model, traffic, policy, table, clock)
    else:
        _serve_encoder(model, traffic, policy, table, clock, engine)
    clock.look(running=0)
    note = f" ({SHARED})" if model.device == "cpu" and clock.was_disturbed else ""
    return clock.record.served(traffic, str(policy), f"{model.name} on {table.source.device}{note}")


def served_recipe(model: Model, table: CostTable, policy: BasePolicy) -> Recipe:
    """The recipe that a table was measured with, under the limits of a policy."""
    recipe = Recipe.parse(table.source.recipe, model.device)
    if table.kind == "encoder":
        return under_policy(recipe, policy)
    limits: Any = {"rows": policy.schedule.max_rows, "chunk": policy.schedule.chunk, "budget": policy.schedule.budget}
    return Recipe(tuple(replace(t, **limits) if t.name == "continuous_batching" else t for t in recipe))


def _check_engine(engine: EncoderEngine, model: Model, table: CostTable, policy: BasePolicy) -> None:
    """ScheduleError for one whose passes are not those that the table tells of."""
    if table.kind == "decoder":
        raise ScheduleError(
            "A decoder is served by an engine of its own, and takes none that is open. Leave engine out."
        )
    recipe = served_recipe(model, table, policy)
    if engine.model is not model.encoder:
        raise ScheduleError(f"The engine has other weights than {model.name}. Make it of model.encoder.")
    if engine.parts != recipe.parts:
        raise ScheduleError(
            f"The engine has other parts than the recipe of the table under {policy.name}, "
            f"{str(recipe) or 'baseline'}. Make it of served_recipe(model, table, policy).parts."
        )


class _Clock:
    """Real time from the first arrival on: who has come, what was noted, and what is told of it."""

    def __init__(
        self, traffic: Traffic, on_look: OnLook | None, progress: Progress | None, cancel: Cancel | None
    ) -> None:
        self.queue, self.record = Queue(traffic), Record(len(traffic), None, None)
        self._traffic, self._on_look, self._progress, self.cancel = traffic, on_look, progress, cancel
        self._begin = self._looked = time.perf_counter()
        self._cpu_begin = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Everything is warm: requests come from now on. As in a server, no collection walks what is there before."""
        with frozen_heap():
            self._begin, self._cpu_begin = time.perf_counter(), time.thread_time()
            yield

    @property
    def was_disturbed(self) -> bool:
        """Whether other programs kept this thread waiting in its passes on a CPU."""
        passes = self.record.served(self._traffic).passes
        took_s = float((passes.end_ms - passes.begin_ms).sum()) / 1e3
        return time.thread_time() - self._cpu_begin < UNDISTURBED * took_s

    def now_ms(self) -> float:
        return (time.perf_counter() - self._begin) * 1e3

    def say(self, words: str) -> None:
        """What is done before requests come."""
        if self._progress is not None:
            self._progress(0, len(self._traffic), words)

    def admit(self, running: int, handed_over: int = 0) -> None:
        """All that have come by now wait; tell what goes on. Cancelled.

        `handed_over`: those that wait in the engine, which the queue has no more.
        """
        raise_if_cancelled(self.cancel, "Serving the traffic")
        self.queue.now_ms = self.now_ms()
        self.queue.admit()
        if time.perf_counter() - self._looked >= LOOK_S:
            self._looked = time.perf_counter()
            self.look(running, handed_over)

    def sleep(self, wake_ms: float = inf) -> None:
        """Wait for the next request, or until `wake_ms`, but no longer than between two looks."""
        left_s = (min(self.queue.next_ms, wake_ms) - self.now_ms()) / 1e3
        time.sleep(min(max(left_s, 0.0), LOOK_S))

    def look(self, running: int, handed_over: int = 0) -> None:
        """Tell what goes on."""
        done, total = self.record.done, len(self._traffic)
        if self._on_look is not None:
            waiting, times = len(self.queue.waiting) + handed_over, self.record.served(self._traffic).percentiles
            at_s = self.now_ms() / 1e3
            self._on_look(Look(at_s, waiting, running, done, total, times["ttft_ms"], times["tpot_ms"]))
        if self._progress is not None:
            self._progress(done, total, "requests served")


@on_its_device
def _serve_decoder(model: Model, traffic: Traffic, policy: BasePolicy, table: CostTable, clock: _Clock) -> None:
    """Requests join an engine between two passes."""
    draw, vocab = random.Random(0), model.config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(length)] for length in traffic.lengths.tolist()]
    slots = policy.schedule.max_rows or 1
    with closing(Engine(model.decoder, served_recipe(model, table, policy).parts)) as engine:
        clock.say("building")
        engine.prepare(cancel=clock.cancel)
        new = int(traffic.new_tokens.max())
        longest = int((traffic.lengths + traffic.new_tokens).max())
        engine.reserve(slots, longest - new, Settings(new))
        clock.say("warming up")
        warm_up_decoder(engine, clock.cancel)
        with clock.running():
            _Joining(engine, prompts, clock).serve(policy, table)


class _Joining:
    """Requests of an engine, by their numbers."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], clock: _Clock) -> None:
        self._engine, self._prompts, self._clock = engine, prompts, clock
        self._number_of: dict[Request, int] = {}

    def serve(self, policy: BasePolicy, table: CostTable) -> None:
        clock = self._clock
        queue = clock.queue
        while True:
            statuses = Counter(request.status for request in self._number_of)
            clock.admit(statuses["running"], statuses["waiting"])
            wake_ms = inf
            if queue.waiting:
                plan = policy.next(queue.waiting, queue.now_ms, table)
                wake_ms = inf if plan.wake_ms is None else plan.wake_ms
                for group in plan.groups:
                    queue.take(group)
                    self._add(group)
            if self._number_of:
                self._step()
            elif queue.waiting or queue.next_ms < inf:
                clock.sleep(wake_ms)
            else:
                return

    def _add(self, group: Sequence[Queued]) -> None:
        for number, _, new_tokens, _ in group:
            self._number_of[self._engine.add(self._prompts[number], Settings(new_tokens))] = number

    def _step(self) -> None:
        """A pass: what it read is seen by how far each request has come."""
        record, number_of = self._clock.record, self._number_of
        before = {request: request.read for request in number_of}
        begin_ms = self._clock.now_ms()
        told = self._engine.step()
        end_ms = self._clock.now_ms()
        rows = prompt_tokens = decoded = 0
        for request, start in before.items():
            count = request.read - start
            if count <= 0:
                continue
            rows += 1
            read = min(count, max(len(request.prompt) - start, 0))  # of its prompt
            prompt_tokens, decoded = prompt_tokens + read, decoded + count - read
            if isnan(record.start[number_of[request]]):
                record.start[number_of[request]] = begin_ms
        for request, _, _ in told:
            number = number_of[request]
            if isnan(record.first[number]):
                record.first[number] = end_ms
            record.last[number] = end_ms if request.done else record.last[number]
        for request in [request for request in number_of if request.done]:
            del number_of[request]
            record.done += 1
        if rows:
            record.add(begin_ms, end_ms, rows, prompt_tokens, decoded, 0)


@on_its_encoders_device
def _serve_encoder(
    model: Model,
    traffic: Traffic,
    policy: BasePolicy,
    table: CostTable,
    clock: _Clock,
    given: EncoderEngine | None,
) -> None:
    """A group is a pass; one is launched while another is computed."""
    queue, texts = clock.queue, [Text(row) for row in random_texts(model, traffic)]
    with ExitStack() as opened:
        engine = given
        if engine is None:
            clock.say("building")
            own = EncoderEngine(model.encoder, served_recipe(model, table, policy).parts)
            engine = opened.enter_context(closing(own))
            warm_up_encoder(model, engine, traffic, policy, table, clock.cancel)
        opened.enter_context(clock.running())
        while True:
            clock.admit(0)
            if not queue.waiting and queue.next_ms == inf:
                return
            plan = policy.next(queue.waiting, queue.now_ms, table) if queue.waiting else Plan[Queued]([])
            if plan.groups:
                reading = _ReadingPlans(texts, policy, table, clock)
                engine.read_each(reading.launched(plan), MEAN, reading.done, cancel=clock.cancel)
            else:
                clock.sleep(inf if plan.wake_ms is None else plan.wake_ms)


class _ReadingPlans:
    """The groups of a plan, and of those that follow without a break, noted as they come."""

    def __init__(self, texts: Sequence[Text], policy: BasePolicy, table: CostTable, clock: _Clock) -> None:
        self._texts, self._policy, self._table, self._clock = texts, policy, table, clock
        self._in_flight = deque[Sequence[Queued]]()
        self._end_ms = 0.0

    def launched(self, plan: Plan[Queued]) -> Iterator[tuple[list[Text], Batching] | None]:
        """What is read next. After a full plan the policy is asked again while the last groups are computed."""
        while True:
            for group in plan.groups:
                self._clock.queue.take(group)
                self._in_flight.append(group)
                self._admit()
                rows = [self._texts[each.number] for each in group]
                yield rows, Batching(rectangle([text.ids for text in rows]))
            if not plan.is_full:
                return
            while (following := self._full_plan()) is None:
                if not self._in_flight:
                    return
                yield None
            plan = following

    def _full_plan(self) -> Plan[Queued] | None:
        """What may be launched before the device has nothing to do; None while newcomers may still change it."""
        self._admit()
        queue = self._clock.queue
        plan = self._policy.next(queue.waiting, queue.now_ms, self._table) if queue.waiting else None
        return plan if plan is not None and plan.is_full and plan.groups else None

    def _admit(self) -> None:
        self._clock.admit(sum(map(len, self._in_flight)))

    def done(self, run: Run) -> None:
        """The oldest group is there. It began when it was launched, or when the one before was there."""
        group, record, end_ms = self._in_flight.popleft(), self._clock.record, self._clock.now_ms()
        begin_ms, self._end_ms = max(end_ms - run.total_ms, self._end_ms), end_ms
        for number, *_ in group:
            record.start[number], record.first[number], record.last[number] = begin_ms, end_ms, end_ms
        record.done += len(group)
        size = len(group) * max(each.length for each in group)
        record.add(
            begin_ms, end_ms, len(group), run.num_tokens, 0, 0 if self._policy.is_packed else size - run.num_tokens
        )
