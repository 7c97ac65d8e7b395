"""What a step of training was, and why one could not be made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from eet_lab.errors import TrainingError
from eet_lab.models.decoder import tensors
from eet_lab.parts import Ops
from eet_lab.progress import Cancel, raise_if_cancelled
from eet_lab.training.batch import PLACE, TrainPass
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


class NotFinite(TrainingError):
    """A loss or a gradient that is no finite number."""


def not_finite(
    number: int,
    parameters: Mapping[str, Tensor],
    passes: Sequence[TrainPass],
    losses: Sequence[float],
    loss: float,
    grad_norm: float,
    names: Sequence[str],
    again: Callable[[TrainPass, Callable[[Ops], Ops]], object],
) -> NotFinite:
    """What to tell of a step that cannot be made: which examples, and the first tensor that is not finite.

    `names` are those of the batch's examples. `again` makes a pass forward once more, with its ops changed.
    """
    bad = _first_bad(passes, losses)
    weights = (f"weight {path}" for path, t in parameters.items() if not _is_finite(t))
    outputs = (f"{found} (all weights are finite)" for each in bad for found in _outputs(parameters, each, again))
    made = ("loss (all weights are finite)" for _ in bad)  # before any gradient
    grads = (f"gradient of {path}" for path, t in parameters.items() if t.grad is not None and not _is_finite(t.grad))
    first = next(chain(weights, outputs, made, grads), None)
    where = f"in a pass over {_named(bad or passes, names)}"
    found = f"The first tensor that is not finite is the {first}, {where}." if first else f"It was made {where}."
    return NotFinite(
        f"Step {number} has a loss of {loss} and a gradient norm of {grad_norm}, and was left out: the weights are "
        f"those before it. {found} Use a smaller lr or max_grad_norm, more warmup_steps, or look at these examples."
    )


def not_finite_loss(
    num_steps: int, loss: float, passes: Sequence[TrainPass], losses: Sequence[float], names: Sequence[str]
) -> NotFinite:
    """What to tell of examples that have no finite loss after so many steps.

    `passes` and their `losses` are this rank's, and may all be finite: then another rank's are not.
    """
    made = f"After {counted(num_steps, 'step')}" if num_steps else "Before any step"
    bad = _first_bad(passes, losses)
    where = f" The first pass without a finite one is over {_named(bad, names)}." if bad else ""
    return NotFinite(
        f"{made} these examples have a loss of {loss}.{where} Begin again with a smaller lr if steps made the weights "
        "too large, or look at these examples."
    )


def _first_bad(passes: Sequence[TrainPass], losses: Sequence[float]) -> list[TrainPass]:
    return [each for each, own in zip(passes, losses, strict=False) if not math.isfinite(own)][:1]


def _named(passes: Sequence[TrainPass], names: Sequence[str]) -> str:
    examples = [names[n].removeprefix(PLACE) for n in sorted(n for each in passes for n in each.numbers)]
    return f"{counted(len(examples), 'example')}: {some(examples)}"


def _is_finite(found: Tensor) -> bool:
    return bool(found.isfinite().all())


class _NotFinite(Exception):
    """Says which op's output is not finite."""


def _outputs(parameters: Mapping[str, Tensor], of: TrainPass, again: Callable[..., object]) -> Iterator[str]:
    """The first output of an op that is not finite in a pass, if any, by the op and its weight, or that before it."""
    paths, last = {id(t): path.removesuffix(".weight") for path, t in parameters.items()}, "the start of the pass"

    def watched(name: str, op: Callable[..., Any], *args: Any, **how: Any) -> Any:
        nonlocal last
        own = [t for t in tensors((*args, *how.values())) if id(t) in paths]
        if own:
            last = paths[id(max(own, key=lambda t: t.ndim > 1))]  # rather a matrix than the norm before it
        made = op(*args, **how)
        if not all(map(_is_finite, tensors(made))):
            raise _NotFinite(f"output of {name} {'with' if own else 'after'} {last}")
        return made

    try:
        again(of, lambda ops: ops.wrapped(lambda name, op: partial(watched, name, op)))
    except _NotFinite as found:
        yield str(found)
    except RuntimeError:  # such as that memory is full: what is known already is told
        return


def go_on(cancel: Cancel | None) -> None:
    """Errors: Cancelled."""
    raise_if_cancelled(cancel, "The training")


def until(cancel: Cancel | None, found: Iterable[T]) -> Iterator[T]:
    """The same, one by one. Errors: Cancelled."""
    for each in found:
        go_on(cancel)
        yield each
