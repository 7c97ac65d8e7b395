"""What a step of training was, and why one could not be made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from eet_lab.errors import TrainingError
from eet_lab.progress import Cancel, raise_if_cancelled
from eet_lab.training.batch import TrainPass
from eet_lab.words import counted, some

T = TypeVar("T")


class Work(NamedTuple):
    """What a step's arithmetic is counted from; pads are left out.

    `sizes` are the tokens of each text and of its source; `head_size` the numbers in the matrices of the head, which
    each of the labels reads.
    """

    sizes: tuple[tuple[int, int], ...]
    num_labels: int
    head_size: int


@dataclass(frozen=True)
class Step:
    """One step of the optimizer. `loss` is the mean over all labels of the batch, and `grad_norm` is that before
    gradients were clipped; `num_tokens` are those of the texts, `computed_tokens` the same with pads. A step whose
    gradients overflowed in float16, as scaled by `loss_scale`, has updated nothing: `is_skipped`. `work` is what had to
    be computed.
    """

    number: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    computed_tokens: int
    num_passes: int
    ms: float
    loss_scale: float = 1.0
    is_skipped: bool = False
    work: Work | None = None


def not_finite(
    number: int,
    parameters: Mapping[str, Tensor],
    passes: Sequence[TrainPass],
    losses: Sequence[float],
    loss: float,
    grad_norm: float,
) -> TrainingError:
    """What to tell of a step that cannot be made: which examples, and the first tensor that is not finite."""
    bad = [each for each, own in zip(passes, losses, strict=False) if not math.isfinite(own)][:1]
    examples = [str(number + 1) for number in sorted(n for each in bad or passes for n in each.numbers)]
    named = ((f"weight {path}", t) for path, t in parameters.items())
    grads = ((f"gradient of {path}", t.grad) for path, t in parameters.items() if t.grad is not None)
    made = [("loss, which finite weights gave", torch.tensor(each)) for each in losses]  # before any gradient
    first = next((name for name, t in (*named, *made, *grads) if not bool(t.isfinite().all())), "none of the weights")
    return TrainingError(
        f"Step {number} has a loss of {loss} and a gradient norm of {grad_norm}, and was left out: the weights are "
        f"those before it. The first tensor that is not finite is the {first}, in a pass over "
        f"{counted(len(examples), 'example')}, {some(examples)}. Use a smaller lr or max_grad_norm, more warmup_steps, "
        "or look at these examples."
    )


def go_on(cancel: Cancel | None) -> None:
    """Errors: Cancelled."""
    raise_if_cancelled(cancel, "The training")


def until(cancel: Cancel | None, found: Iterable[T]) -> Iterator[T]:
    """The same, one by one. Errors: Cancelled."""
    for each in found:
        go_on(cancel)
        yield each
