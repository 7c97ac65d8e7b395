"""Engine: prefill, then decode. It knows Parts, and no technique."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, current_thread

import torch

from eet_lab.engine.base import BaseEngine, check_model, check_parts
from eet_lab.engine.clock import RequestClock
from eet_lab.engine.exclusive import exclusive
from eet_lab.engine.forecast import Forecast, Forecaster
from eet_lab.engine.generation import Generation, StepEvent, Transcript
from eet_lab.engine.inbox import Inbox
from eet_lab.engine.joined import joined
from eet_lab.engine.rehearse import Rehearser, new_cache
from eet_lab.engine.session import MOST_SESSIONS, Runner, Session, libraries, session_key
from eet_lab.engine.settings import (
    Settings,
    checked_batch,
    checked_bytes,
    checked_forced,
    checked_prompts,
    checked_settings,
)
from eet_lab.engine.slots import COLUMNS, NewToken, RequestSettings, Slots
from eet_lab.engine.stream import open_stream
from eet_lab.engine.tasks import Task, next_tokens
from eet_lab.errors import Cancelled, EngineBusy, PromptError, RecipeError, ScheduleError
from eet_lab.memory import Lifetime
from eet_lab.models.decoder import Decoder
from eet_lab.ops.oom import memory_for
from eet_lab.ops.types import State, Step
from eet_lab.parts import Parts
from eet_lab.parts.prompts import force
from eet_lab.progress import Cancel
from eet_lab.scheduling import Request, Schedule
from eet_lab.scheduling.whole import MOST, check_whole


class Engine(BaseEngine[Decoder]):
    """A decoder run by parts. Building one is cheap: weights are shared, nothing is compiled or allocated.

    `task` makes tokens of the hidden states of each pass. An engine runs one batch at a time, on the thread that calls
    it: while it does, `generate`, `reserve` and `close` raise EngineBusy on every other thread, and in `on_step`.
    Errors: RecipeError for a model that one of the ops does not take.
    """

    def __init__(self, model: Decoder, parts: Parts | None = None, task: Task = next_tokens) -> None:
        check_model("Engine", model, Decoder, "demo")
        check_parts("Engine", parts, "all")
        for change in parts.weights if parts else ():
            model = change(model)
        super().__init__(model, parts)
        self.task = task
        self.cache = new_cache(self.model, self.parts)
        self.rehearser = Rehearser(self.model, self.parts, task)
        self.inbox, self.canvas = Inbox(self.model.device), Inbox(self.model.device)
        self._reserved = 0, 0
        self._libraries: tuple = ()
        self._sessions: dict[tuple, Session] = {}
        self._session: Runner | None = None
        self._slots: Slots | None = None

    @exclusive
    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Settings | None = None,
        *,
        on_step: Callable[[StepEvent], None] | None = None,
        cancel: Cancel | None = None,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> Generation:
        """Continue every prompt (token ids, ragged) and return the tokens with their timing.

        `on_step` is called on this thread for each finished step. `cancel` ends the run at the next step, or between
        two ops of the prefill; what was generated until then is returned. `forced` [B, max_new_tokens] replaces what
        would be chosen (teacher forcing), and is checked as prompts are. Errors: PromptError before any work;
        OutOfMemory, after which the memory is free again.
        """
        clock, settings = RequestClock(), checked_settings(settings)
        self._check_idle("generate")
        rows = checked_prompts(prompts, settings.max_new_tokens, self.model.config)
        if forced is not None:
            forced = checked_forced(forced, len(rows), settings.max_new_tokens, self.model.config)
        clock.once(lambda: self._prepared(cancel))
        with self._closed_on_error(lambda: rows, settings):
            return self._generate(rows, settings, on_step or (lambda event: None), cancel, forced, clock)

    @exclusive
    @torch.inference_mode()
    def add(self, prompt: Sequence[int], settings: Settings | None = None, *, number: int = 0) -> Request:
        """Queue a prompt (token ids), to be continued by `step` beside those that are there already.

        It joins as soon as there is a slot, and is `done` when its last token is in `generated`. It gets the tokens
        that it would get alone: as row `number` of a batch, if it is drawn with a seed that others have too. How tokens
        are drawn, but for the seed, is the same for all that are in flight. There are as many slots, of as many
        columns, as the last `reserve` made room for; else those of `continuous_batching`, of 1,024 columns. All calls
        come from one thread.
        Errors: RecipeError without `continuous_batching`; PromptError, after which nothing has changed; EngineBusy on
        another thread than the first request's.
        """
        settings = checked_settings(settings)
        [row] = checked_prompts([prompt], settings.max_new_tokens, self.model.config)
        check_whole(PromptError, "number", number, 0, MOST)
        if (schedule := self.parts.schedule) is None:
            raise RecipeError("Requests join one by one with continuous_batching: add it to the recipe, or `generate`.")
        if self._slots is not None and self._slots.is_deserted:
            self._slots.drain()
        if self._slots is None or self._slots.idle:
            self._prepared()
            rows, columns = self._reserved if self._reserved[0] else (schedule.max_rows, COLUMNS)
            schedule, columns = schedule.of_at_most(rows), min(columns, self.model.config.context)
            with self._closed_on_error(lambda: self._filling(schedule.max_rows, columns, settings), settings):
                self._open_slots(schedule, columns, settings, RequestClock())
        slots = self._checked_slots("add")
        slots.check_alike(settings)
        request = Request(tuple(row), settings.max_new_tokens)
        slots.add(request, RequestSettings.of(settings, number))
        return request

    @exclusive
    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """One pass for all requests in flight; returns the tokens that have come to the host meanwhile.

        A GPU is up to 8 passes ahead of the host. Without anything to read, it waits for what is on its way; without
        requests it returns []. Errors: OutOfMemory, after which no request is in flight, and each has what it got.
        """
        if self._slots is None:
            return []
        slots = self._checked_slots("step")
        rows, columns, settings = slots.schedule.max_rows, slots.capacity, slots.settings
        with self._closed_on_error(lambda: self._filling(rows, columns, settings), settings):
            return slots.step()

    @exclusive
    def cancel(self, request: Request) -> None:
        """Let a request leave now; what it has got stays in `request.generated`.

        Errors: ScheduleError for one that is unknown here, or has left.
        """
        if self._slots is None:
            raise ScheduleError(f"{request!r:.80} is unknown to this engine: no request is in flight. Add it first.")
        self._checked_slots("cancel").cancel(request)

    def _filling(self, num_rows: int, columns: int, settings: Settings) -> list[list[int]]:
        """Prompts that fill so many slots of so many columns, together with their new tokens."""
        return [[self.model.config.bos_id] * max(columns - settings.max_new_tokens, 1)] * num_rows

    def _checked_slots(self, name: str) -> Slots:
        """What is in flight; EngineBusy for a call from another thread than the one that opened it."""
        assert self._slots is not None
        if self._slots.idle:
            self._slots.thread = current_thread()
        if self._slots.thread is not current_thread():
            raise EngineBusy(
                f"{name} was called on the thread {current_thread().name!r}, but the requests in flight belong to "
                f"{self._slots.thread.name!r}. Call it there, such as by a queue that its loop over step() reads."
            )
        return self._slots

    def _check_idle(self, name: str) -> None:
        """EngineBusy while requests are in flight."""
        if self._slots is not None and self._slots.is_deserted:
            self._slots.drain()
        if self._slots is not None and not self._slots.idle:
            raise EngineBusy(
                f"{name} cannot begin: requests are in flight that were added one by one. Call step() until they are "
                "done, or cancel them, or build another Engine of the same model: the weights are shared."
            )

    @exclusive
    @torch.inference_mode()
    def reserve(self, num_rows: int, prompt_tokens: int, settings: Settings | None = None) -> None:
        """Hold what a batch of so many rows and such prompts needs: no smaller one then allocates an arena or a cache.

        Its passes are placed, the KV cache gets its size, and two steps are run, so that libraries take what they keep.
        `settings` tell max_new_tokens and how tokens are drawn, not when to stop; a batch that asks for other things is
        placed on its own. CUDA graphs take memory of their own: each number of rows, and each bucket of columns, is
        captured when a batch first reaches it. Errors: those of `generate`. `close` gives it all back.
        """
        settings = replace(checked_settings(settings), stop=())
        self._check_idle("reserve")
        self._free()
        rows = checked_batch(num_rows, prompt_tokens, settings.max_new_tokens, self.model)
        self._prepared()
        with self._closed_on_error(lambda: rows, settings):
            self._reserved = num_rows, len(rows[0]) + settings.max_new_tokens
            self._allocating = "the arena of activations"
            if self.parts.schedule is None:
                self.memory.reserve(self.rehearser.request(rows, settings).passes, like=self.model.words)
            enough = Event()

            def stop_after_two(event: StepEvent) -> None:
                if event.index:
                    enough.set()

            self._generate(rows, settings, stop_after_two, enough, None, RequestClock())

    def _prepared(self, cancel: Cancel | None = None) -> bool:
        """Whether kernels were loaded since this engine last asked."""
        before = self._libraries
        self.prepare(cancel=cancel)
        self._libraries = libraries(self.parts.ops.kernels)
        return self._libraries != before

    @contextmanager
    def _closed_on_error(self, rows: Callable[[], list[list[int]]], settings: Settings) -> Iterator[None]:
        """A run that broke off in the middle may have left anything behind. What does not fit is told what would."""
        try:
            with memory_for(
                lambda: self._allocating, free=self._free, remedy=lambda: self.forecast(rows(), settings).remedy
            ):
                yield
        except PromptError:  # it comes before any work
            raise
        except BaseException:
            self._free()
            raise

    def _generate(
        self,
        prompts: list[list[int]],
        settings: Settings,
        on_step: Callable[[StepEvent], None],
        cancel: Cancel | None,
        forced: Sequence[Sequence[int]] | None,
        clock: RequestClock,
    ) -> Generation:
        if (schedule := self.parts.schedule) is not None:
            longest = max(map(len, prompts)) + settings.max_new_tokens
            columns = max(longest, self._reserved[1])
            slots = self._open_slots(schedule.of_at_most(len(prompts)), columns, settings, clock)
            return joined(slots, prompts, settings, on_step, cancel, forced)
        state, first = self.parts.prompts(prompts, settings.max_new_tokens)
        ends, width, capacity = state.end.tolist(), first.extent, state.tokens.shape[1]
        if forced is not None:
            force(state, forced, settings.max_new_tokens)
        stream = open_stream(clock, self.model.device, len(prompts))
        session = self._opened(state, first, settings, clock)
        stop = settings.stop if forced is None else ()
        transcript = Transcript(ends, width, settings.max_new_tokens, capacity - width, stop)

        def read(steps: list) -> None:
            for step in steps:
                if not transcript.finished:
                    on_step(transcript.read(step))

        try:
            self._cancel = cancel  # looked at between two ops of the prefill, and once a step from there on
            session.prefill()
            self._cancel = None
            read(stream.push(session.state))
            for extent in range(width + 1, capacity):
                if transcript.finished or (cancel is not None and cancel.is_set()):
                    break
                session.decode(extent)
                read(stream.push(session.state))
        except Cancelled:
            self._drop_sessions()
        finally:
            self._cancel = None
        read(stream.drain())
        done = transcript.result(clock.setup_ms)
        self.cache.keep([len(row) + max(len(new) - 1, 0) for row, new in zip(prompts, done.tokens, strict=True)])
        return done

    def _opened(self, state: State, first: Step, settings: Settings, clock: RequestClock) -> Session:
        """A session for this batch, which is on the host: one that has served such a batch, else a new one.

        There is one at a time, but for those that a reservation covers: they share what is reserved.
        """
        num_rows, capacity = state.tokens.shape
        sampling = settings.sampling(num_rows)
        is_covered = num_rows <= self._reserved[0] and capacity <= self._reserved[1]
        if is_covered:
            capacity = self._reserved[1]
        key, generation = session_key(self, num_rows, capacity, sampling), self.memory.generation
        if key not in self._sessions and (not is_covered or len(self._sessions) == MOST_SESSIONS):
            self._drop_sessions()
        self._allocating = "the arena of activations"
        passes = self.rehearser.passes(state, first, sampling, capacity)
        clock.once(lambda: self.memory.plan(passes, like=self.model.words))
        if self.memory.generation != generation:
            self._drop_sessions()
        self._allocating = f"the KV cache [{num_rows} rows x {capacity} columns]"
        if key in self._sessions:
            self._session = self._sessions[key]
            self._session.restart(state, first, sampling)
        else:
            self._session = self._sessions[key] = Session(self, key, state, first, sampling)
        return self._session

    def _open_slots(self, schedule: Schedule, columns: int, settings: Settings, clock: RequestClock) -> Slots:
        """Slots with nobody in them: those that are there, if they suit, else new ones."""
        key = schedule, settings.sampling(1)[:3], libraries(self.parts.ops.kernels)
        slots = self._slots
        if slots is None or slots.key != key or slots.capacity < columns:
            self._drop_sessions()
            self._allocating = f"the KV cache [{schedule.max_rows} rows x {columns} columns]"
            self._session = self._slots = slots = Slots(self, key, schedule, columns, settings)
        slots.begin(clock)
        return slots

    def lifetimes(
        self, prompts: Sequence[Sequence[int]], settings: Settings | None = None
    ) -> dict[str, tuple[Lifetime, ...]]:
        """What the passes of a request ask for: {"prefill": ..., "decode": ...}, the latter its longest step.

        Rehearsed on meta tensors: no GPU is needed, nothing is computed, and a model without data does as well.
        """
        settings = checked_settings(settings)
        rows = checked_prompts(prompts, settings.max_new_tokens, self.model.config)
        passes = self.rehearser.request(rows, settings).passes
        return {name: self.memory.traced(rehearsal) for name, rehearsal in passes.items()}

    def forecast(
        self, prompts: Sequence[Sequence[int]], settings: Settings | None = None, free_bytes: int | None = None
    ) -> Forecast:
        """What a run will need and whether it fits, rehearsed without data; nothing is allocated on the device.

        `free_bytes` is what there is for the weights and the run, on whatever device; None: what the model's own has,
        and this machine for a model of shapes alone (on "meta").
        Errors: PromptError for what could not run in any memory, or is no number of bytes.
        """
        settings = checked_settings(settings)
        checked_bytes("free_bytes", free_bytes)
        rows = checked_prompts(prompts, settings.max_new_tokens, self.model.config)
        forecaster = Forecaster(self.rehearser, self.parts, settings)
        return forecaster.forecast([len(row) for row in rows], self.model.device, free_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes held for keys and values."""
        return self.cache.num_bytes

    @property
    def kv_growth_bytes(self) -> int:
        """Bytes of the copy that a growing KV cache makes beside itself in its last step."""
        return self.cache.growth_bytes

    @property
    def captures(self) -> int:
        """Decode steps captured so far; 0 where the launch part captures nothing."""
        session = self._session
        return 0 if session is None else getattr(session.launch, "captures", 0)

    def _free(self) -> None:
        self._drop_sessions()
        for held in (self.cache, self.inbox, self.canvas):
            held.close()
        super()._free()
        self._reserved = 0, 0

    def _drop_sessions(self) -> None:
        for session in self._sessions.values():
            session.close()
        if self._slots is not None:
            self._slots.close()
        self._session, self._sessions, self._slots = None, {}, None
