"""Engine: requests in, tokens out. It knows Parts, and no technique."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import ClassVar

import torch
from torch import Tensor

from eet_lab.engine.base import BaseEngine, check_model, check_parts
from eet_lab.engine.clock import RequestClock
from eet_lab.engine.exclusive import exclusive
from eet_lab.engine.forecast import Forecast, Forecaster, check_keys
from eet_lab.engine.generation import Generation, Record, StepEvent
from eet_lab.engine.meta_trace import MetaTracer, new_cache
from eet_lab.engine.settings import (
    Settings,
    checked_bytes,
    checked_columns,
    checked_each,
    checked_forced,
    checked_prompts,
    checked_settings,
    of_all,
    one_each,
)
from eet_lab.engine.slots import COLUMNS, NewToken, Slots
from eet_lab.engine.tasks import Task, next_tokens
from eet_lab.engine.token_buffer import RequestSettings
from eet_lab.errors import Cancelled, EngineBusy, PromptError, RecipeError, ScheduleError
from eet_lab.memory import Lifetime
from eet_lab.models.decoder import Decoder, forward
from eet_lab.ops.oom import memory_for
from eet_lab.ops.types import Batch
from eet_lab.parts import Parts
from eet_lab.parts.staging import Staging
from eet_lab.progress import Cancel
from eet_lab.scheduling import LEAD_MS, Request, Schedule
from eet_lab.scheduling.whole import MOST, check_whole

MOST_SLOTS = 16
"""Numbers of rows whose slots, and captured steps, a reservation keeps."""


class Engine(BaseEngine[Decoder]):
    """A decoder run by parts. Building one is cheap: weights are shared, nothing is compiled or allocated.

    `task` makes tokens of the hidden states of each pass. An engine runs one batch at a time, on the thread that calls
    it: while it does, `generate`, `reserve` and `close` raise EngineBusy on every other thread, and in `on_step`.
    Errors: RecipeError for a model that one of the ops does not take.
    """

    network: ClassVar[type] = Decoder
    lead_ms: float = LEAD_MS  # ms of passes that a GPU is given ahead; requests that begin after a change have it

    def __init__(self, model: Decoder, parts: Parts | None = None, task: Task = next_tokens) -> None:
        check_model(type(self).__name__, model, (self.network,), "demo")
        check_parts(type(self).__name__, parts, "all")
        for change in parts.weights if parts else ():
            model = change(model)
        super().__init__(model, parts)
        self.task = task
        self.cache = new_cache(self.model, self.parts)
        if self.parts.schedule.max_rows is not None and not self.cache.serves_joins:
            raise RecipeError("Requests cannot join in a KV cache that grows: add memory_reuse, or leave out max_rows.")
        self.tracer = self._tracer()
        self.staging, self.slot_staging = Staging(self.model.device), Staging(self.model.device)
        self._reserved = 0, 0
        self._slots: Slots | None = None  # those that ran last
        self._all_slots: dict[tuple, Slots] = {}

    @exclusive
    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Settings | Sequence[Settings] | None = None,
        *,
        on_step: Callable[[StepEvent], None] | None = None,
        cancel: Cancel | None = None,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> Generation:
        """Continue every prompt (token ids, ragged; empty ones from BOS) and return the tokens with their timing.

        `settings` are the same for all, or a list with those of each prompt. `on_step` is called on this thread for
        each finished step. `cancel` ends the run at the next step, or between two ops of a prefill that is not
        replayed; what was generated until then is returned. With `prefix_caching` it begins with nothing cached, so
        that its times hold however often it runs. `forced` [B, max_new_tokens] replaces what would be chosen (teacher
        forcing), and is checked as prompts are. Errors: PromptError before any work; OutOfMemory, after which the
        memory is free again.
        """
        clock, settings = RequestClock(), checked_each(settings)
        self._check_idle("generate")
        rows = checked_prompts(prompts, settings, self.model.config)
        each = one_each(settings, len(rows))
        if forced is not None:
            forced = checked_forced(forced, each, self.model.config)
        clock.once(lambda: self.prepare(cancel=cancel))
        with self._closed_on_error(lambda: rows, of_all([len(row) for row in rows], each, self.model.config.context)):
            return self._generate(rows, each, on_step or (lambda event: None), cancel, forced, clock)

    @exclusive
    @torch.inference_mode()
    def add(self, prompt: Sequence[int], settings: Settings | None = None, *, number: int = 0) -> Request:
        """Queue a prompt (token ids), to be continued by `step` beside those that are there already.

        An empty prompt starts from BOS. It joins as soon as there is a slot, and is `done` when its last token is in
        `generated`. It gets the tokens that it would get alone, up to rounding: kernels are chosen by how many rows a
        step has. Requests with one seed draw the same noise unless each has its own `number`: it draws as that row of a
        batch would. The first that is drawn, the first with a top-k or top-p, and more requests at once than before may
        take longer: passes like that are placed, and captured. There are as many slots, of as many columns, as the last
        `reserve` made room for; else those of `continuous_batching`, of 1,024 columns. All calls come from the thread
        that added the first request in flight; once it has ended, another one that calls takes them over. Errors:
        RecipeError without `continuous_batching`; PromptError, after which nothing has changed; EngineBusy on another
        thread while that one lives; OutOfMemory, as in `step`.
        """
        settings = checked_settings(settings)
        [row] = checked_prompts([prompt], settings, self.model.config)
        check_whole(PromptError, "number", number, 0, MOST)
        if (schedule := self.parts.schedule).max_rows is None:
            raise RecipeError("Requests join one by one with continuous_batching: add it to the recipe, or `generate`.")
        if not self._has_requests():
            self.prepare()
            rows, columns = self._reserved if self._reserved[0] else (schedule.max_rows, COLUMNS)
            schedule, columns = schedule.of_at_most(rows), min(columns, self.model.config.context)
            with self._closed_on_error(lambda: self._filling(rows, columns), Settings(1)):
                self._open_slots(schedule, [columns] * rows, columns, settings, RequestClock(), self.lead_ms)
        slots, request = self._checked_slots("add"), Request(tuple(row), settings.max_new_tokens)
        with self._closed_on_error(lambda: self._filling(slots.num_slots, slots.capacity), Settings(1)):
            slots.add(request, RequestSettings.of(settings, self.model.config.vocab_size, number))
        return request

    @exclusive
    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """One pass for all requests in flight; returns the tokens that have come to the host meanwhile.

        The host is at most 8 passes ahead of a GPU, and while a slot is free, `lead_ms`. With nothing to read, it waits
        for what is on its way; without requests it returns []. Errors: OutOfMemory, which ends all requests.
        """
        if self._slots is None:
            return []
        slots = self._checked_slots("step")
        with self._closed_on_error(lambda: self._filling(slots.num_slots, slots.capacity), Settings(1)):
            return [NewToken(*new, told.t_ms) for told in slots.step() for new in told.tokens]

    @exclusive
    def cancel(self, request: Request) -> None:
        """Let a request leave now; what it has got stays in `request.generated`.

        Errors: ScheduleError for one that is unknown here, or has left.
        """
        if self._slots is None:
            raise ScheduleError(f"{request!r:.80} is unknown: no request is in flight. Cancel it where it was added.")
        self._checked_slots("cancel").cancel(request)

    def _filling(self, num_rows: int, columns: int) -> list[list[int]]:
        """Prompts that fill so many slots of so many columns, together with a new token."""
        return [[self.model.config.bos_id] * max(columns - 1, 1)] * num_rows

    def _checked_slots(self, name: str) -> Slots:
        """What is in flight; EngineBusy where another thread, which still lives, opened it."""
        assert self._slots is not None
        self._slots.check_thread(name)
        return self._slots

    def _has_requests(self) -> bool:
        """Whether requests are in flight; what is on its way for nobody is waited for."""
        slots = self._slots
        if slots is not None and slots.is_deserted:
            slots.drain()
        return slots is not None and not slots.idle

    def _check_idle(self, name: str) -> None:
        """EngineBusy while requests are in flight."""
        if self._has_requests():
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
        placed on its own. With `continuous_batching`, rows are slots, at most the recipe's `rows`; later `add`s share
        these slots. CUDA graphs take memory of their own: each number of rows, and each bucket of columns,
        is captured when a batch first reaches it. Errors: those of `generate`. `close` gives it all back.
        """
        settings = replace(checked_settings(settings), stop=())
        self._check_idle("reserve")
        columns = checked_columns(num_rows, prompt_tokens, settings.max_new_tokens, self.model.config)
        self._free()
        check_keys(num_rows, columns, self.model)
        rows = [[self.model.config.bos_id] * prompt_tokens] * num_rows
        self.prepare()
        with self._closed_on_error(lambda: rows, settings, keeps=()):
            self._reserved = num_rows, columns
            if self.parts.schedule.max_rows is None:
                self.place(self.tracer.request([len(row) for row in rows], settings).passes, reserved=True)
            each, two = [settings] * num_rows, Event()
            self._generate(rows, each, lambda event: two.set() if event.index else None, two, None, RequestClock())
            self.cache.reset_prefix_cache()

    @contextmanager
    def _closed_on_error(
        self, rows: Callable[[], list[list[int]]], settings: Settings, keeps: tuple = (PromptError,)
    ) -> Iterator[None]:
        """Free all memory when a run fails midway, since its state is unknown. OutOfMemory then says what would fit."""
        try:
            with memory_for(lambda: self._allocating, free=self._free, remedy=lambda: self._remedy(rows(), settings)):
                yield
        except keeps:  # it comes before any work
            raise
        except BaseException:
            self._free()
            raise

    def _generate(
        self,
        prompts: list[list[int]],
        each: Sequence[Settings],
        on_step: Callable[[StepEvent], None],
        cancel: Cancel | None,
        forced: Sequence[Sequence[int]] | None,
        clock: RequestClock,
    ) -> Generation:
        requests = [Request(tuple(row), asked.max_new_tokens) for row, asked in zip(prompts, each, strict=True)]
        schedule, lengths = self.parts.schedule.of_at_most(len(prompts)), [len(prompt) for prompt in prompts]
        ends = (pad + request.full_length for pad, request in zip(schedule.pads(lengths), requests, strict=True))
        slots = self._open_slots(schedule, lengths, max(ends), each, clock)
        slots.check(requests)
        self.cache.reset_prefix_cache()
        for row, (request, asked) in enumerate(zip(requests, each, strict=True)):
            slots.add(request, self._asked(asked, row, forced[row] if forced is not None else ()))
        record = Record(requests, slots.num_passes(requests), on_step)
        try:
            self._run(slots, requests, record, cancel)
        except PromptError:  # of `on_step`: a refusal comes before any work, and leaves the engine as it was
            self._free()
            raise
        done = record.result(clock.setup_ms)
        if slots.is_batch:
            self.cache.keep([len(row) + max(len(new) - 1, 0) for row, new in zip(prompts, done.tokens, strict=True)])
        return done

    def _run(self, slots: Slots, requests: Sequence[Request], record: Record, cancel: Cancel | None) -> None:
        """Steps until all requests have what they asked for, or the run is stopped."""
        while not slots.idle and not record.finished and not (cancel is not None and cancel.is_set()):
            try:
                arrived = slots.step(cancel)
            except Cancelled:  # between two ops
                arrived = slots.drain()
                self._drop_slots()
            record.read(arrived)
        for request in requests:
            if request.status != "finished":
                slots.cancel(request)
        record.read(slots.drain())

    def _asked(self, settings: Settings, row: int, known: Sequence[int]) -> RequestSettings:
        """The settings of a batch's row, whose first tokens may be known."""
        return RequestSettings.of(settings, self.model.config.vocab_size, row, known)

    def _hidden(self, batch: Batch) -> Tensor:
        """The hidden states [T,C] of a pass."""
        return forward(self.model, self.ops, self.attend(batch, self.cache), batch, self.parts.layers)

    def _tracer(self) -> MetaTracer:
        return MetaTracer(self.model, self.parts, self.task)

    def _remedy(self, rows: list[list[int]], settings: Settings) -> str:
        """What would fit, where such prompts did not."""
        return self.forecast(rows, settings).remedy

    def _open_slots(
        self,
        schedule: Schedule,
        lengths: Sequence[int],
        columns: int,
        settings: Settings | Sequence[Settings],
        clock: RequestClock,
        lead_ms: float = float("inf"),  # nobody joins what `generate` begins
    ) -> Slots:
        """Idle slots for prompts of such lengths: ones that are there, if they suit, else new ones.

        Only those that a reservation covers are kept beside each other: they share what is reserved.
        """
        num_slots = schedule.max_rows or len(lengths)
        is_covered = num_slots <= self._reserved[0] and columns <= self._reserved[1]
        columns = self._reserved[1] if is_covered else columns
        is_batch, last = schedule.max_rows is None, self._slots
        if not is_batch and last is not None and last.schedule == schedule:
            columns = max(columns, last.capacity)
        shape = self.tracer.request(lengths, settings, columns)
        if is_batch:
            self.cache.check_room(shape.num_pad, shape.ends)
        key = schedule, num_slots, columns, self.libraries
        if key not in self._all_slots and (not is_covered or len(self._all_slots) == MOST_SLOTS):
            self._drop_slots()
        if is_batch or key not in self._all_slots or last is not self._all_slots[key]:  # others were placed since
            clock.once(lambda: self.place(shape.passes, reserved=not is_batch))
        self._allocating = f"the KV cache [{num_slots} rows x {columns} columns]"
        if key not in self._all_slots:
            self._all_slots[key] = Slots(self, schedule, num_slots, columns)
        slots = self._slots = self._all_slots[key]
        slots.begin(clock, shape, ran_last=slots is last, lead_ms=lead_ms)
        return slots

    def lifetimes(
        self, prompts: Sequence[Sequence[int]], settings: Settings | None = None
    ) -> dict[str, tuple[Lifetime, ...]]:
        """What the passes of a request ask for: {"prefill": ..., "decode": ...}, the latter its longest step.

        Traced on meta tensors: no GPU is needed, nothing is computed, and a model without data does as well.
        """
        settings = checked_settings(settings)
        rows = checked_prompts(prompts, settings, self.model.config)
        passes = self.tracer.request([len(row) for row in rows], settings).passes
        return {name: self.memory.traced(traced_pass) for name, traced_pass in passes.items()}

    def forecast(
        self, prompts: Sequence[Sequence[int]], settings: Settings | None = None, free_bytes: int | None = None
    ) -> Forecast:
        """What a run will need and whether it fits, traced without data; nothing is allocated on the device.

        `free_bytes` is what there is for the weights and the run, on whatever device; None: what the model's own has,
        and this machine for a model of shapes alone (on "meta").
        Errors: PromptError for what could not run in any memory, or is no number of bytes.
        """
        settings = checked_settings(settings)
        checked_bytes("free_bytes", free_bytes)
        rows = checked_prompts(prompts, settings, self.model.config)
        forecaster = Forecaster(self.tracer, self.parts, settings)
        return forecaster.forecast([len(row) for row in rows], self.model.device, free_bytes)

    @exclusive
    def close(self) -> None:
        """End all requests and give back all but the weights; it can be used again. EngineBusy for another thread's."""
        if self._slots is not None and not self._slots.is_deserted:
            self._checked_slots("close")
        self._free()

    @property
    def kv_bytes(self) -> int:
        """Bytes held for keys and values."""
        return self.cache.num_bytes

    @property
    def kv_growth_bytes(self) -> int:
        """Bytes of the copy that a growing KV cache makes beside itself in its last step."""
        return self.cache.growth_bytes

    @property
    def slots(self) -> Slots | None:
        """Where requests are side by side; None before the first one was added."""
        return self._slots

    @property
    def num_preempted(self) -> int:
        """Requests that gave way for want of pages, and are read again, since the slots were opened."""
        return 0 if self._slots is None else self._slots.scheduler.num_preempted

    @exclusive
    def reset_prefix_cache(self) -> None:
        """Forget the prompts and answers that `prefix_caching` keeps of requests that have left, and its counts."""
        self.cache.reset_prefix_cache()

    @property
    def prefix_cache_hit_rate(self) -> float:
        """The share of prompt tokens that `prefix_caching` found in the KV cache, since it was reset."""
        return self.cache.prefix_cache_hits / max(self.cache.prefix_cache_queries, 1)

    @property
    def captures(self) -> int:
        """Decode steps captured so far; 0 where the launch part captures nothing."""
        return 0 if self._slots is None else self._slots.passes.captures

    def _void(self) -> None:
        for slots in self._all_slots.values():
            slots.passes.void()

    def _free(self) -> None:
        self._drop_slots()
        for held in (self.cache, self.staging, self.slot_staging):
            held.close()
        super()._free()
        self._reserved = 0, 0

    def _drop_slots(self) -> None:
        for slots in self._all_slots.values():
            slots.close()
        self._slots, self._all_slots = None, {}
