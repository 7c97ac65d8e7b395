"""What a training run is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from eet_lab.errors import TrainingError, did_you_mean
from eet_lab.parts.optimizers import check_moments
from eet_lab.scheduling.whole import MOST, check_number, check_whole
from eet_lab.words import told


@dataclass(frozen=True)
class TrainSettings:
    """Optimizer, schedule and noise. Names are those of PyTorch's optimizers and of transformers' TrainingArguments.

    The learning rate rises to `lr` over `warmup_steps`, and then follows `lr_schedule` to 0 at `max_steps` ("constant"
    stays). Weights decay by `weight_decay`, but for biases and norms. Gradients whose norm is above `max_grad_norm` are
    scaled down to it (None: never). `batch_tokens` is the most tokens of one pass, pads among them: larger batches take
    several passes, whose gradients add up to those of one. `dropout` is the share of hidden states that is dropped,
    `attention_dropout` that of attention's weights; classes and words are read from all. Errors: TrainingError.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    warmup_steps: int = 0
    lr_schedule: str = "constant"
    max_steps: int | None = None
    label_smoothing: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    batch_tokens: int = 32_768
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise TrainingError(f"betas is {told(self.betas)}, but it must be two numbers, such as (0.9, 0.999).")
        check_moments(self.lr, self.betas, self.eps, self.weight_decay)
        for name in ("label_smoothing", "dropout", "attention_dropout"):
            check_number(TrainingError, name, getattr(self, name), 0.0, 1.0, "from 0 to less than 1")
        if self.max_grad_norm is not None:
            check_number(TrainingError, "max_grad_norm", self.max_grad_norm, 1e-12, math.inf, "above 0, or None")
        if self.lr_schedule not in SCHEDULES:
            hint = did_you_mean(str(self.lr_schedule), SCHEDULES)
            raise TrainingError(
                f"lr_schedule is {told(self.lr_schedule)}, but it must be one of {', '.join(SCHEDULES)}.{hint}"
            )
        if self.max_steps is not None:
            check_whole(TrainingError, "max_steps", self.max_steps, 1, MOST)
        elif self.lr_schedule != "constant":
            raise TrainingError(f"lr_schedule is {self.lr_schedule!r}, which ends at 0: say at which step, max_steps.")
        check_whole(TrainingError, "warmup_steps", self.warmup_steps, 0, self.max_steps or MOST)
        check_whole(TrainingError, "batch_tokens", self.batch_tokens, 1, MOST)
        check_whole(TrainingError, "seed", self.seed, 0, 2**62 - 1)

    def lr_at(self, step: int) -> float:
        """The learning rate of a step; the first one is 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.max_steps is None:
            return self.lr
        rest = max(self.max_steps - self.warmup_steps, 1)
        return self.lr * SCHEDULES[self.lr_schedule](min((step - self.warmup_steps) / rest, 1.0))

    @classmethod
    def of(cls, settings: TrainSettings | None, changes: dict) -> TrainSettings:
        """The settings with some of them changed. Errors: TrainingError for a name that is none."""
        names = [f.name for f in fields(cls)]
        if unknown := next((name for name in changes if name not in names), None):
            raise TrainingError(f"There is no setting {unknown!r}.{did_you_mean(unknown, names)}")
        kept = {name: getattr(settings, name) for name in names} if settings else {}
        return cls(**(kept | changes))


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}
"""The share of the learning rate, by the share of the steps after the warm-up that are done."""
