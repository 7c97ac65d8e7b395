"""Taking the timeline of a step, of decoding or of training: first without torch's profiler, then with it.

A training step has phases, as its parts pass through them: forward, backward, and the update of the weights.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.profiler import ProfilerActivity, profile, record_function

from eet_lab.bench.launches import around_each, decode_calls, is_countable
from eet_lab.bench.measured import device_name, environment
from eet_lab.bench.profiler_trace import MARK, OP, PHASE, ProfiledStep, read_steps
from eet_lab.bench.timeline import MOST_SPANS, Span, Timeline, Timelines, with_bytes
from eet_lab.bench.timing import Tally, median_run
from eet_lab.bench.train_compare import WARM
from eet_lab.bench.training import Batch
from eet_lab.bench.workloads import RunInputs, TrainBatch
from eet_lab.engine.engine import Engine
from eet_lab.errors import Cancelled, MonitorError, first_line
from eet_lab.models import Model
from eet_lab.models.on_device import on_any_device, on_its_device
from eet_lab.parts import Parts
from eet_lab.parts.launch import Decode, GraphPool
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.texts import Prompts, RecipeLike, as_recipe
from eet_lab.words import counted

SAMPLES = 3
"""Steps without the profiler, and with it: the one of median length is shown."""


class Watch:
    """Times some steps, and has the profiler watch others; nothing else is on the device when one of them begins."""

    def __init__(self, device: str) -> None:
        self.plain_us = list[float]()
        self._device = device
        self._profile: profile | None = None
        self._trace: dict[str, Any] = {}

    def time(self, run: Callable[[], Any]) -> None:
        """Run a step without the profiler."""
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        self.plain_us.append((time.perf_counter() - start) * 1e6)

    def watch(self, run: Callable[[], Any]) -> None:
        """Run a step under the profiler."""
        if self._profile is None:
            self._profile = _started(self._device)
        self._wait()
        with record_function(MARK):
            run()
        self._wait()

    def finish(self) -> None:
        """The profiler has seen enough."""
        watching = self._profile
        self.close()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            watching.export_chrome_trace(str(path))  # type: ignore[union-attr]
            self._trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)

    def steps(self) -> list[ProfiledStep]:
        """What was watched, once that is finished."""
        return read_steps(self._trace)

    def marked(self, name: str) -> AbstractContextManager:
        """What is done within has this name in the trace. A mark takes microseconds, so there is none while nobody
        watches.
        """
        return NOTHING if self._profile is None else record_function(name)

    def begin(self, phase: str) -> None:
        """A phase of a step begins here."""
        with self.marked(PHASE + phase):
            pass

    def close(self) -> None:
        """End the profiler where a run broke off."""
        watching, self._profile = self._profile, None
        if watching is not None:
            watching.stop()

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


NOTHING = nullcontext()
TAKEN = "torch's profiler cannot watch the step: {}. End the other profile, and take the timeline again."


def _started(device: str) -> profile:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else its library writes lines into the notebook
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    if torch.autograd._profiler_enabled():  # some versions would end the other one without a word
        raise MonitorError(TAKEN.format("a profile is under way in this thread"))
    watching = profile(activities=activities)
    try:
        watching.start()
    except RuntimeError as error:
        raise MonitorError(TAKEN.format(first_line(error))) from error
    return watching


def timeline_of(model: Model, recipe: Recipe, step: ProfiledStep, plain_us: Sequence[float], **sizes: Any) -> Timeline:
    """The timeline of a step that was watched, with at most `MOST_SPANS` spans; `sizes` are the rest of its fields."""
    on_gpu = model.device == "cuda"
    spans, num_left_out = earliest(step.spans, MOST_SPANS)
    return Timeline(
        recipe=str(recipe),
        device_kind="cuda" if on_gpu else "cpu",
        source=f"torch.profiler, {device_name('cuda') if on_gpu else 'CPU'}",
        origin=environment(model).origin,
        spans=spans,
        step_us=step.step_us,
        unprofiled_us=median(plain_us),
        num_launches=step.num_launches,
        device_busy_us=step.device_busy_us if on_gpu else None,
        num_left_out=num_left_out,
        remark=_remark(step, model.device, num_left_out),
        **sizes,
    )


def earliest(spans: Sequence[Span], most: int) -> tuple[tuple[Span, ...], int]:
    """The `most` spans that begin first, and how many are left out."""
    kept = sorted(sorted(range(len(spans)), key=lambda place: spans[place].start_us)[:most])
    places = {old: new for new, old in enumerate(kept)}
    found = []
    for span in (spans[old] for old in kept):
        found.append(span if span.launch is None else replace(span, launch=places.get(span.launch)))
    return tuple(found), len(spans) - len(kept)


NO_KERNELS = "The driver gave the profiler no kernels"


def _remark(step: ProfiledStep, device: str, num_left_out: int) -> str:
    """What could not be seen."""
    has_kernels = any(span.lane == "device" for span in step.spans)
    remarks = {
        "On a CPU a call of PyTorch computes before it returns: there is a host and no device.": device == "cpu",
        f"{NO_KERNELS}, so only the host is seen.": device == "cuda" and not has_kernels,
        f"The launches of {counted(step.num_unlaunched, 'kernel')} were not seen.": step.num_unlaunched > 0,
        f"{counted(num_left_out, 'span')} at the end of the step are left out.": num_left_out > 0,
    }
    return " ".join(text for text, applies in remarks.items() if applies)


PHASES = ("forward", "backward", "update")


class Phases:
    """Steps of a recipe on a batch by two trainers, both warm: one as it is, and one that tells `begin` when a phase
    begins, by its name. A batch of several passes goes forward and backward in each.

    A pass goes forward with its first op, and backward once its loss is differentiated. What a loss differentiates
    itself, as one in chunks does, is forward. `around` surrounds each op. Calls may come from a thread of PyTorch's.
    """

    def __init__(
        self,
        batch: Batch,
        parts: Parts,
        begin: Callable[[str], None],
        around: Callable[[str], AbstractContextManager] | None = None,
        cancel: Cancel | None = None,
    ) -> None:
        self._batch, self._begin, self._around, self._cancel = batch, begin, around, cancel
        self._now = ""
        self._plain, self.trainer = batch.trainer(parts), batch.trainer(self._within(parts))
        for step in (self.step, self.step_in_phases):
            for _ in range(WARM):
                step()

    def step(self) -> None:
        """One of the recipe as it is."""
        self._plain.step(self._batch.examples, self._cancel)

    def step_in_phases(self) -> None:
        """One whose phases are told, by `trainer`."""
        self._now = ""
        self._enter("forward")
        self.trainer.step(self._batch.examples, self._cancel)

    def _within(self, parts: Parts) -> Parts:
        """The parts with ops and a loss that come by here."""

        @wraps(parts.loss)
        def loss(*args: Any, **keywords: Any) -> Tensor:
            total = parts.loss(*args, **keywords)
            if total.requires_grad:
                total.register_hook(self._goes_back)
            return total

        # Python is not there when a captured pass is replayed: passes are launched one by one.
        eager = Parts().step_launch
        return replace(parts, train_ops=around_each(parts.train_ops, self._op), loss=loss, step_launch=eager)

    @contextmanager
    def _op(self, name: str) -> Iterator[None]:
        self._enter("forward")
        if self._around is None:
            yield
            return
        with self._around(name):
            yield

    def _goes_back(self, grad: Tensor) -> None:
        self._enter("backward")
        Variable._execution_engine.queue_callback(lambda: self._enter("update"))

    def _enter(self, phase: str) -> None:
        if phase != self._now:
            self._now = phase
            self._begin(phase)


NEW_TOKENS = 2 * SAMPLES + 4
"""The first of them come while libraries and graphs warm up."""


@on_its_device
def timelines(
    model: Model,
    prompts: Prompts | None = None,
    recipe: RecipeLike = "all",
    *,
    baseline: RecipeLike = "",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    **settings: Any,
) -> Timelines:
    """A step under `baseline` and one under `recipe`, each in an engine of its own, at the same length of the KV cache
    or a column or two apart; as `compare` is asked, so are these.

    Errors: those of `step_timeline`.
    """
    recipes = (as_recipe(each, model.device, model.config) for each in (baseline, recipe))
    return _both(lambda chosen: step_timeline(model, prompts, chosen, cancel=cancel, **settings), recipes, progress)


def _both(take: Callable[[Recipe], Timeline], recipes: Iterable[Recipe], progress: Progress | None) -> Timelines:
    found, tally = [], Tally(2, progress)
    for each in recipes:
        tally.say(f"taking the timeline of {each}")
        found.append(take(each))
        tally.finish()
    return Timelines(*found)


@on_its_device
def step_timeline(
    model: Model,
    prompts: Prompts | None = None,
    recipe: RecipeLike = "all",
    *,
    cancel: Cancel | None = None,
    **settings: Any,
) -> Timeline:
    """One steady decode step on the prompts (default: eight ragged ones), watched by torch's profiler.

    The step is one of the last of `NEW_TOKENS`, whatever `max_new_tokens` says; nothing else is on the device when it
    begins, and the next waits until it has ended. `settings` are those of `Settings`.
    Errors: RecipeError, PromptError, OutOfMemory, Cancelled once `cancel` is set, and MonitorError where another
    profiler is at work.
    """
    chosen = as_recipe(recipe, model.device, model.config)
    job = RunInputs.of(model, prompts, 1, settings | {"max_new_tokens": NEW_TOKENS, "stop": ()})
    probe = Probe(model.device)
    with closing(Engine(model.decoder, probe.within(chosen.parts))) as engine, closing(probe):
        engine.prepare(cancel=cancel)
        for armed in (False, True) if model.device == "cuda" else (True,):  # graphs are captured before
            probe.armed = armed
            if engine.generate(job.rows, job.settings, cancel=cancel).cancelled:
                raise Cancelled("The timeline was stopped.")
    step, num_columns = probe.median_step()
    if is_countable(chosen):
        calls = decode_calls(model.config, chosen.parts, len(job.rows), num_columns, model.decoder.dtype)
        step = replace(step, spans=with_bytes(step.spans, calls))
    return timeline_of(model, chosen, step, probe.plain_us, num_rows=len(job.rows), num_columns=num_columns)


class Probe(Watch):
    """Sets the last steps of a generation apart, times some of them and has the profiler watch the others.

    It stands between an engine and its launch part, so that every step comes by.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.armed, self._num_columns = False, list[int]()

    def within(self, parts: Parts) -> Parts:
        """The parts with steps and ops that come by here."""

        def launch(decode: Decode, longest: int, pool: GraphPool) -> Decode:
            inner = parts.launch(decode, longest, pool)
            return lambda max_kv: self._step(lambda: inner(max_kv), max_kv, longest - max_kv)

        launch.is_captured = parts.is_captured  # type: ignore[attr-defined]
        return replace(parts, launch=launch, ops=around_each(parts.ops, self._around_op))

    def median_step(self) -> tuple[ProfiledStep, int]:
        """The watched step of median length, and how many columns it read."""
        steps = [*zip(self.steps(), self._num_columns, strict=False)]
        return median_run(steps, key=lambda pair: pair[0].step_us)

    def _step(self, run: Callable[[], None], num_columns: int, num_to_come: int) -> None:
        if not self.armed or num_to_come >= 2 * SAMPLES:
            run()
        elif num_to_come >= SAMPLES:
            self.time(run)
        else:
            self.watch(run)
            self._num_columns.append(num_columns)
            if not num_to_come:
                self.finish()

    def _around_op(self, name: str) -> AbstractContextManager:
        return self.marked(OP + name)


@on_any_device
def training_timelines(
    model: Model,
    workload: TrainBatch | str,
    recipe: RecipeLike = "all",
    *,
    baseline: RecipeLike = "",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Timelines:
    """A step under `baseline` and one under `recipe`, each by a trainer of its own, on the same batch.

    `plot` draws them, and `eet_lab.bench.timeline.write_trace` writes them for Perfetto. Errors: those of
    `training_timeline`.
    """
    recipes = (as_recipe(each, model.device, model.config.in_training) for each in (baseline, recipe))
    return _both(lambda chosen: training_timeline(model, workload, chosen, cancel=cancel), recipes, progress)


@on_any_device
def training_timeline(
    model: Model, workload: TrainBatch | str, recipe: RecipeLike = "all", *, cancel: Cancel | None = None
) -> Timeline:
    """One steady step on a batch such as `train:demo/b8/s64`, watched by torch's profiler.

    Passes that a recipe captures are launched one by one here, so that each phase can be told; shares are told of a
    step as the recipe launches it. Errors: RecipeError, PromptError, ModelError, OutOfMemory, Cancelled, and
    MonitorError where another profiler is at work.
    """
    chosen = as_recipe(recipe, model.device, model.config.in_training)
    with closing(Watch(model.device)) as watch:
        batch = Batch.of(TrainBatch.of(workload, model), model)
        phases = Phases(batch, chosen.parts, watch.begin, lambda name: watch.marked(OP + name), cancel)
        for _ in range(SAMPLES):
            watch.time(phases.step)
        for _ in range(SAMPLES):
            watch.watch(phases.step_in_phases)
        watch.finish()
        found = median_run(watch.steps(), key=lambda each: each.step_us)
        sizes = {"num_rows": len(batch.examples), "num_columns": batch.num_tokens, "stage": "train"}
        return timeline_of(model, chosen, found, watch.plain_us, **sizes)
