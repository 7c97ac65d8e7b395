"""Engine: prefill, then decode. It knows Parts, and no technique."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Event

import torch
from torch import Tensor

from eet_lab.engine.clock import RequestClock
from eet_lab.engine.forecast import Forecast, Forecaster
from eet_lab.engine.generation import Generation, StepEvent, Transcript
from eet_lab.engine.inbox import Inbox
from eet_lab.engine.prompts import force
from eet_lab.engine.rehearse import Rehearser, new_cache
from eet_lab.engine.session import MOST_SESSIONS, Session, libraries, session_key
from eet_lab.engine.settings import Settings, checked_batch, checked_bytes, checked_prompts
from eet_lab.engine.stream import open_stream
from eet_lab.errors import Cancelled, ModelError
from eet_lab.memory import Lifetime, Plan
from eet_lab.models.decoder import Decoder
from eet_lab.ops import native
from eet_lab.ops.oom import memory_for
from eet_lab.ops.types import State, Step
from eet_lab.parts import Parts
from eet_lab.progress import Cancel, Progress


class Engine:
    """A model run by parts. Building one is cheap: weights are shared, nothing is compiled or allocated.

    One engine runs one batch at a time, on the thread that calls it.
    """

    def __init__(self, model: Decoder, parts: Parts | None = None) -> None:
        self.parts = parts or Parts()
        for change in self.parts.weights:
            model = change(model)
        self.model = model
        self.memory = self.parts.memory()
        self.cache = new_cache(model, self.parts)
        self.rehearser = Rehearser(model, self.parts)
        self.inbox, self.canvas = Inbox(model.device), Inbox(model.device)
        self.ops = self.parts.ops.bind_each(lambda op: partial(self._empty, op=op))
        self.mask = partial(self.parts.mask, empty=partial(self._empty, op="mask"))
        self._reserved = 0, 0
        self._libraries: tuple = ()
        self._sessions: dict[tuple, Session] = {}
        self._session: Session | None = None
        self._cancel: Cancel | None = None
        self._asking = ""

    def prepare(self, progress: Progress | None = None, cancel: Cancel | None = None) -> None:
        """Build the CUDA kernels that the parts need, if any; seconds at first, nothing later."""
        if self.model.device.type == "meta":
            raise ModelError("The model has shapes and no data. To run it, load it on 'cpu' or 'cuda', not on 'meta'.")
        if self.parts.ops.kernels:
            native.prepare(self.parts.ops.kernels, progress=progress, cancel=cancel)

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
        would be chosen (teacher forcing). Errors: PromptError before any work; OutOfMemory, after which the memory is
        free again.
        """
        clock, settings = RequestClock(), settings or Settings()
        rows = checked_prompts(prompts, settings.max_new_tokens, self.model.config)
        clock.once(lambda: self._prepared(cancel))
        with self._closed_on_error(rows, settings):
            return self._generate(rows, settings, on_step or (lambda event: None), cancel, forced, clock)

    @torch.inference_mode()
    def reserve(self, num_rows: int, prompt_tokens: int, settings: Settings | None = None) -> None:
        """Hold what a batch of so many rows and such prompts needs: no smaller one then allocates an arena or a cache.

        Its passes are placed, the KV cache gets its size, and two steps are run, so that libraries take what they keep.
        `settings` tell max_new_tokens and how tokens are drawn, not when to stop; a batch that asks for other things is
        placed on its own. CUDA graphs take memory of their own: each number of rows, and each bucket of columns, is
        captured when a batch first reaches it. Errors: those of `generate`. `close` gives it all back.
        """
        settings = replace(settings or Settings(), stop=())
        self.close()
        rows = checked_batch(num_rows, prompt_tokens, settings.max_new_tokens, self.model)
        self._prepared()
        with self._closed_on_error(rows, settings):
            self._reserved = num_rows, len(rows[0]) + settings.max_new_tokens
            self._asking = "the arena of activations"
            self.memory.reserve(self.rehearser.request(rows, settings), like=self.model.words)
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
    def _closed_on_error(self, rows: list[list[int]], settings: Settings) -> Iterator[None]:
        """A run that broke off in the middle may have left anything behind. What does not fit is told what would."""
        try:
            with memory_for(lambda: self._asking, free=self.close, remedy=lambda: self.forecast(rows, settings).remedy):
                yield
        except BaseException:
            self.close()
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
        state, first = self.parts.prompts(prompts, settings.max_new_tokens)
        ends, width, capacity = state.end.tolist(), first.extent, state.tokens.shape[1]
        if forced is not None:
            force(state, forced, settings.max_new_tokens)
        stream = open_stream(clock, self.model.device, len(prompts), width)
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
        sampling, (num_rows, capacity) = settings.sampling(torch.device("cpu")), state.tokens.shape
        is_covered = num_rows <= self._reserved[0] and capacity <= self._reserved[1]
        if is_covered:
            capacity = self._reserved[1]
        key, generation = session_key(self, num_rows, capacity, sampling), self.memory.generation
        if key not in self._sessions and (not is_covered or len(self._sessions) == MOST_SESSIONS):
            self._drop_sessions()
        self._asking = "the arena of activations"
        passes = self.rehearser.passes(state, first, sampling, capacity)
        clock.once(lambda: self.memory.plan(passes, like=self.model.words))
        if self.memory.generation != generation:
            self._drop_sessions()
        self._asking = f"the KV cache [{num_rows} rows x {capacity} columns]"
        if key in self._sessions:
            self._session = self._sessions[key]
            self._session.restart(state, first, sampling)
        else:
            self._session = self._sessions[key] = Session(self, key, state, first, sampling)
        return self._session

    def lifetimes(
        self, prompts: Sequence[Sequence[int]], settings: Settings | None = None
    ) -> dict[str, tuple[Lifetime, ...]]:
        """What the passes of a request ask for: {"prefill": ..., "decode": ...}, the latter its longest step.

        Rehearsed on meta tensors: no GPU is needed, nothing is computed, and a model without data does as well.
        """
        settings = settings or Settings()
        rows = checked_prompts(prompts, settings.max_new_tokens, self.model.config)
        passes = self.rehearser.request(rows, settings)
        return {name: self.memory.traced(rehearsal) for name, rehearsal in passes.items()}

    def forecast(
        self, prompts: Sequence[Sequence[int]], settings: Settings | None = None, free_bytes: int | None = None
    ) -> Forecast:
        """What a run will need and whether it fits, rehearsed without data; nothing is allocated on the device.

        `free_bytes` is what there is for the weights and the run, on whatever device; None: what the model's own has,
        and this machine for a model of shapes alone (on "meta").
        Errors: PromptError for what could not run in any memory, or is no number of bytes.
        """
        settings = settings or Settings()
        checked_bytes("free_bytes", free_bytes)
        rows = checked_prompts(prompts, settings.max_new_tokens, self.model.config)
        forecaster = Forecaster(self.rehearser, self.parts, settings)
        return forecaster.forecast([len(row) for row in rows], self.model.device, free_bytes)

    def plans(self) -> dict[str, Plan]:
        """What the last run's passes asked for and where it lay: {"prefill": Plan, "decode": Plan}."""
        return self.memory.plans()

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations as `memory` counts them: the most alive at once, or the arena."""
        return self.memory.num_bytes

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

    def close(self) -> None:
        """Give back all memory but the weights; the engine can be used again."""
        self._drop_sessions()
        for held in (self.cache, self.inbox, self.canvas):
            held.close()
        self.memory = self.parts.memory()
        self._reserved = 0, 0

    def _drop_sessions(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._session, self._sessions = None, {}

    def _empty(
        self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None, *, op: str
    ) -> Tensor:
        """Every op comes by here for its memory, so this is also where a prefill can be stopped."""
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled("The run was stopped.")
        self._asking = name
        return self.memory.empty(name, shape, like, dtype, op=op)
