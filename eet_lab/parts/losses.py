"""What training minimizes: from logits, whole and in place; from hidden states, in chunks that never write all logits.

N tokens or texts with a label, C channels, V words or classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eet_lab.ops.cuda import train_loss
from eet_lab.parts.products import Summed

IGNORED = -100
"""The label of a token that is not learned from, as in PyTorch and transformers."""
AT_A_TIME = 1 << 24
"""How many logits are widened to fp32 at a time where their gradient is written over them."""


class Head(NamedTuple):
    """What makes logits of hidden states, and the weights that it reads.

    `logits` takes a `linear` that makes its products: the reference's unless said.
    """

    logits: Callable[..., Tensor]  # [N,C] -> [N,V]
    weights: tuple[Tensor, ...]


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The reference: the sum of cross entropies in fp32, but for labels that are `IGNORED`.

    `smoothing` is the share of a label's probability that all words get, as in PyTorch.
    """
    return functional.cross_entropy(
        logits.to(_wide(logits)), labels, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing
    )


@dataclass(frozen=True)
class InPlace:
    """A cross entropy with nothing of the logits' size beside them: the backward pass writes their gradient over them.

    Kept are a few numbers a row. The gradient is scaled in fp32 before it is rounded, so that of a scaled loss in
    float16 does not vanish. What made the logits must not need them for its own gradient; PyTorch raises where it does.
    Source: LightSeq2's criterion (Wang et al., SC 2022); Liger-Kernel (Hsu et al., 2024) for the gradient's place.
    """

    loss: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """Logits, labels and smoothing -> the loss, and what is kept of the rows for their gradient."""
    gradient: Callable[[Tensor, Tensor, Tensor, float, Tensor], None]
    """Logits, over which it is written, labels, what was kept, smoothing, and what the gradient is multiplied by."""
    with_gradient: Callable[[Tensor, Tensor, float], Tensor]
    """Both at once: logits, over which the gradient is written, labels and smoothing -> the loss."""

    def __call__(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        return _InPlace.apply(logits, labels, smoothing, self)


def whole(
    states: Tensor,
    labels: Tensor,
    head: Head,
    smoothing: float = 0.0,
    *,
    cross_entropy: Callable[[Tensor, Tensor, float], Tensor] = cross_entropy,
) -> Tensor:
    """The baseline: logits [N,V] in fp32 that are kept for the backward pass."""
    return cross_entropy(head.logits(states), labels, smoothing)


def _loss(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    ignored, places = _places(labels)
    log_sums = torch.empty(len(logits), dtype=_wide(logits), device=logits.device)
    total = log_sums.new_zeros(())
    for some in _blocks(logits):
        wide = logits[some].to(log_sums.dtype)
        log_sums[some] = wide.logsumexp(-1)
        losses = log_sums[some] - (1 - smoothing) * wide.gather(1, places[some])[:, 0]
        if smoothing:
            losses -= smoothing * wide.mean(-1)
        total += losses.masked_fill_(ignored[some], 0).sum()
    return total, log_sums


def _gradient(logits: Tensor, labels: Tensor, log_sums: Tensor, smoothing: float, outer: Tensor) -> None:
    ignored, places = _places(labels)
    taken = torch.full_like(places, smoothing - 1, dtype=log_sums.dtype)
    for some in _blocks(logits):
        grad = (logits[some].to(log_sums.dtype) - log_sums[some, None]).exp_()
        if smoothing:
            grad -= smoothing / logits.shape[1]
        grad.scatter_add_(1, places[some], taken[some]).mul_(outer)
        logits[some] = grad.masked_fill_(ignored[some, None], 0)


def _with_gradient(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    total, log_sums = _loss(logits, labels, smoothing)
    _gradient(logits, labels, log_sums, smoothing, torch.ones_like(total))
    return total


def _places(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which labels are ignored [N], and where each label is among the words [N,1]."""
    ignored = labels == IGNORED
    return ignored, labels.masked_fill(ignored, 0)[:, None]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Rows that are computed together."""
    rows = max(1, AT_A_TIME // max(logits.shape[1], 1))
    return (slice(begin, begin + rows) for begin in range(0, len(logits), rows))


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float, how: InPlace) -> Tensor:
        total, kept = how.loss(logits, labels, smoothing)
        ctx.save_for_backward(logits, labels, kept)
        ctx.smoothing, ctx.how = smoothing, how
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, kept = ctx.saved_tensors
        found = logits.detach()  # its version counts on, so that whoever still needs the logits is told
        ctx.how.gradient(found, labels, kept, ctx.smoothing, outer[0])
        return found, None, None, None


cross_entropy_in_place = InPlace(_loss, _gradient, _with_gradient)
"""PyTorch's, which goes over the logits a few times."""
fused_cross_entropy = InPlace(
    train_loss.cross_entropy_loss, train_loss.cross_entropy_grad, train_loss.cross_entropy_with_grad
)
"""A kernel's, which reads the logits once, and writes the gradient once."""


@dataclass(frozen=True)
class Chunked:
    """The same, where logits of `chunk` tokens exist at a time: each chunk's gradient is taken with its loss.

    So no logits are kept, and none are computed twice. Kept are the gradients of the states [N,C] and of the head's
    weights. Source: the fused linear cross entropy of Liger-Kernel (Hsu et al., 2024).
    """

    chunk: int

    def __call__(
        self,
        states: Tensor,
        labels: Tensor,
        head: Head,
        smoothing: float = 0.0,
        *,
        cross_entropy: InPlace = cross_entropy_in_place,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            pairs = zip(states.split(self.chunk), labels.split(self.chunk), strict=True)
            return torch.stack([whole(*pair, head, smoothing, cross_entropy=cross_entropy) for pair in pairs]).sum()
        return _Chunked.apply(states, labels, head.logits, smoothing, self.chunk, cross_entropy, *head.weights)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        labels: Tensor,
        logits: Callable[..., Tensor],
        smoothing: float,
        chunk: int,
        how: InPlace,
        *weights: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=_wide(states), device=states.device)
        trained = [weight for weight in weights if weight.requires_grad]
        # Sums of many chunks: in 16 bits their last ones would be lost, and sums over a batch may overflow.
        linear = Summed(trained, total.dtype)
        grads = linear.sums
        of_states = torch.empty_like(states)
        for begin in range(0, len(states), chunk):
            some = slice(begin, begin + chunk)
            leaf = states[some].detach().requires_grad_()
            with torch.enable_grad():
                made = logits(leaf, linear=linear)
            written = made.detach()  # its version counts on, so that whoever still needs the logits is told
            total += how.with_gradient(written, labels[some], smoothing)
            of_states[some], *found = torch.autograd.grad(made, (leaf, *trained), written, allow_unused=True)
            del made, written  # before the next ones
            for kept, each in zip(grads, found, strict=True):
                if each is not None:  # else `linear` has added it
                    kept += each
        ctx.save_for_backward(of_states, *grads)
        ctx.dtypes = [weight.dtype if weight.requires_grad else None for weight in weights]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        of_states, *grads = ctx.saved_tensors
        left = iter(grads)
        of_weights = [None if dtype is None else _scaled(next(left), outer[0], dtype) for dtype in ctx.dtypes]
        return _scaled(of_states, outer[0], of_states.dtype), None, None, None, None, None, *of_weights


def _scaled(grad: Tensor, outer: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplied in 32 bits at least, and rounded once."""
    if grad.dtype != outer.dtype:
        return (grad.to(outer.dtype) * outer).to(dtype)
    return torch.mul(grad, outer, out=torch.empty_like(grad, dtype=dtype))
