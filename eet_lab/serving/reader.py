"""The thread that reads texts with an encoder: what waits is read together as a batching policy says."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.engine.encode import EncoderEngine
from eet_lab.engine.in_flight import Run
from eet_lab.engine.tasks import MEAN, TextTask
from eet_lab.errors import EETError, SetupError
from eet_lab.models import Model
from eet_lab.parts.passes import Batching, Readable
from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.policies import NaivePadding, TokenBudget, parse_policy, policy_kind
from eet_lab.scheduling.policy import BasePolicy, Plan
from eet_lab.scheduling.traffic import AT_ONCE, Gamma, LogNormal, make_traffic
from eet_lab.serving.errors import ApiError, failed, of_engine
from eet_lab.serving.warm_up import rectangle, warm_up_encoder
from eet_lab.serving.worker import Worker
from eet_lab.technique import Recipe

BATCHING = Batching()
LOOK_S = 0.002
"""How long the thread sleeps at most where a policy waits for company: others may come, or leave."""


WARM_TEXTS = 256
"""Texts, short ones mostly, of which passes are made to warm an engine up."""


class Reading(NamedTuple):
    """Texts that one request brings, and who waits for them."""

    texts: Sequence[Readable]
    task: TextTask
    result: asyncio.Future[Tensor]

    @property
    def num_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)


class WaitingText(NamedTuple):
    """A text of a request, as a policy sees it."""

    reading: Reading
    number: int
    length: int
    arrival_ms: float


class Reader(Worker):
    """Reads the groups of a batching policy, each in one pass.

    Without a policy it reads whole requests, the oldest and what follows for the same task, up to a pass of tokens.
    """

    engine: EncoderEngine | None

    def __init__(
        self, model: Model, recipe: Recipe, policy: str | None = None, tasks: Sequence[TextTask] = (MEAN,)
    ) -> None:
        """`tasks` are those that requests ask for."""
        super().__init__()
        self._tasks = tasks
        self._model, self._recipe, self._words = model, recipe, policy
        self._policy: BasePolicy | None = None
        self._costs: CostTable | None = None
        self._waiting = list[WaitingText]()  # the oldest first
        self._planned = deque[Sequence[WaitingText]]()
        self._is_full = False  # the last plan: more of its kind may be launched while it is computed
        self._rows = dict[asyncio.Future, dict[int, Tensor]]()  # of requests that are read in part
        self._in_flight = deque[Sequence[WaitingText]]()

    def join(self, reading: Reading) -> None:
        """Queue it; from any thread."""
        self.command(partial(self._queue, reading, time.perf_counter() * 1e3))

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._planned or self._in_flight)

    def _build(self) -> None:
        recipe = self._recipe
        if self._words is not None:
            if policy_kind(self._words).reads_costs and self._costs is None:
                from eet_lab.serving.profile import (
                    profile,  # brings all benchmarks, without which a server starts sooner
                )

                self._costs = profile(self._model, recipe, progress=self.progress, cancel=self.is_closing)
            self._policy = policy = _fitting(self._words, self._costs)
            recipe = under_policy(recipe, policy)
        with ExitStack() as on_error:
            engine = on_error.enter_context(closing(EncoderEngine(self._model.encoder, recipe.parts)))
            engine.prepare(self.progress, self.is_closing)
            # Clients wait for an engine that is built anew, and a CPU has nothing to warm up.
            if not self.ready.done() and (engine.parts.is_captured or self._model.device != "cpu"):
                self._warm_up(engine, "packed_prefill" in recipe.names)
            on_error.pop_all()
        self.engine = engine

    def _warm_up(self, engine: EncoderEngine, is_packed: bool) -> None:
        most = self._model.encoder.config.context if self._costs is None else self._costs.most_length
        policy = self._policy or _unplanned(is_packed, most)
        traffic = make_traffic(WARM_TEXTS, Gamma(AT_ONCE), LogNormal(max(most / 8, 1), 1.0, most))
        costs: Any = self._costs  # None where the policy reads none
        warm_up_encoder(
            self._model, engine, traffic, policy, costs, self.is_closing, tasks=self._tasks, progress=self.progress
        )

    def _queue(self, reading: Reading, now_ms: float) -> None:
        self._waiting += [WaitingText(reading, at, len(text.ids), now_ms) for at, text in enumerate(reading.texts)]

    def _turn(self) -> None:
        """All groups of a plan in one read, and what follows, so that one is launched while another is computed."""
        if not (group := self._taken()):
            return
        if self.dead is not None:
            self._end(group, self.dead)
            return
        assert self.engine is not None
        self._in_flight.append(group)
        try:
            self.engine.read_each(self._planned_reads(), group[0].reading.task, self._read)
        except EETError as error:
            self._end(self._lost(), of_engine(error, "input"))

    def _planned_reads(self) -> Iterator[tuple[list[Readable], Batching] | None]:
        """The group that was taken, the others of its plan, and what is full before all of them are there."""
        group = self._in_flight[-1]
        task = group[0].reading.task
        while True:
            texts = [each.reading.texts[each.number] for each in group]
            yield texts, self._batching(texts)
            while not self.is_closing.is_set() and not (group := self._next_planned() or self._ahead(task)):
                if not (self._is_full and self._in_flight):
                    return
                yield None
            if self.is_closing.is_set():
                return
            self._in_flight.append(group)

    def _ahead(self, task: TextTask) -> Sequence[WaitingText]:
        """A group for this task that nobody who comes could change; nothing while there is none."""
        if not (self._is_full and self._in_flight):  # with nothing in flight, it would wait for a command in here
            return ()
        if not self._do_commands():
            self._commands.put(None)  # the thread ends after this turn
        self._waiting = self._here(self._waiting)
        if not self._waiting or self._waiting[0].reading.task is not task:
            return ()
        plan = self._asked(time.perf_counter() * 1e3)
        if not plan.is_full:
            return ()
        self._plan(plan)
        return self._next_planned()

    def _read(self, run: Run) -> None:
        """The oldest group that was launched is there."""
        self._keep(self._in_flight.popleft(), run.values)  # type: ignore[arg-type]  # served tasks make a row each

    def _lost(self) -> list[WaitingText]:
        """The texts that were launched, and do not come any more."""
        lost = list(chain.from_iterable(self._in_flight))
        self._in_flight.clear()
        return lost

    def _batching(self, texts: Sequence[Readable]) -> Batching:
        """Such that a policy's group is one pass."""
        if self._policy is None:
            return BATCHING
        ids = [text.ids for text in texts]
        return Batching(sum(map(len, ids)) if self._policy.is_packed else rectangle(ids))

    def _taken(self) -> Sequence[WaitingText]:
        """What is read next; whoever has left is left out. Nothing where a policy waits."""
        while True:
            if group := self._next_planned():
                return group
            self._waiting = self._here(self._waiting)
            if not self._waiting:
                return ()
            now_ms = time.perf_counter() * 1e3
            plan = self._asked(now_ms)
            if not plan.groups:
                left_s = LOOK_S if plan.wake_ms is None else (plan.wake_ms - now_ms) / 1e3
                time.sleep(min(max(left_s, 0.0), LOOK_S))
                return ()
            self._plan(plan)

    def _asked(self, now_ms: float) -> Plan[WaitingText]:
        """What is due of those that wait."""
        if self._policy is None:
            whole = _whole(self._waiting)
            return Plan([whole], is_full=len(whole) < len(self._waiting))
        task = self._waiting[0].reading.task
        alike = [each for each in self._waiting if each.reading.task is task]
        return self._policy.next(alike, now_ms, self._costs)  # type: ignore[arg-type]  # None where it reads none

    def _next_planned(self) -> Sequence[WaitingText]:
        while self._planned:
            if group := self._here(self._planned.popleft()):
                return group
        return ()

    def _plan(self, plan: Plan[WaitingText]) -> None:
        self._planned.extend(plan.groups)
        self._is_full = plan.is_full
        taken = {id(each) for group in plan.groups for each in group}
        self._waiting = [each for each in self._waiting if id(each) not in taken]

    def _here(self, some: Iterable[WaitingText]) -> list[WaitingText]:
        """Those whose client still waits."""
        here = []
        for each in some:
            if each.reading.result.done():
                self._rows.pop(each.reading.result, None)
            else:
                here.append(each)
        return here

    def _keep(self, group: Sequence[WaitingText], values: Sequence[Tensor]) -> None:
        """Rows of some texts; requests whose last ones they are get theirs."""
        done = list[tuple[Reading, Tensor]]()
        for (reading, number, *_), row in zip(group, values, strict=True):
            if reading.result.done():  # its client has left while this was computed, and nothing else of it comes
                continue
            rows = self._rows.setdefault(reading.result, {})
            rows[number] = row
            if len(rows) == len(reading.texts):
                done.append((reading, torch.stack([rows[at] for at in range(len(rows))])))
                del self._rows[reading.result]
        if done:
            self.tell(partial(_put_all, done))

    def _fail(self, error: Exception) -> None:
        self._end(self._lost(), failed(error, self.failure(error)))
        self.rebuild()

    def _end(self, group: Sequence[WaitingText], error: ApiError) -> None:
        """Requests of these texts get the error; what else they have is not read."""
        results = {each.reading.result: None for each in group}
        for result in results:
            self._rows.pop(result, None)
        self._waiting = [each for each in self._waiting if each.reading.result not in results]
        kept = ([each for each in group if each.reading.result not in results] for group in self._planned)
        self._planned = deque(group for group in kept if group)
        self.tell(partial(_end_all, list(results), error))


def _fitting(words: str, costs: CostTable | None) -> BasePolicy:
    """The policy of these words; what its knobs leave open, the table's reach decides. SetupError beyond that."""
    if costs is None:
        return parse_policy(words)
    policy = parse_policy(words, {"max_rows": costs.most_rows})
    if (rows := policy.knobs["max_rows"]) > costs.most_rows:
        raise SetupError(
            f"The policy's max_rows is {rows:,}, but the cost table was measured up to {costs.most_rows:,} texts. Ask "
            "for at most as many."
        )
    return policy


def _unplanned(is_packed: bool, longest: int) -> BasePolicy:
    """Makes passes such as come where no policy is named: up to a pass of tokens, pads among them."""
    most = BATCHING.batch_tokens
    return (
        TokenBudget(budget=most, max_rows=WARM_TEXTS) if is_packed else NaivePadding(max_rows=max(most // longest, 1))
    )


def _whole(waiting: Sequence[WaitingText]) -> list[WaitingText]:
    """Whole requests for the task of the oldest, as many as come to a pass of tokens, or one that has more."""
    taken, tokens = list[WaitingText](), 0
    for each in waiting:
        reading = each.reading
        if each.number == 0:
            if taken and (
                reading.task is not taken[0].reading.task or tokens + reading.num_tokens > BATCHING.batch_tokens
            ):
                break
            tokens += reading.num_tokens
        taken.append(each)
    return taken


def _put_all(parts: Sequence[tuple[Reading, Tensor]]) -> None:
    for reading, values in parts:
        if not reading.result.done():
            reading.result.set_result(values)


def _end_all(results: Sequence[asyncio.Future[Tensor]], error: ApiError) -> None:
    for result in results:
        if not result.done():
            result.set_exception(error)


def under_policy(recipe: Recipe, policy: BasePolicy) -> Recipe:
    """The recipe of an encoder that reads groups of this policy: a padded one stays a rectangle."""
    return recipe if policy.is_packed else Recipe(tuple(t for t in recipe if t.name != "packed_prefill"))
