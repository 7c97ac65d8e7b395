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


class RelativeErrors(NamedTuple):
    """Errors of the loss, and of the gradient: the norm of the difference by the norm. Infinite if one is not finite.

    The gradient's is over all of its numbers: the norm alone hangs on few, and a wrong gradient may share it.
    """

    loss: float
    gradient: float

    def verdict(self, budget: RelativeErrors) -> str:
        """ "passed" if neither is above its budget."""
        for name, error, most in zip(self._fields, self, budget, strict=True):
            if not error <= most < math.inf:
                return f"{name} off by {plain(error)}, the budget is {plain(most)}"
        return "passed"


def largest(errors: Iterable[float]) -> float:
    """The largest error, 0 of none; infinite where one is not a number, which `max` may pass over."""
    found = list(errors)
    return max(found, default=0.0) if all(map(math.isfinite, found)) else math.inf


class Fp32Reference:
    """The loss and the gradient of a batch by plain PyTorch in fp32, and the error budget of others.

    Errors may be twice those of plain PyTorch in the model's own dtype. The loss is a mean of few numbers, so it may be
    off by one rounding of that dtype, too. The gradient is kept on the CPU.
    """

    def __init__(self, network: Any, examples: Sequence[Example]) -> None:
        trainer = Trainer(mapped(network, lambda tensor: tensor.float()))
        self.loss, grads = trainer.gradients(examples)
        self._grads = {name: grad.cpu() for name, grad in by_checkpoint_names(trainer, grads).items()}
        lost, rounding = RelativeErrors(0.0, 0.0), 0.0
        if network.dtype != torch.float32:
            lost, rounding = self.errors_of(Trainer(network), examples), torch.finfo(network.dtype).eps / 2
        loss, gradient = (error_budget(each, 1.0, torch.float32, 1024) for each in lost)
        self.budget = RelativeErrors(max(loss, rounding), gradient)

    def errors_of(self, trainer: Trainer, examples: Sequence[Example]) -> RelativeErrors:
        """The errors of a trainer of ours."""
        loss, grads = trainer.gradients(examples)
        return self.errors(loss, by_checkpoint_names(trainer, grads))

    def errors(self, loss: float, grads: Grads) -> RelativeErrors:
        """The errors of a loss and a gradient. A part of the gradient that is missing counts as 0."""
        difference, whole = 0.0, 0.0
        for name, exact in self._grads.items():
            given = grads.get(name)
            exact = exact.double() if given is None else exact.to(given.device, torch.float64)
            whole += float(exact.square().sum())
            difference += float((exact if given is None else given - exact).square().sum())
        found = abs(loss / self.loss - 1), math.sqrt(difference / whole) if whole else math.nan
        return RelativeErrors(*(largest([each]) for each in found))


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
