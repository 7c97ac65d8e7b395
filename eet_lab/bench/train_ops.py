"""Ops of training with kernels of their own: their cases, and what PyTorch and Liger do for them.

They are backward passes, losses, and the update of the weights. An output is a tuple: the loss, where there is one, and
the gradients, or the new weights.

T tokens, B rows, S tokens a row, C channels, V vocabulary, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from eet_lab.bench.static_decoder import norm
from eet_lab.bench.timing import LeftOut, capture_stream
from eet_lab.models.decoder import tensors
from eet_lab.naming import Form
from eet_lab.ops.cases import Case
from eet_lab.ops.shapes import NamedShape, Normal, copied
from eet_lab.ops.types import Empty, Norm
from eet_lab.parts.losses import cross_entropy

Inputs = tuple[Any, ...]
Forward = Callable[..., Tensor]
"""What is differentiated; it takes the inputs without the gradient of its output."""


class Prepared(NamedTuple):
    """`call` is what is timed; `read` gives its output the rows of the reference's, without pads."""

    call: Callable[[], Any]
    read: Callable[[Any], Tensor | tuple[Tensor, ...]] = lambda out: out


@dataclass(frozen=True)
class TrainCase(Case):
    """A case whose reference is a forward pass in plain PyTorch, differentiated, or an update."""

    formula: Callable[..., Any] = torch.zeros_like
    is_captured: bool = False
    """Whether it is timed in a CUDA graph: some losses wait for the device, and others take as long as the host."""

    @property
    def reference(self) -> Callable[..., Any]:
        """Its output for inputs."""
        return self.formula

    def call(self, op: Callable[..., Any], inputs: Inputs, empty: Empty) -> Any:
        """The output for these inputs; PyTorch chooses the memory."""
        return op(*inputs)


def trained(inputs: Inputs) -> tuple[Inputs, list[Tensor]]:
    """The inputs in memory of their own, and those of them that gradients are taken of: real numbers."""
    own = copied(inputs)
    leaves = [tensor.requires_grad_() for tensor in tensors(own) if tensor.is_floating_point()]
    return own, leaves


def gradients(forward: Forward, *inputs: Any) -> tuple[Tensor, ...]:
    """The gradients of an output whose own gradient is the last input."""
    *given, outer = inputs
    own, leaves = trained(tuple(given))
    return torch.autograd.grad(forward(*own), leaves, outer)


def loss_and_gradients(forward: Forward, own: Inputs, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """The loss of inputs, and its gradients, as `trained` gives both."""
    loss = forward(*own)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@dataclass(frozen=True)
class NormGradShape(NamedShape):
    """The backward pass of a norm over T rows of C channels; without a bias it is an RMS norm."""

    form: ClassVar[Form] = Form("t<T tokens>/c<C channels>[/rms]")

    T: int
    C: int
    rms: bool = False

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> Inputs:
        """Rows, the norm, and the gradient of its output."""
        normal = Normal(device, dtype, seed)
        weights = Norm(normal(self.C) + 1, None if self.rms else normal(self.C), 1e-5)
        return normal(self.T, self.C) + 1, weights, normal(self.T, self.C)

    def read_bytes(self, itemsize: int) -> int:
        """Rows and two gradients of theirs."""
        return itemsize * 3 * self.T * self.C


@dataclass(frozen=True)
class CrossEntropyShape(NamedShape):
    """The loss of T rows of logits, forward and backward."""

    form: ClassVar[Form] = Form("t<T tokens>/v<V vocabulary>")

    T: int
    V: int

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> Inputs:
        """Logits and labels."""
        normal = Normal(device, dtype, seed)
        logits = normal(self.T, self.V, scale=3)
        return logits, torch.randint(self.V, (self.T,), generator=normal.source).to(device)

    def read_bytes(self, itemsize: int) -> int:
        """Logits for the loss, and again for their gradient, which is written."""
        return itemsize * 3 * self.T * self.V


@dataclass(frozen=True)
class LinearCrossEntropyShape(NamedShape):
    """The loss of T hidden states of C channels through a head of V words, forward and backward."""

    form: ClassVar[Form] = Form("t<T tokens>/c<C channels>/v<V vocabulary>")

    T: int
    C: int
    V: int

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> Inputs:
        """States, the head's weight, and labels."""
        normal = Normal(device, dtype, seed)
        states, weight = normal(self.T, self.C), normal(self.V, self.C, scale=self.C**-0.5)
        return states, weight, torch.randint(self.V, (self.T,), generator=normal.source).to(device)

    def read_bytes(self, itemsize: int) -> int:
        """States, the weight, and the gradients of both; no logits."""
        return itemsize * 2 * (self.T + self.V) * self.C

    def num_flops(self) -> float:
        """Three products."""
        return 6.0 * self.T * self.V * self.C


@dataclass(frozen=True)
class AttentionGradShape(NamedShape):
    """The backward pass of causal attention over B rows of S tokens."""

    form: ClassVar[Form] = Form("b<B rows>/s<S tokens a row>/h<H heads>/d<D head dim>")

    B: int
    S: int
    H: int
    D: int

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> Inputs:
        """Queries, keys and values [B,S,3,H,D], and the gradient of the output [B,S,H,D]."""
        normal = Normal(device, dtype, seed)
        return normal(self.B, self.S, 3, self.H, self.D), normal(self.B, self.S, self.H, self.D)

    def read_bytes(self, itemsize: int) -> int:
        """Queries, keys, values, the output, and the gradients of them all."""
        return itemsize * 8 * self.B * self.S * self.H * self.D

    def num_flops(self) -> float:
        """Four products over the scores that are seen; those that are computed again do not count."""
        return 8.0 * self.H * self.D * self.B * (self.S * (self.S + 1) // 2)


BETAS, EPS, DECAY, LR = (0.9, 0.999), 1e-8, 0.01, 1e-3
"""AdamW's constants, as PyTorch's are."""
MILLION = 10**6
ADAMW_BYTES = 28


@dataclass(frozen=True)
class AdamWShape(NamedShape):
    """The update of so many millions of weights, a million in each tensor: GPT-2 has 124, in 148 tensors."""

    form: ClassVar[Form] = Form("n<millions millions of weights>M")

    millions: int

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> Inputs:
        """Weights, and their gradients."""
        normal = Normal(device, dtype, seed)
        return tuple(tuple(normal(MILLION // 1000, 1000) for _ in range(self.millions)) for _ in range(2))

    def read_bytes(self, itemsize: int) -> int:
        """A fp32 weight and both moments in and out, and a gradient; of 16 bits, gradient and weight take as much."""
        return ADAMW_BYTES * self.millions * MILLION

    def held_bytes(self, itemsize: int) -> int:
        """Weights, gradients, moments and a copy in fp32."""
        return (2 * itemsize + 12) * self.millions * MILLION


def plain_linear_cross_entropy(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of the logits that a head makes, in fp32 at least."""
    return cross_entropy(F.linear(states, weight), labels)


def plain_attention(qkv: Tensor) -> Tensor:
    """SDPA, as PyTorch chooses its kernel."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def updated(weights: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The weights after PyTorch's first update."""
    own, _ = trained(weights)
    for weight, grad in zip(own, grads, strict=True):
        weight.grad = grad
    torch.optim.AdamW(own, LR, BETAS, EPS, DECAY, foreach=False).step()
    return tuple(weight.detach() for weight in own)


TRAIN_CASES = (
    TrainCase(
        "norm_backward", "norm_backward", (), tuple(NormGradShape(8192, C) for C in (512, 1024, 4096)),
        formula=partial(gradients, norm), is_captured=True,
    ),
    TrainCase(
        "cross_entropy", "cross_entropy", (), (CrossEntropyShape(8192, 50257),),
        formula=lambda *inputs: loss_and_gradients(cross_entropy, *trained(inputs)),
    ),
    TrainCase(
        "linear_cross_entropy", "linear_cross_entropy", (), (LinearCrossEntropyShape(8192, 768, 50257),),
        formula=lambda *inputs: loss_and_gradients(plain_linear_cross_entropy, *trained(inputs)),
    ),
    TrainCase(
        "attention_backward", "attention_backward", (),
        (AttentionGradShape(8, 1024, 12, 64), AttentionGradShape(32, 128, 12, 64), AttentionGradShape(128, 50, 12, 64)),
        formula=partial(gradients, plain_attention),
    ),
    TrainCase("adamw", "adamw", (), (AdamWShape(124),), formula=updated),
)  # fmt: skip
"""What is timed of training, at the sizes of GPT-2 and of wider norms."""


LOSSES = (CrossEntropyShape, LinearCrossEntropyShape)


def differentiated(forwards: Mapping[type, Forward], shape: Any, inputs: Inputs) -> Prepared:
    """The gradients by what is the forward pass of such a shape; a loss is timed with them, all else without."""
    forward = forwards[type(shape)]
    if isinstance(shape, LOSSES):
        return Prepared(partial(loss_and_gradients, forward, *trained(inputs)))
    *given, outer = inputs
    own, leaves = trained(tuple(given))
    out = _forward(forward, own, outer.device)
    return Prepared(lambda: torch.autograd.grad(out, leaves, outer, retain_graph=True))


def _forward(forward: Forward, own: Inputs, device: torch.device) -> Tensor:
    """A forward pass whose backward pass can be captured."""
    if device.type != "cuda":
        return forward(*own)
    side, stream = capture_stream("cuda"), torch.cuda.current_stream()
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        out = forward(*own)
    stream.wait_stream(side)
    return out


EAGER: dict[type, Forward] = {
    NormGradShape: norm,
    CrossEntropyShape: cross_entropy,
    LinearCrossEntropyShape: plain_linear_cross_entropy,
    AttentionGradShape: plain_attention,
}


def eager(shape: Any, inputs: Inputs) -> Prepared:
    """PyTorch's functions, differentiated, or its update of all tensors together."""
    if isinstance(shape, AdamWShape):
        return torch_update("foreach", shape, inputs)
    return differentiated(EAGER, shape, inputs)


def compiled(shape: Any, inputs: Inputs) -> Prepared:
    """The same compiled for these sizes, forward and backward."""
    run = torch.compile(EAGER[type(shape)], dynamic=False)
    with torch._functorch.config.patch(donated_buffer=False):  # else a backward pass can run only once
        prepared = differentiated({type(shape): run}, shape, inputs)
        prepared.call()
    return prepared


def sdpa_backward(backend: SDPBackend, shape: AttentionGradShape, inputs: Inputs) -> Prepared:
    """SDPA by one of its kernels; in a backward pass it is that of the forward pass."""
    with sdpa_kernel(backend):
        return differentiated(EAGER, shape, inputs)


def chunked(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """PyTorch's own, in chunks as it chooses them."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(states, weight, labels, reduction="sum", options=options)


def _liger_norm(x: Tensor, weights: Norm) -> Tensor:
    if weights.bias is None:
        raise LeftOut("only its layer norm is timed")
    apply = import_module("liger_kernel.ops").LigerLayerNormFunction.apply
    return apply(x, weights.weight, weights.bias, weights.eps)


def _liger_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    loss = import_module("liger_kernel.transformers").LigerCrossEntropyLoss(reduction="sum")
    return loss(logits, labels)


def _liger_linear_cross_entropy(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    loss = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return loss(weight, states, labels)


LIGER: dict[type, Forward] = {
    NormGradShape: _liger_norm,
    CrossEntropyShape: _liger_cross_entropy,
    LinearCrossEntropyShape: _liger_linear_cross_entropy,
}


def torch_update(how: str, shape: Any, inputs: Inputs) -> Prepared:
    """PyTorch's, over weights and gradients in fp32, as autocast keeps them."""
    own = with_gradients(inputs, torch.float32)
    options = {how: True, "capturable": own[0].is_cuda}
    return updates(torch.optim.AdamW(own, LR, BETAS, EPS, DECAY, **options), own)


def with_gradients(inputs: Inputs, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The weights, whose gradients lie with them."""
    weights, grads = copied(inputs, dtype)
    for weight, grad in zip(weights, grads, strict=True):
        weight.requires_grad_().grad = grad
    return weights


def updates(optimizer: Any, weights: tuple[Tensor, ...]) -> Prepared:
    def call() -> tuple[Tensor, ...]:
        optimizer.step()
        return tuple(weight.detach() for weight in weights)

    return Prepared(call)
