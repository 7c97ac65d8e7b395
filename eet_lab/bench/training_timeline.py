"""The timeline of a training step: its phases, what the host hands over in each, and what the device does."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from eet_lab.bench.phases import Phases
from eet_lab.bench.profiler_trace import OP
from eet_lab.bench.timeline import Timeline, Timelines
from eet_lab.bench.timing import check
from eet_lab.bench.training_batch import Batch
from eet_lab.bench.watch import SAMPLES, Watch, median_of, timeline_of
from eet_lab.bench.workloads import TrainBatch
from eet_lab.devices import present
from eet_lab.models import Model
from eet_lab.progress import Cancel, Progress
from eet_lab.texts import RecipeLike, as_recipe
from eet_lab.threads import cpu_threads

WARM = 2
"""Steps before those that are timed: the optimizer's state is made in the first."""


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
    found = []
    for done, each in enumerate((baseline, recipe)):
        if progress is not None:
            progress(done, 2, f"taking the timeline of {each or 'baseline'}")
        found.append(training_timeline(model, workload, each, cancel=cancel))
    return Timelines(*found)


def training_timeline(
    model: Model, workload: TrainBatch | str, recipe: RecipeLike = "all", *, cancel: Cancel | None = None
) -> Timeline:
    """One steady step on a batch such as `train:demo/b8/s64`, watched by torch's profiler.

    Passes that a recipe captures are launched one by one here, so that each phase can be told; shares are told of a
    step as the recipe launches it. Errors: RecipeError, PromptError, ModelError, OutOfMemory, Cancelled, and
    MonitorError where another profiler is at work.
    """
    chosen = as_recipe(recipe, model.device, model.config.in_training)
    with cpu_threads(model.device), present(model.network.device), closing(Watch(model.device)) as watch:
        batch = Batch.of(TrainBatch.of(workload, model), model)
        phases = Phases(watch.begin, lambda name: watch.marked(OP + name))
        plain, seen = (batch.trainer(parts) for parts in (chosen.parts, phases.within(chosen.parts)))

        def step() -> None:
            phases.start()
            seen.step(batch.examples, cancel)

        for trainer in (plain, seen):
            for _ in range(WARM):
                check(cancel)
                trainer.step(batch.examples, cancel)
        for _ in range(SAMPLES):
            watch.time(partial(plain.step, batch.examples, cancel))
        for _ in range(SAMPLES):
            watch.watch(step)
        watch.finish()
        found = median_of(watch.steps(), key=lambda each: each.step_us)
        sizes = {"num_rows": len(batch.examples), "num_columns": batch.num_tokens, "stage": "train"}
        return timeline_of(model, chosen, found, watch.plain_us, **sizes)
