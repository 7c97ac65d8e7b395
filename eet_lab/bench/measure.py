"""measure: time an engine, alone or interleaved with others, and count its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from eet_lab.bench.cost import step_cost
from eet_lab.bench.launches import is_countable, num_kernels
from eet_lab.bench.measured import STEADY_RUNS, Measurement, Spread, TimedTokens
from eet_lab.bench.results import Run
from eet_lab.bench.run_memory import allocated_afresh, collect, memory_of
from eet_lab.bench.timing import SHARED, check_repeats, on_host
from eet_lab.bench.workloads import RunInputs
from eet_lab.collector import no_collection
from eet_lab.engine.engine import Engine
from eet_lab.engine.generation import Generation, StepEvent
from eet_lab.engine.settings import Settings
from eet_lab.errors import Cancelled
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device
from eet_lab.models.transcript import ended_by
from eet_lab.monitor import Source, open_source
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.words import plain

OnStep = Callable[[StepEvent], None]

SHORTEST_ENERGY_S = 0.5
"""NVML's energy counter moves every 20 to 100 ms: runs that sum up to less say nothing."""

STEADY_CLOCK = 0.95
"""A result carries a warning if the lowest SM clock between repeats is below this share of the highest."""


class TimedRun(NamedTuple):
    """One run of a subject, and what the device said around it."""

    generation: Generation
    seconds: float
    joules: float | None
    clock_mhz: float | None
    conditions: tuple[str, ...]


class Subject:
    """One recipe's engine while it is measured: prepared once, then run again and again in the same memory.

    Memory is counted in `prepare`, from what was allocated before it, so that other subjects may stay alive beside it.
    """

    def __init__(
        self,
        model: Model,
        recipe: Recipe,
        rows: Sequence[Sequence[int]],
        settings: Settings,
        source: Source,
        cancel: Cancel | None = None,
    ) -> None:
        self.recipe, self.engine = str(recipe), Engine(model.decoder, recipe.parts)
        self._toggles = recipe
        self._model, self._rows, self._settings = model, rows, settings
        self._source, self._cancel = source, cancel
        self._memory: dict[str, int] = {}
        self._prepare_s = 0.0
        self._captures = 0

    def begin(self, progress: Progress | None = None) -> None:
        """Warm up for an untimed run that follows; its memory is counted after that run.

        On a CPU two steps are enough. On a GPU this is `prepare`.
        """
        if self._model.device != "cpu":
            self.prepare(progress)
            return
        start, enough = time.perf_counter(), threading.Event()

        def stop_after_two(event: StepEvent) -> None:
            if event.index or (self._cancel is not None and self._cancel.is_set()):
                enough.set()

        self.engine.generate(self._rows, self._settings, on_step=stop_after_two, cancel=enough)
        self._prepare_s = time.perf_counter() - start

    def prepare(self, progress: Progress | None = None) -> tuple[tuple[int, ...], ...]:
        """Build kernels, allocate, capture and warm up in a first run; count the memory that this takes.

        Where passes are captured, it takes a second run. Returns the tokens, for the check that stands before any
        timing. What is prepared once more, after it was closed, keeps what was counted.
        """
        start = time.perf_counter()
        self.engine.prepare(progress, self._cancel)
        before = allocated_afresh(self._model.device)
        for _ in range(self.engine.parts.num_warm_ups):
            warm_up = self._generate()
        if not self._memory:
            self._prepare_s = time.perf_counter() - start
            self._memory = memory_of(self.engine, self._model.device, before)
        return warm_up.tokens

    @property
    def run_bytes(self) -> int:
        """What its runs take beside the weights, once it is prepared."""
        return self._memory["peak"] - self._memory["weights"]

    def run(self, on_step: OnStep | None = None) -> TimedRun:
        """One run. Without `on_step` nobody watches."""
        before = self._source.read()
        with no_collection():  # a page full of widgets takes the collector long, and it would fall into any run
            timed = on_host(lambda: self._generate(on_step))
        after = self._source.read()
        if not self._memory:
            self._memory = memory_of(self.engine, self._model.device, 0)
        joules = after["energy_j"] - before["energy_j"] if "energy_j" in before and "energy_j" in after else None
        conditions = self._source.condition()
        if self._model.device == "cpu" and timed.was_disturbed:
            conditions.append(SHARED)
        return TimedRun(timed.value, timed.seconds, joules, after.get("sm_clock_mhz"), tuple(conditions))

    @cached_property
    def launches(self) -> tuple[int | None, str]:
        """Kernels or calls that the host launches for a decode step, or None, and why they cannot be counted.

        They are counted on a tiny decoder on the CPU, where a user's own op may fail; one that needs a GPU must not be
        called.
        """
        if self.engine.parts.is_captured:
            return 1, ""
        if self._model.device == "cuda" and not is_countable(self._toggles):
            return None, "only our own techniques are counted"
        lengths, dtype = [len(row) for row in self._rows], self._model.decoder.dtype
        try:
            return num_kernels(self.engine.parts, lengths, self._model.config, dtype), ""
        except Exception as problem:  # noqa: BLE001, since an op may raise anything
            return None, f"its calls could not be counted on a tiny decoder: {problem}"

    def measurement(
        self, runs: Sequence[TimedRun], beside: Sequence[TimedRun] = (), costed: bool = True
    ) -> Measurement:
        """The medians and spreads of these runs. Those `beside` them, such as watched ones, only add warnings.

        With `costed=False` the cost model is left out: measuring its memory rate would disturb runs still to come.
        """
        found = as_measurement(
            self._model, self._toggles, self._settings, [run.generation for run in runs], self._memory,
            prepare_s=self._prepare_s, captures=self._captures,
        )  # fmt: skip
        cost = None
        if costed:
            new = self._settings.max_new_tokens
            cost = step_cost(self.engine.model, self._rows, new, found.tpot_ms, self.launches[0])
        warnings = dict.fromkeys(_warnings(self.recipe, self._model.device, runs, beside))
        return replace(found, joules_per_token=_joules_per_token(runs), warnings=tuple(warnings), cost=cost)

    def close(self) -> None:
        """Give the memory back to the device."""
        self.engine.close()
        collect(self._model.device)

    def _generate(self, on_step: OnStep | None = None) -> Generation:
        generation = self.engine.generate(self._rows, self._settings, on_step=on_step, cancel=self._cancel)
        if generation.cancelled:
            raise Cancelled("The measurement was stopped.")
        self._captures = max(self._captures, self.engine.captures)
        return generation


def as_measurement(
    model: Model,
    recipe: Recipe,
    settings: Settings,
    runs: Sequence[TimedTokens],
    memory: Mapping[str, int],
    *,
    prepare_s: float,
    captures: int,
) -> Measurement:
    """What runs of one recipe say; one may have been stopped at once."""
    middle = sorted(runs, key=lambda run: run.total_ms)[(len(runs) - 1) // 2]
    tokens = runs[0].tokens
    return Measurement(
        recipe=str(recipe),
        title=" + ".join(t.title for t in recipe) or "Baseline",
        ttft_ms=Spread.of([run.ttft_ms for run in runs]),
        tpot_ms=Spread.of([run.tpot_ms for run in runs]),
        total_ms=Spread.of([run.total_ms or None for run in runs]),
        tokens_per_s=Spread.of([run.tokens_per_s or None for run in runs]),
        step_ms=tuple(round(ms, 4) for ms in middle.step_ms),
        step_tokens=middle.step_tokens,
        memory=dict(memory),
        memory_source="measured" if model.device == "cuda" else "planned",
        prepare_s=round(prepare_s, 4),
        captures=captures,
        joules_per_token=None,
        tokens=tokens,
        texts=tuple(map(ended_by(settings.stop, model.decode), tokens)),
        repeats=len(runs),
    )


@on_its_device
def measure(
    model: Model,
    rows: Sequence[Sequence[int]],
    settings: Settings,
    recipe: Recipe | None = None,
    *,
    repeats: int = 3,
    cancel: Cancel | None = None,
) -> Measurement:
    """Time one recipe on prompts `rows` (token ids). Errors: those of `Engine.generate`, and Cancelled."""
    check_repeats(repeats)
    with ExitStack() as stack:
        source = stack.enter_context(closing(open_source(model.device)))
        subject = stack.enter_context(closing(Subject(model, recipe or Recipe(), rows, settings, source, cancel)))
        subject.prepare()
        return subject.measurement([subject.run() for _ in range(repeats)])


def watched(
    engine: Engine,
    recipe: Recipe,
    job: RunInputs,
    on_step: OnStep,
    cancel: Cancel | None = None,
    prepare_s: float = 0.0,
) -> Run:
    """Generate once, calling `on_step` for every step. Stopped by `cancel`, it gives what there is until then.

    Errors: those of `Engine.generate`.
    """
    model, described = job.model, job.described()  # git is asked what runs, for which Stop is not to wait
    before = allocated_afresh(model.device)
    run = engine.generate(job.rows, job.settings, on_step=on_step, cancel=cancel)
    measurement = as_measurement(
        model, recipe, job.settings, [run], memory_of(engine, model.device, before),
        prepare_s=prepare_s, captures=engine.captures,
    )  # fmt: skip
    return Run(**described, measurement=measurement, stopped=run.cancelled)


def _joules_per_token(runs: Sequence[TimedRun]) -> float | None:
    joules = [run.joules for run in runs if run.joules is not None]
    if len(joules) < len(runs) or sum(run.seconds for run in runs) < SHORTEST_ENERGY_S:
        return None
    return round(sum(joules) / sum(run.generation.num_tokens for run in runs), 5)


def _warnings(recipe: str, device: str, runs: Sequence[TimedRun], beside: Sequence[TimedRun] = ()) -> list[str]:
    """Reasons to doubt the times of `runs`, such as throttling, a shared processor or tokens that differ.

    `beside` are runs with a live view. On a GPU they are slower, since the host launches later, so the spread of times
    leaves them out; on a CPU it includes them.
    """
    steady, runs = runs if device == "cuda" else [*runs, *beside], [*runs, *beside]
    found = [condition for run in runs for condition in run.conditions]
    if len({run.generation.tokens for run in runs}) > 1:
        found.append(f"{recipe} gave other tokens from one repeat to the next")
    longest, shortest = (pick(run.generation.total_ms for run in steady) for pick in (max, min))
    if longest > STEADY_RUNS[device] * shortest:
        found += [
            SHARED,
            f"runs of {recipe} took from {plain(shortest)} to {plain(longest)} ms, so these times say little; close "
            "what else runs and measure again",
        ]
    clocks = [run.clock_mhz for run in runs if run.clock_mhz]
    if clocks and min(clocks) < STEADY_CLOCK * max(clocks):
        found.append(f"the SM clock moved from {min(clocks):.0f} to {max(clocks):.0f} MHz between repeats")
    return found
