"""watched: one run of an engine while somebody looks on, as a result that can be kept."""

from __future__ import annotations

from eet_lab.bench.job import Job
from eet_lab.bench.measure import OnStep, allocated_afresh, as_measurement, memory_of
from eet_lab.bench.results import Run
from eet_lab.engine.engine import Engine
from eet_lab.engine.generation import StepEvent
from eet_lab.progress import Cancel
from eet_lab.technique import Recipe


def watched(
    engine: Engine, recipe: Recipe, job: Job, on_step: OnStep, cancel: Cancel | None = None, prepare_s: float = 0.0
) -> Run:
    """Generate once, calling `on_step` for every step. Stopped by `cancel`, it gives what there is until then.

    Errors: those of `Engine.generate`.
    """
    model, counts = job.model, list[int]()

    def note(event: StepEvent) -> None:
        counts.append(len(event.tokens))
        on_step(event)

    before = allocated_afresh(model.device)
    run = engine.generate(job.rows, job.settings, on_step=note, cancel=cancel)
    measurement = as_measurement(
        model, recipe, job.settings, [(run, tuple(counts))], memory_of(engine, model.device, before),
        prepare_s=prepare_s, captures=engine.captures,
    )  # fmt: skip
    return Run(**job.described(), measurement=measurement, stopped=run.cancelled)
