"""What answers the training panel: a run of training, and recipes in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from eet_lab.bench import cost
from eet_lab.bench.train_compare import TrainComparison, TrainLadder, compare_training, ladder_training
from eet_lab.devices import present
from eet_lab.errors import RecipeError
from eet_lab.models import Model
from eet_lab.progress import Cancel, Progress
from eet_lab.threads import cpu_threads
from eet_lab.training import Step, TrainRun
from eet_lab.training.asked import TrainAsked
from eet_lab.training.run import Evaluation


class Look(NamedTuple):
    """What a step did. `mfu` is the share of the measured ceiling that its arithmetic reached; `allocated_bytes` by
    torch once it was done, and the most until then. All three are None on a CPU.
    """

    step: Step
    mfu: float | None
    allocated_bytes: int | None
    peak_bytes: int | None


OnLook = Callable[[Look | Evaluation], None]


@dataclass(frozen=True)
class Trained:
    """What came of a run, and the model as it is after it. `mfu` is that of the step in the middle; None on a CPU.

    `changed`: what the run that it went on from had otherwise, as `TrainAsked.changed` tells. `warmup_steps` are those
    that it had, which are that run's where none are asked for.
    """

    run: TrainRun
    model: Model
    mfu: float | None
    changed: Mapping[str, tuple[Any, Any]]
    warmup_steps: int


def train_model(
    model: Model, asked: TrainAsked, resumes: bool, on_look: OnLook, progress: Progress, cancel: Cancel
) -> Trained:
    """Train a copy of the model, from its checkpoint if it `resumes`. Errors: those of `Trainer` and `train`."""
    asked.check_place(model)
    rows, held_out = asked.rows(model)
    with cpu_threads(model.device), present(model.network.device):
        trainer = asked.trainer(model, resumes)
        changed = asked.changed(trainer, rows)
        on_gpu = model.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()

        def reached(step: Step) -> float | None:
            return step.work and cost.mfu(trainer.config, step.work, step.ms, model.device)

        def look(step: Step) -> None:
            counters = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) if on_gpu else (None, None)
            on_look(Look(step, reached(step), *counters))

        run = asked.train(
            trainer, rows, held_out, on_step=look, on_evaluation=on_look, progress=progress, cancel=cancel
        )
        found = sorted(mfu for step in run.steps if (mfu := reached(step)) is not None)
        middle = found[len(found) // 2] if found else None
        return Trained(run, replace(model, network=trainer.trained()), middle, changed, trainer.settings.warmup_steps)


Compared = TrainComparison | TrainLadder


def compare_recipes(
    model: Model,
    asked: TrainAsked,
    one_by_one: bool,
    on_partial: Callable[[Compared], None],
    progress: Progress,
    cancel: Cancel,
) -> Compared:
    """The ticked techniques against none, or added and left out `one_by_one`, a step of each recipe in turn.

    Errors: those of `compare_training` and `ladder_training`.
    """
    if not asked.techniques:
        raise RecipeError("No technique is ticked, so there is nothing to compare: tick one.")
    rows, _ = asked.rows(model)
    work: Callable[..., Compared] = ladder_training if one_by_one else compare_training
    return work(
        model, rows, asked.recipe(model), batch_rows=asked.batch_rows, task=asked.task, settings=asked.settings,
        progress=progress, cancel=cancel, on_partial=on_partial,
    )  # fmt: skip
