"""Taking the timeline: an engine runs a few steps on their own, first without torch's profiler, then with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any

from eet_lab.bench.launches import Call, around_each, decode_calls
from eet_lab.bench.profiler_trace import OP, ProfiledStep
from eet_lab.bench.timeline import Timeline, Timelines, with_bytes
from eet_lab.bench.watch import SAMPLES, Watch, median_of, timeline_of
from eet_lab.bench.workloads import RunInputs
from eet_lab.engine.engine import Engine
from eet_lab.errors import Cancelled
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device
from eet_lab.parts import Parts
from eet_lab.parts.launch import Decode
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.texts import Prompts, RecipeLike, as_recipe

NEW_TOKENS = 2 * SAMPLES + 4
"""The first of them come while libraries and graphs warm up."""


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
    found = []
    for done, each in enumerate((baseline, recipe)):
        chosen = as_recipe(each, model.device, model.config)
        if progress is not None:
            progress(done, 2, f"taking the timeline of {chosen}")
        found.append(step_timeline(model, prompts, chosen, cancel=cancel, **settings))
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
    with_sizes = with_bytes(step.spans, _calls(model, chosen, len(job.rows), num_columns))
    return timeline_of(
        model, chosen, replace(step, spans=with_sizes), probe.plain_us, num_rows=len(job.rows), num_columns=num_columns
    )


class Probe(Watch):
    """Sets the last steps of a generation apart, times some of them and has the profiler watch the others.

    It stands between an engine and its launch part, so that every step comes by.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.armed, self._num_columns = False, list[int]()

    def within(self, parts: Parts) -> Parts:
        """The parts with steps and ops that come by here."""

        def launch(decode: Decode, longest: int) -> Decode:
            inner = parts.launch(decode, longest)
            return lambda max_kv: self._step(lambda: inner(max_kv), max_kv, longest - max_kv)

        launch.is_captured = parts.is_captured  # type: ignore[attr-defined]
        return replace(parts, launch=launch, ops=around_each(parts.ops, self._around_op))

    def median_step(self) -> tuple[ProfiledStep, int]:
        """The watched step of median length, and how many columns it read."""
        steps = zip(self.steps(), self._num_columns, strict=False)
        return median_of(steps, key=lambda pair: pair[0].step_us)

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


def _calls(model: Model, recipe: Recipe, num_rows: int, num_columns: int) -> tuple[Call, ...]:
    """The ops of the step with their bytes; none where an op is a user's own, whose kernels need real memory."""
    if not all(type(technique).__module__.startswith("eet_lab.") for technique in recipe):
        return ()
    return decode_calls(model.config, recipe.parts, num_rows, num_columns, model.decoder.dtype)
