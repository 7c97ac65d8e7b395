"""Loss scaling: what keeps small gradients of float16 from becoming zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eet_lab.errors import TrainingError

GROWTH, BACKOFF = 2.0, 0.5
LEAST = 2.0**-13
"""Gradients that overflow at this scale do so for another reason; fairseq stops there, too."""


@dataclass
class LossScale:
    """What a loss is multiplied by before its backward pass, by the rule of torch.amp.GradScaler.

    The scale doubles after `growth_interval` steps in a row whose gradients were finite, and halves after each whose
    were not, which is left out. `growth_interval` None: it stays, as for types that have fp32's range.
    """

    scale: float = 1.0
    growth_interval: int | None = None
    num_finite: int = 0

    def update(self, is_finite: bool) -> bool:
        """Count a step, and whether its gradients were finite; False where they ought to have been."""
        if self.growth_interval is None:
            return is_finite
        if not is_finite:
            self.scale, self.num_finite = self.scale * BACKOFF, 0
            return self.scale >= LEAST
        self.num_finite += 1
        if self.num_finite == self.growth_interval:
            self.scale, self.num_finite = self.scale * GROWTH, 0
        return True

    def state_dict(self) -> dict[str, float] | None:
        """What a checkpoint keeps: None where the scale stays."""
        return None if self.growth_interval is None else {"scale": self.scale, "num_finite": self.num_finite}

    def load_state_dict(self, state: dict[str, float] | None) -> None:
        """Take over such a state; None, as of another type of weights, leaves this one. Errors: TrainingError."""
        if state is None or self.growth_interval is None:
            return
        try:
            scale, num_finite = float(state["scale"]), int(state["num_finite"])
            if not 0 < scale < math.inf or num_finite < 0:
                raise ValueError("no such scale comes of doubling and halving")
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
            raise TrainingError(f"The checkpoint's loss scale cannot be read: {state!r:.80}.") from None
        self.scale, self.num_finite = scale, num_finite
