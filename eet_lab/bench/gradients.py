"""The loss and the gradient of a batch, held against those of plain PyTorch in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.models.decoder import mapped
from eet_lab.models.weights import state_of
from eet_lab.ops.cases import error_budget
from eet_lab.training import Example, Trainer
from eet_lab.words import plain

Grads = Mapping[str, Tensor]
"""Gradients by the names of a checkpoint's weights."""


class Off(NamedTuple):
    """How far the loss is off, and how far the gradient is from the exact one, both relative.

    The distance is over all numbers of the gradient: its norm alone hangs on few. Infinite if one is not finite.
    """

    loss: float
    gradient: float

    def verdict(self, most: Off) -> str:
        """ "passed" if neither is above what it may be."""
        for name, off, budget in zip(self._fields, self, most, strict=True):
            if not off <= budget < math.inf:
                return f"{name} off by {plain(off)}, the budget is {plain(budget)}"
        return "passed"


def largest(errors: Iterable[float]) -> float:
    """The largest error, 0 of none; infinite where one is not a number, which `max` may pass over."""
    found = list(errors)
    return max(found, default=0.0) if all(map(math.isfinite, found)) else math.inf


class Exact:
    """What plain PyTorch tells of a batch in fp32, and how far others may be off."""

    def __init__(self, network: Any, examples: Sequence[Example]) -> None:
        """Both may be twice as far off as plain PyTorch is in the model's own type, and the loss by one rounding of it,
        since it is the mean of few numbers. The gradient is kept on the CPU.
        """
        wide = Trainer(mapped(network, lambda tensor: tensor.float()))
        self.loss, grads = wide.gradients(examples)
        self._grads = {name: grad.cpu() for name, grad in by_checkpoint_names(wide, grads).items()}
        low, itself = Off(0.0, 0.0), network.dtype
        if itself != torch.float32:
            low = self.off_of(Trainer(network), examples)
        rounding = 0.0 if itself == torch.float32 else torch.finfo(itself).eps / 2
        loss, gradient = (error_budget(lost, 1.0, torch.float32, 1024) for lost in low)
        self.budget = Off(max(loss, rounding), gradient)

    def off_of(self, trainer: Trainer, examples: Sequence[Example]) -> Off:
        """How far a trainer of ours is off."""
        loss, grads = trainer.gradients(examples)
        return self.off(loss, by_checkpoint_names(trainer, grads))

    def off(self, loss: float, grads: Grads) -> Off:
        """How far a loss and a gradient are off. What is not there of the gradient counts as 0."""
        apart, whole = 0.0, 0.0
        for name, exact in self._grads.items():
            given = grads.get(name)
            exact = exact.double() if given is None else exact.to(given.device, torch.float64)
            whole += float(exact.square().sum())
            apart += float((exact if given is None else given - exact).square().sum())
        errors = abs(loss / self.loss - 1), math.sqrt(apart / whole) if whole else math.nan
        return Off(*(error if math.isfinite(error) else math.inf for error in errors))


def by_checkpoint_names(trainer: Trainer, grads: Grads) -> dict[str, Tensor]:
    """Gradients of a trainer of ours, which it has by the paths of its parameters. What has none gets zeros."""
    of = {id(parameter): grads[path] for path, parameter in trainer.parameters.items() if path in grads}
    return state_of(mapped(trainer.model, lambda tensor: of.get(id(tensor), torch.zeros_like(tensor))))


def checkpoint_names(model: Any, state: Mapping[str, Tensor]) -> dict[str, str]:
    """The names that a checkpoint has for the parameters of a live model of transformers with just these weights.

    Most are the same. Versions differ in some, which are found by the numbers themselves.
    """
    own = dict(model.named_parameters())
    names = {name: name for name, parameter in own.items() if name in state and state[name].shape == parameter.shape}
    others = {name: tensor for name, tensor in state.items() if name not in names}
    return names | dict(_found(own.keys() - names.keys(), own, others))


def _found(wanted: Any, own: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    for name in wanted:
        parameter = own[name]
        for other, tensor in others.items():
            if tensor.shape == parameter.shape and torch.equal(tensor.to(parameter), parameter):
                yield name, other
                break
