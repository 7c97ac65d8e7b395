"""train: a trainer through many steps, with held-out data beside the loss, checkpoints, and Stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from eet_lab.errors import Cancelled, TrainingError
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.whole import MOST, check_whole, is_whole
from eet_lab.training import checkpoint
from eet_lab.training.data import Batches, check_batches
from eet_lab.training.step import NotFinite, Step
from eet_lab.training.tasks import Example
from eet_lab.training.trainer import Trainer
from eet_lab.words import told

SCANNED = 100
"""Progress is told each time that so many batches were read for the memory that they need."""


@dataclass(frozen=True)
class Evaluation:
    """The mean loss of held-out examples after so many steps, counted from the first one of the training."""

    num_steps: int
    loss: float


@dataclass(frozen=True)
class TrainRun:
    """What a run did: its steps, and the losses of held-out rows. `was_stopped`: it ended before `max_steps`."""

    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    was_stopped: bool

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each step."""
        return tuple(step.loss for step in self.steps)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the texts a second, in the step in the middle; None without a step."""
        return median(step.num_tokens / step.ms * 1e3 for step in self.steps) if self.steps else None


def train(
    trainer: Trainer,
    rows: Batches,
    *,
    max_steps: int,
    batch_rows: int,
    held_out: Iterable[Example] | None = None,
    evaluate_every: int | None = None,
    folder: str | Path | None = None,
    save_every: int | None = None,
    reserve: bool = False,
    on_step: Callable[[Step], object] | None = None,
    on_evaluation: Callable[[Evaluation], object] | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> TrainRun:
    """Train until the trainer has taken `max_steps`, those before this run among them, on `batch_rows` rows each.

    Which rows a step reads depends on its number, so that a trainer that was saved and resumed goes on as if it had
    never stopped. The loss of `held_out` is told before the first step, every `evaluate_every` steps, and at the end;
    a checkpoint is written to `folder` every `save_every` steps, and at the end. With `reserve` all memory is taken
    before the first step, by `Trainer.reserve` over all batches, which are read twice then. `cancel` ends the run
    between two passes: what was trained until then is saved, and returned. Errors: TrainingError before any work; those
    of `Trainer.step`, after which the last checkpoint is as it was: where a loss is not finite, the last one from whose
    weights a step had a finite one.
    """
    if not isinstance(trainer, Trainer):
        raise TrainingError(f"trainer is {told(trainer)}, but it must be a Trainer: give Trainer(model.network).")
    check_batches(rows)
    if held_out is not None and not isinstance(held_out, Iterable):
        raise TrainingError(f"held_out is {told(held_out)}, but it must be examples, such as Rows.split keeps apart.")
    check_whole(TrainingError, "max_steps", max_steps, trainer.num_steps, MOST)
    last = trainer.settings.max_steps
    if last is not None and trainer.settings.lr_schedule != "constant" and max_steps > last:
        raise TrainingError(
            f"max_steps is {max_steps:,}, but the trainer's learning rate ends at 0 after max_steps={last:,} of its "
            "settings. Give both the same."
        )
    check_whole(TrainingError, "batch_rows", batch_rows, 1, MOST)
    for name, every, needed, what in (
        ("evaluate_every", evaluate_every, held_out, "held_out"),
        ("save_every", save_every, folder, "folder"),
    ):
        if every is not None:
            check_whole(TrainingError, name, every, 1, MOST)
            if needed is None:
                raise TrainingError(f"{name} is {every}, but there is no {what}. Give it, or leave {name} out.")
    if isinstance(held_out, Iterator):  # it can be read once
        held_out = [*held_out]
    asked = {
        "num_steps": trainer.num_steps, "max_steps": max_steps, "batch_rows": batch_rows, "reserve": reserve,
        "evaluate_every": evaluate_every, "save_every": save_every, "has_folder": folder is not None,
        "rows": _number(rows), "held_out": _number(held_out), "seed_of_rows": getattr(rows, "seed", None),
    }  # fmt: skip
    trainer.ranks.agree("their training", trainer.model.device, asked)
    if folder is not None:
        trainer.ranks.by_first(lambda: checkpoint.check(folder))
    row_tokens = getattr(rows, "row_tokens", None)
    trainer.reads |= {"batch_rows": batch_rows, "row_tokens": row_tokens if is_whole(row_tokens) else None}
    steps, evaluations = list[Step](), list[Evaluation]()
    has_previous = False  # no step has told yet whether the newest checkpoint's weights give a finite loss

    def evaluate() -> None:
        if held_out is not None:
            loss = trainer.evaluate([*held_out], cancel)
            evaluations.append(Evaluation(trainer.num_steps, loss))
            if on_evaluation is not None:
                on_evaluation(evaluations[-1])

    def save() -> None:
        nonlocal has_previous
        if folder is not None:
            trainer.ranks.by_first(lambda: checkpoint.keep(folder))
            trainer.save(folder)
            has_previous = True

    def end_previous(forget_or_restore: Callable[[str | Path], None]) -> None:
        nonlocal has_previous
        if folder is not None and has_previous:
            trainer.ranks.by_first(lambda: forget_or_restore(folder))
            has_previous = False

    def is_due(every: int | None) -> bool:
        return every is not None and trainer.num_steps % every == 0

    def batches() -> Iterator[Sequence[Example]]:
        return (rows.batch(n, batch_rows) for n in range(trainer.num_steps, max_steps))

    def scanned() -> Iterator[Sequence[Example]]:
        for number, batch in enumerate(batches(), 1):
            if progress is not None and number % SCANNED == 0:
                progress(trainer.num_steps, max_steps, f"reserving memory: {number:,} batches read")
            yield batch

    try:
        if reserve:
            trainer.reserve(scanned(), cancel)
        evaluate()
        for step in trainer.steps(batches(), cancel):
            steps.append(step)
            end_previous(checkpoint.forget)
            if on_step is not None:
                on_step(steps[-1])
            if progress is not None:
                progress(trainer.num_steps, max_steps, f"loss {steps[-1].loss:.3f}")
            is_last = trainer.num_steps == max_steps
            if is_due(evaluate_every) or is_last:
                evaluate()
            if is_due(save_every) or is_last:
                save()
    except Cancelled:
        if steps:
            save()
    except NotFinite:
        end_previous(checkpoint.restore)
        raise
    end_previous(checkpoint.forget)
    return TrainRun(tuple(steps), tuple(evaluations), was_stopped=trainer.num_steps < max_steps)


def _number(examples: object) -> int | None:
    """How many there are; None where they do not tell."""
    return len(examples) if isinstance(examples, Sized) else None
