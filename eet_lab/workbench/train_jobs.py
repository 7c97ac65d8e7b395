"""What a reader asks of the training panel, and what answers it: a run of training, and two recipes in turn."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from eet_lab.bench import cost
from eet_lab.bench.train_compare import TrainComparison, TrainLadder, compare_training, ladder_training
from eet_lab.devices import present
from eet_lab.errors import RecipeError, TrainingError
from eet_lab.models import Model
from eet_lab.models.config import Seq2SeqConfig, VisionConfig
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.whole import MOST, check_whole
from eet_lab.technique import Recipe
from eet_lab.texts import as_recipe
from eet_lab.threads import cpu_threads
from eet_lab.training import Rows, Step, Trainer, TrainRun, TrainSettings, checkpoint, demos, train
from eet_lab.training.data import Examples, Numbered
from eet_lab.training.run import Evaluation
from eet_lab.training.tasks import LANGUAGE, MASKED, task_of
from eet_lab.words import counted, visible

HELD_OUT = 0.1
"""The share of the rows that are not trained on."""
MOST_HELD_OUT = 64
"""Rows of them that are read at most: they are read at most eleven times in a run."""
MOST_BATCH_TOKENS = 1 << 24
PARTS = 10
"""How often in a run held-out rows are read, and a checkpoint is written, at most."""


@dataclass(frozen=True)
class TrainAsked:
    """A run of training. `data` is a file, and "" what ships or is drawn for the task; `task` is one of `TASKS`, and
    None what the model's head is for; `folder` is that of the checkpoint, and "" none.
    """

    data: str = ""
    techniques: tuple[str, ...] = ()
    lr: float = 3e-5
    steps: int = 40
    batch_rows: int = 4
    row_tokens: int = 128
    warmup_steps: int = 5
    dropout: float = 0.0
    folder: str = ""
    task: str | None = None

    @property
    def settings(self) -> TrainSettings:
        """What the trainer is asked for. Errors: TrainingError."""
        return TrainSettings(
            lr=self.lr, warmup_steps=self.warmup_steps, dropout=self.dropout, attention_dropout=self.dropout,
            max_steps=self.steps,
        )  # fmt: skip

    @property
    def place(self) -> Path | None:
        """The checkpoint's folder."""
        return Path(os.path.expanduser(self.folder)) if self.folder else None

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is one to go on from; whatever the folder is called, this has an answer."""
        return self.place is not None and os.path.isfile(self.place / checkpoint.NAME)

    def check(self, model: Model) -> None:
        """What can be told before the data is read. Errors: TrainingError, RecipeError, ModelError."""
        task_of(self.task, model.config), self.settings, self.recipe(model)
        check_whole(TrainingError, "batch_rows", self.batch_rows, 1, MOST)
        check_whole(TrainingError, "row_tokens", self.row_tokens, 2, MOST)
        if (num_tokens := self.batch_rows * self.row_tokens) > MOST_BATCH_TOKENS:
            raise TrainingError(
                f"A batch would have {num_tokens:,} tokens, but at most {MOST_BATCH_TOKENS:,} are read for a step. "
                "Take fewer rows, or shorter ones."
            )

    def recipe(self, model: Model) -> Recipe:
        """The techniques. Errors: RecipeError."""
        return as_recipe(",".join(self.techniques), model.device, model.config.in_training)

    def reads_text(self, model: Model) -> bool:
        """Whether labels are made from texts alone."""
        return task_of(self.task, model.config) in (LANGUAGE, MASKED)

    def reads_rows(self, model: Model) -> bool:
        """Whether texts are cut into rows; other examples are as long as they are."""
        of_bundled = not isinstance(model.config, VisionConfig | Seq2SeqConfig)
        return self.reads_text(model) or (of_bundled and not self.data)

    def told(self, model: Model) -> str:
        """What is read where no data is given, in words."""
        if isinstance(model.config, VisionConfig):
            return "drawn digits"
        return demos.TOLD[task_of(self.task, model.config)]

    def rows(self, model: Model) -> tuple[Numbered, Numbered]:
        """What is trained on, and what is held out. Errors: TrainingError, ModelError."""
        path, task = os.path.expanduser(self.data), task_of(self.task, model.config)
        rows: Numbered
        if path and isinstance(model.config, VisionConfig):
            raise TrainingError(
                f"data is {visible(path)}, but images are not read from files. Leave it empty for drawn digits, or use "
                "eet_lab.Trainer with Example(pixels=..., labels=...)."
            )
        if not path:
            rows = demos.bundled(model, task, self.row_tokens)
        elif self.reads_text(model):
            rows = Rows.of_file(model, path, self.row_tokens)
            rows = demos.masked(model, rows) if task is MASKED else rows
        else:
            rows = Examples.of_file(model, path)
        trained, held_out = rows.split(HELD_OUT)
        return trained, held_out.part(0, min(len(held_out), MOST_HELD_OUT))


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
    """What came of a run, and the model as it is after it. `mfu` is that of the step in the middle; None on a CPU."""

    run: TrainRun
    model: Model
    mfu: float | None


def train_model(
    model: Model, asked: TrainAsked, resumes: bool, on_look: OnLook, progress: Progress, cancel: Cancel
) -> Trained:
    """Train a copy of the model, from its checkpoint if it `resumes`. Errors: those of `Trainer` and `train`."""
    every = -(-asked.steps // PARTS)
    rows, held_out = asked.rows(model)
    with cpu_threads(model.device), present(model.network.device):
        trainer = Trainer(model.network, asked.recipe(model).parts, task=asked.task, settings=asked.settings)
        if resumes and asked.place is not None:
            trainer.resume(asked.place)
            if trainer.num_steps >= asked.steps:
                raise TrainingError(
                    f"The checkpoint in {visible(asked.folder)} already has {counted(trainer.num_steps, 'step')}, and "
                    f"steps ({asked.steps:,}) counts those too. Ask for more than {trainer.num_steps:,}."
                )
        on_gpu = model.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()

        def reached(step: Step) -> float | None:
            return step.work and cost.mfu(trainer.config, step.work, step.ms, model.device)

        def look(step: Step) -> None:
            counters = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) if on_gpu else (None, None)
            on_look(Look(step, reached(step), *counters))

        run = train(
            trainer, rows, max_steps=asked.steps, batch_rows=asked.batch_rows, held_out=held_out, evaluate_every=every,
            folder=asked.place, save_every=every if asked.place else None, on_step=look, on_evaluation=on_look,
            progress=progress, cancel=cancel,
        )  # fmt: skip
        found = sorted(mfu for step in run.steps if (mfu := reached(step)) is not None)
        middle = found[len(found) // 2] if found else None
        return Trained(run, replace(model, network=trainer.trained()), middle)


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
