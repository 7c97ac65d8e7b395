"""A run of training that a reader asks for in a form or on a command line: data, settings, and where it is kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eet_lab.errors import TrainingError
from eet_lab.models import Model
from eet_lab.models.config import Seq2SeqConfig, VisionConfig
from eet_lab.scheduling.whole import MOST, check_whole, is_real, is_whole
from eet_lab.technique import Recipe
from eet_lab.texts import as_recipe
from eet_lab.training import checkpoint, demos
from eet_lab.training.data import Examples, Numbered, Rows
from eet_lab.training.run import TrainRun, train
from eet_lab.training.settings import TrainSettings
from eet_lab.training.tasks import LANGUAGE, MASKED, task_of
from eet_lab.training.trainer import Trainer
from eet_lab.words import counted, visible

HELD_OUT = 0.1
"""The share of the rows that are not trained on."""
MOST_HELD_OUT = 64
"""Rows of them that are read at most: they are read at most eleven times in a run."""
MOST_BATCH_TOKENS = 1 << 24
ROW_TOKENS, WARMUP_STEPS = 128, 5
MOMENTS_AND_WEIGHT = 3
"""Numbers that a checkpoint has of each weight, by AdamW."""
PARTS = 10
"""How often in a run held-out rows are read, and a checkpoint is written, at most."""


@dataclass(frozen=True)
class TrainAsked:
    """A run of training. `data` is a file, and "" what ships or is drawn for the task; `task` is one of `TASKS`, and
    None what the model's head is for; `folder` is that of the checkpoint, and "" none. Where they are None, rows have
    128 tokens, or the model's context if that is shorter, and `warmup_steps` are five, or all of fewer `steps`; a run
    that resumes keeps those of its checkpoint.
    """

    data: str = ""
    techniques: tuple[str, ...] = ()
    lr: float = 3e-5
    steps: int = 40
    batch_rows: int = 4
    row_tokens: int | None = None
    warmup_steps: int | None = None
    dropout: float = 0.0
    folder: str = ""
    task: str | None = None

    @property
    def warmup(self) -> int:
        """The steps in which the learning rate rises."""
        return min(WARMUP_STEPS, self.steps) if self.warmup_steps is None else self.warmup_steps

    def tokens_a_row(self, model: Model) -> int:
        """The length of the rows that texts are cut into."""
        return min(ROW_TOKENS, model.config.context) if self.row_tokens is None else self.row_tokens

    @property
    def settings(self) -> TrainSettings:
        """What the trainer is asked for. Errors: TrainingError."""
        return TrainSettings(
            lr=self.lr, warmup_steps=self.warmup, dropout=self.dropout, attention_dropout=self.dropout,
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
        check_whole(TrainingError, "steps", self.steps, 1, MOST)
        task_of(self.task, model.config), self.settings, self.recipe(model)
        check_whole(TrainingError, "batch_rows", self.batch_rows, 1, MOST)
        row_tokens, most = self.tokens_a_row(model), model.config.context if self.reads_rows(model) else MOST
        check_whole(TrainingError, "row_tokens", row_tokens, 2, most, " (the model's context)" * (most < MOST))
        if (num_tokens := self.batch_rows * row_tokens) > MOST_BATCH_TOKENS:
            raise TrainingError(
                f"A batch would have {num_tokens:,} tokens, but at most {MOST_BATCH_TOKENS:,} are read for a step. "
                "Take fewer rows, or shorter ones."
            )

    def check_place(self, model: Model) -> None:
        """That there is a place for checkpoints, and room: one stays until the next is whole. Errors: TrainingError."""
        if self.place is not None:
            num_more = 1 if self.has_checkpoint or self.steps == 1 else 2
            checkpoint.check(self.place, num_more * MOMENTS_AND_WEIGHT * weight_bytes(model))

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
            rows = demos.bundled(model, task, self.tokens_a_row(model))
        elif self.reads_text(model):
            rows = Rows.of_file(model, path, self.tokens_a_row(model))
            rows = demos.masked(model, rows) if task is MASKED else rows
        else:
            rows = Examples.of_file(model, path)
            rows.check(task, model.config)
        trained, held_out = rows.split(HELD_OUT)
        return trained, held_out.part(0, min(len(held_out), MOST_HELD_OUT))

    def trainer(self, model: Model, resumes: bool) -> Trainer:
        """One of a copy of the model, as its checkpoint has it if it `resumes`. Errors: those of `Trainer`."""
        trainer = Trainer(model.network, self.recipe(model).parts, task=self.task, settings=self.settings)
        if resumes and self.place is not None:
            trainer.resume(self.place)
            begun = trainer.resumed.get("warmup_steps")
            if self.warmup_steps is None and is_whole(begun, 0, self.steps):  # what nobody asks for stays as it was
                trainer.settings = replace(trainer.settings, warmup_steps=begun)
            if trainer.num_steps >= self.steps:
                raise TrainingError(
                    f"The checkpoint in {visible(self.folder)} already has {counted(trainer.num_steps, 'step')}, and "
                    f"steps ({self.steps:,}) counts those too. Ask for more than {trainer.num_steps:,}."
                )
        trainer.reads = {
            "data": Path(self.data).name or self.told(model), "recipe": str(self.recipe(model)), "dtype": model.dtype
        }  # fmt: skip
        return trainer

    def changed(self, trainer: Trainer, rows: Numbered) -> dict[str, tuple[Any, Any]]:
        """What the run that a trainer goes on from had otherwise, as far as its checkpoint tells: {field: (then, now)}.

        A warm-up that is over in both is the same.
        """
        now: dict[str, Any] = {
            **trainer.reads, "lr": self.lr, "warmup_steps": trainer.settings.warmup_steps, "dropout": self.dropout,
            "batch_rows": self.batch_rows, "row_tokens": rows.row_tokens,
        }  # fmt: skip
        had = {name: then for name, own in now.items() if _is_alike(then := trainer.resumed.get(name), own)}
        found = {name: (then, now[name]) for name, then in had.items() if now[name] not in (then, None)}
        if max(found.get("warmup_steps", (0,))) <= trainer.num_steps:
            found.pop("warmup_steps", None)
        return found

    def train(self, trainer: Trainer, rows: Numbered, held_out: Numbered, **how: Any) -> TrainRun:
        """Train; `how` are further words of `train`, such as `on_step` and `cancel`. Errors: those of `train`."""
        every = -(-self.steps // PARTS)
        return train(
            trainer, rows, max_steps=self.steps, batch_rows=self.batch_rows, held_out=held_out, evaluate_every=every,
            folder=self.place, save_every=every if self.place else None, **how,
        )  # fmt: skip


def _is_alike(found: object, own: object) -> bool:
    """Whether what a file holds is text, or a number, as ours is."""
    return isinstance(found, str) if isinstance(own, str) else is_real(found)


def weight_bytes(model: Model) -> int:
    """What a model takes on a disk."""
    return model.config.num_params * model.network.dtype.itemsize


def changed_words(changed: Mapping[str, tuple[Any, Any]], spelt: Callable[[str], str]) -> str:
    """A sentence on what `TrainAsked.changed` gives, with each field as it is `spelt` there; none: an empty string."""
    each = (f"{spelt(name)} {visible(str(now))} (was {visible(str(then))})" for name, (then, now) in changed.items())
    return f"Not as in the run that this one goes on from: {', '.join(each)}." * bool(changed)
