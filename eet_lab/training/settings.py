"""What a training run is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from eet_lab.errors import TrainingError, did_you_mean
from eet_lab.parts.optimizers import PLAIN
from eet_lab.scheduling.whole import MOST, MOST_SEED, check_choice, check_number, check_whole
from eet_lab.training.loss_scale import LEAST, LossScale
from eet_lab.words import told


@dataclass(frozen=True)
class TrainSettings:
    """Optimizer, schedule and noise. Names are those of PyTorch's optimizers and of transformers' TrainingArguments.

    `optimizer` is "adamw", which reads `betas` and `eps`, or "sgd", which reads `momentum` and `nesterov`.
    The learning rate rises to `lr` over `warmup_steps`, and then follows `lr_schedule` to 0 at `max_steps`, where a
    trainer ends ("constant" stays, and goes on). Weights decay by `weight_decay`, but for biases and norms. Gradients
    whose norm is above `max_grad_norm` are scaled down to it (None: never). `batch_tokens` is the most tokens of one
    pass, pads among them: larger batches take several passes, whose gradients add up to those of one; a longer text is
    read alone. `dropout` is the share of hidden states that is dropped, `attention_dropout` that of attention's
    weights; the head reads its hidden states without dropout. Where weights are in float16, the loss scale begins at
    `init_scale`, doubles after `growth_interval` steps in a row without an overflow, and halves at each overflow.
    Errors: TrainingError.
    """

    optimizer: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    warmup_steps: int = 0
    lr_schedule: str = "constant"
    max_steps: int | None = None
    label_smoothing: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    batch_tokens: int = 32_768
    init_scale: float = 65_536.0
    growth_interval: int = 2_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(TrainingError, "optimizer", self.optimizer, OPTIMIZERS)
        for name in OPTIMIZERS:
            PLAIN[name].check({field: getattr(self, field) for field in (*OPTIMIZERS[name], "weight_decay")})
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("label_smoothing", "dropout", "attention_dropout"):
            check_number(TrainingError, name, getattr(self, name), 0.0, 1.0, "from 0 to less than 1")
        if self.max_grad_norm is not None:
            check_number(TrainingError, "max_grad_norm", self.max_grad_norm, 1e-12, math.inf, "above 0, or None")
        check_choice(TrainingError, "lr_schedule", self.lr_schedule, SCHEDULES)
        if self.max_steps is not None:
            check_whole(TrainingError, "max_steps", self.max_steps, 1, MOST)
        elif self.lr_schedule != "constant":
            raise TrainingError(f"lr_schedule is {self.lr_schedule!r}, which ends at 0: say at which step, max_steps.")
        limit = "" if self.max_steps is None else " (max_steps)"
        check_whole(TrainingError, "warmup_steps", self.warmup_steps, 0, self.max_steps or MOST, limit)
        check_whole(TrainingError, "batch_tokens", self.batch_tokens, 1, MOST)
        check_number(TrainingError, "init_scale", self.init_scale, LEAST, math.inf, f"of {LEAST} or more")
        check_whole(TrainingError, "growth_interval", self.growth_interval, 1, MOST)
        check_whole(TrainingError, "seed", self.seed, 0, MOST_SEED)

    def lr_at(self, step: int) -> float:
        """The learning rate of a step; steps count from 0. TrainingError for one at which the schedule has ended."""
        if self.max_steps is not None and self.lr_schedule != "constant" and step >= self.max_steps:
            raise TrainingError(
                f"Step {step:,} cannot be made (steps count from 0): lr_schedule={self.lr_schedule!r} ends at "
                f"max_steps={self.max_steps:,}, where the learning rate is 0. To train longer, save, and resume in a "
                "trainer with a larger max_steps."
            )
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.max_steps is None:
            return self.lr
        rest = max(self.max_steps - self.warmup_steps, 1)
        return self.lr * SCHEDULES[self.lr_schedule](min((step - self.warmup_steps) / rest, 1.0))

    def loss_scale(self, dtype: torch.dtype) -> LossScale:
        """What the loss of a model in this type is multiplied by before its backward pass."""
        return LossScale(self.init_scale, self.growth_interval) if dtype == torch.float16 else LossScale()

    def clipping(self, norm: Tensor) -> Tensor:
        """What gradients of this norm are multiplied by: 1, or less as in torch.nn.utils.clip_grad_norm_."""
        return (
            torch.ones_like(norm) if self.max_grad_norm is None else (self.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        )

    @property
    def of_optimizer(self) -> dict[str, Any]:
        """What the optimizer reads, but for the decay, which each group of weights has of its own."""
        return {name: getattr(self, name) for name in OPTIMIZERS[self.optimizer]}

    @classmethod
    def of(cls, settings: TrainSettings | None, changes: dict) -> TrainSettings:
        """The settings with some of them changed. Errors: TrainingError for a name that is none, or other settings."""
        if settings is not None and not isinstance(settings, cls):
            raise TrainingError(
                f"settings is {told(settings)}, but it must be TrainSettings(...): give these as words."
            )
        names = [f.name for f in fields(cls)]
        if unknown := next((name for name in changes if name not in names), None):
            hint = OTHER_NAMES.get(unknown) or did_you_mean(unknown, names)
            raise TrainingError(f"There is no setting {unknown!r}.{hint}")
        return replace(settings or cls(), **changes)


OPTIMIZERS = {"adamw": ("lr", "betas", "eps"), "sgd": ("lr", "momentum", "nesterov")}
"""The settings that each optimizer reads."""
OTHER_NAMES = {
    "learning_rate": " Here it is 'lr'.",
    "adam_epsilon": " Here it is 'eps'.",
    "gradient_accumulation_steps": (
        " Gradients add up by themselves, where a batch is over 'batch_tokens': give a step all its examples."
    ),
}
"""What transformers calls otherwise, where no name of ours is near."""
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}
"""The share of the learning rate, by the share of the steps after the warm-up that are done."""
