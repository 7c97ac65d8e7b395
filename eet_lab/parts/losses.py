"""What training minimizes, from hidden states: whole, and in chunks that never write all logits.

N tokens or texts with a label, C channels, V words or classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


class Head(NamedTuple):
    """What makes logits of hidden states, and the weights that it reads."""

    logits: Callable[[Tensor], Tensor]  # [N,C] -> [N,V]
    weights: tuple[Tensor, ...]


def whole(states: Tensor, labels: Tensor, head: Head, smoothing: float = 0.0) -> Tensor:
    """The baseline: the sum of cross entropies in fp32, over logits [N,V] that are kept for the backward pass.

    `smoothing` is the share of a label's probability that all words get, as in PyTorch.
    """
    return cross_entropy(head.logits(states).float(), labels, reduction="sum", label_smoothing=smoothing)


@dataclass(frozen=True)
class Chunked:
    """The same, where logits of `chunk` tokens exist at a time: each chunk's gradient is taken with its loss.

    So no logits are kept, and none are computed twice. Kept are the gradients of the states [N,C] and of the head's
    weights. Source: the fused linear cross entropy of Liger-Kernel (Hsu et al., 2024).
    """

    chunk: int

    def __call__(self, states: Tensor, labels: Tensor, head: Head, smoothing: float = 0.0) -> Tensor:
        if not torch.is_grad_enabled():
            pairs = zip(states.split(self.chunk), labels.split(self.chunk), strict=True)
            return torch.stack([whole(*pair, head, smoothing) for pair in pairs]).sum()
        return _Chunked.apply(states, labels, head.logits, smoothing, self.chunk, *head.weights)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        labels: Tensor,
        logits: Callable[[Tensor], Tensor],
        smoothing: float,
        chunk: int,
        *weights: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        # Sums of many chunks: in 16 bits their last ones would be lost, and sums over a batch may overflow.
        grads = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        of_states, share = torch.empty_like(states), 1 / len(states)
        for begin in range(0, len(states), chunk):
            some = slice(begin, begin + chunk)
            leaf = states[some].detach().requires_grad_()
            with torch.enable_grad():
                loss = cross_entropy(logits(leaf).float(), labels[some], reduction="sum", label_smoothing=smoothing)
                scaled = loss * share
            of_states[some], *found = torch.autograd.grad(scaled, (leaf, *weights))
            total += loss.detach()
            for kept, each in zip(grads, found, strict=True):
                kept += each
        ctx.save_for_backward(of_states, *grads)
        ctx.num, ctx.dtypes = len(states), [weight.dtype for weight in weights]
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        of_states, *grads = ctx.saved_tensors
        scale = outer[0].float() * ctx.num
        of_weights = ((grad * scale).to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True))
        return of_states * scale.to(of_states.dtype), None, None, None, None, *of_weights
