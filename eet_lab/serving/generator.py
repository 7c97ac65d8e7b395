"""The thread that generates: requests join and leave an `Engine` between two of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import ExitStack, closing
from functools import partial
from itertools import takewhile
from math import inf

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import PromptError, RecipeError
from eet_lab.models import Model
from eet_lab.scheduling import Request
from eet_lab.serving.errors import ApiError, failed, of_engine, took_too_long
from eet_lab.serving.jobs import Job, Load, News, Phases
from eet_lab.serving.warm_up import warm_up_decoder
from eet_lab.serving.worker import Worker
from eet_lab.technique import Recipe

SERVED_TEMPERATURES = 1.0, 0.0
"""OpenAI's default, and greedy: what a GPU is warmed up for."""


class Generator(Worker):
    """Serves jobs until their last token, their deadline, or their end by `leave`, within one step.

    An error of the engine ends all that it served, and a new engine over the same weights serves whoever comes next.
    """

    engine: Engine | None

    def __init__(self, model: Model, recipe: Recipe, columns: int) -> None:
        super().__init__()
        if recipe.parts.schedule.max_rows is None:
            raise RecipeError(
                f"{recipe or 'The baseline'} serves no requests that join: add continuous_batching, such as "
                "'all,continuous_batching:rows=64'."
            )
        self._model, self._recipe, self._columns = model, recipe, columns
        self.receive: Callable[[list[News]], None] = lambda news: None
        """Told, where the worker tells what comes, of all news of a step at once."""
        self._jobs: dict[Request, Job] = {}
        self._requests: dict[Hashable, Request] = {}
        self._queued: dict[Request, float] = {}
        """When those came that have had no slot yet, oldest first."""
        self._phases: dict[Request, tuple[float, float]] = {}
        """When those that have told no token yet came, and when they got a slot."""
        self._look_at = inf
        """When jobs are looked at for the next time: no deadline is earlier."""

    def join(self, job: Job) -> None:
        """Queue it; from any thread."""
        self.command(partial(self._join, job, time.perf_counter()))

    def leave(self, answer: Hashable) -> None:
        """End it before the next step, if it is there; from any thread."""
        self.command(partial(self._leave, answer))

    def reset_prefix_cache(self) -> None:
        """Let those who join from now on find nothing of those who have left; from any thread."""
        self.command(self._reset_prefix_cache)

    async def refresh(self) -> None:
        """Nothing: `load` looks at the engine itself."""

    def load(self) -> Load:
        """The present load; from any thread, for whom the numbers may be a step old."""
        engine, requests = self.engine, list(self._jobs)
        running = [request for request in requests if request.status == "running"]
        if engine is None:
            return Load()
        cache, waiting = engine.cache, len(requests) - len(running)
        used = sum(request.read for request in running) * cache.column_bytes - cache.shared_bytes
        usage = min(max(used / cache.num_bytes, 0.0), 1.0) if cache.num_bytes else 0.0
        found = cache.prefix_cache_queries, cache.prefix_cache_hits
        return Load(len(running), waiting, usage, engine.num_preempted, *found)

    @property
    def _has_work(self) -> bool:
        return bool(self._jobs)

    def _build(self) -> None:
        rows = self._recipe.parts.schedule.max_rows
        assert rows is not None
        with ExitStack() as on_error:
            engine = on_error.enter_context(closing(Engine(self._model.decoder, self._recipe.parts)))
            engine.prepare(self.progress, self.is_closing)
            # Prompts of one token: it shall take memory, and not compute what nobody asked for.
            engine.reserve(rows, 1, Settings(max_new_tokens=self._columns - 1))
            if engine.model.device.type == "cuda":  # a CPU has nothing to warm up but its decode steps
                warm_up_decoder(engine, self.is_closing, SERVED_TEMPERATURES)
            on_error.pop_all()
        self.engine = engine

    def _join(self, job: Job, came_at: float) -> None:
        if self.dead is not None:
            self._end(job.answer, self.dead)
            return
        assert self.engine is not None
        try:
            request = self.engine.add(job.prompt, job.settings, number=job.number)
        except PromptError as error:
            self._end(job.answer, of_engine(error, "prompt"))
        except Exception as error:  # noqa: BLE001  the engine has freed all of itself, and the others' work with it
            self._fail(error, job.answer)
        else:
            self._jobs[request], self._requests[job.answer] = job, request
            self._queued[request] = came_at
            self._look_at = min(self._look_at, job.deadline)

    def _leave(self, answer: Hashable) -> None:
        request = self._requests.pop(answer, None)
        if request is not None:
            del self._jobs[request]
            self._queued.pop(request, None)
            self._phases.pop(request, None)
            assert self.engine is not None
            self.engine.cancel(request)

    def _reset_prefix_cache(self) -> None:
        if self.engine is not None:
            self.engine.reset_prefix_cache()

    def _turn(self) -> None:
        assert self.engine is not None
        self._end_late()
        new, begun_at = dict[Request, list[int]](), time.perf_counter()
        for request, token, _ in self.engine.step():
            if request in new:
                new[request].append(token)
            else:
                new[request] = [token]
        self._note_slots(begun_at)
        now, news, jobs = time.perf_counter(), list[News](), self._jobs
        for request, tokens in new.items():
            answer, reason = jobs[request].answer, request.finish_reason
            logprobs = request.logprobs and request.logprobs[-len(tokens) :]
            times = self._phases.pop(request, None)
            phases = times and Phases(times[1] - times[0], now - times[1])
            end = "abort" if reason == "cancelled" else reason
            news.append(News(answer, tokens, end, None, now, logprobs, phases))
            if reason is not None:
                del jobs[request], self._requests[answer]
        if news:
            self.tell(partial(self.receive, news))

    def _note_slots(self, begun_at: float) -> None:
        """Those that got a slot in a step got it at its beginning, the oldest first."""
        served = list(takewhile(lambda request: request.status != "waiting", self._queued))
        for request in served:
            self._phases[request] = self._queued.pop(request), begun_at

    def _end_late(self) -> None:
        """Deadlines count from the gate, so a job may join behind another and be late before it.

        The one that `_look_at` was set for may have left: then a look finds nobody, and tells when the next one is due.
        """
        now = time.perf_counter()
        if now < self._look_at:
            return
        for job in [job for job in self._jobs.values() if job.deadline <= now]:
            self._leave(job.answer)
            self._end(job.answer, took_too_long())
        self._look_at = min((job.deadline for job in self._jobs.values()), default=inf)

    def _fail(self, error: Exception, *joining: Hashable) -> None:
        """`joining`: the answer of a request that the engine failed to take."""
        number, answers = self.failure(error), [*self._requests, *joining]
        self._jobs, self._requests, self._queued, self._phases = {}, {}, {}, {}
        for answer in answers:
            self._end(answer, failed(error, number))
        self.rebuild()
        if self.dead is not None:  # a front in another process learns it with news alone
            self.tell(partial(self.receive, []))

    def _end(self, answer: Hashable, error: ApiError) -> None:
        self.tell(partial(self.receive, [News(answer, (), None, error, time.perf_counter())]))
