"""What can stand in for a training op: PyTorch plain and compiled, its fused functions, Liger's kernels, and ours.

Ours are the pieces of the recipe "all", where its techniques put them: what a technique brings is measured as soon as
it is registered, and what none has brought is plain PyTorch.

T tokens, B rows, S tokens a row, C channels, V vocabulary, H heads, D head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from eet_lab.bench.op_provider import Inputs, OpProvider, Prepared
from eet_lab.bench.rows import OURS
from eet_lab.bench.static_decoder import norm
from eet_lab.bench.timing import LeftOut, capture_stream
from eet_lab.bench.train_cases import (
    BETAS,
    DECAY,
    EPS,
    LR,
    TRAIN_CASES,
    AdamWShape,
    AttentionGradShape,
    CrossEntropyShape,
    Forward,
    LinearCrossEntropyShape,
    NormGradShape,
    plain_attention,
    plain_linear_cross_entropy,
    trained,
)
from eet_lab.models.config import PRESETS
from eet_lab.ops import native, reference
from eet_lab.ops.shapes import copied
from eet_lab.ops.types import Linear, Norm, Spec, autograd
from eet_lab.parts import Parts
from eet_lab.parts.losses import Head, cross_entropy
from eet_lab.parts.passes import Batching, Text
from eet_lab.parts.staging import Staging, sent
from eet_lab.texts import as_recipe

LOSSES = (CrossEntropyShape, LinearCrossEntropyShape)


def differentiated(forwards: Mapping[type, Forward], shape: Any, inputs: Inputs) -> Prepared:
    """The gradients by what is the forward pass of such a shape; a loss is timed with them, all else without."""
    forward = forwards[type(shape)]
    if isinstance(shape, LOSSES):
        own, leaves = trained(inputs)

        def call() -> tuple[Tensor, ...]:
            loss = forward(*own)
            return loss.detach(), *torch.autograd.grad(loss, leaves)

        return Prepared(call)
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


def sdpa(backend: SDPBackend, shape: AttentionGradShape, inputs: Inputs) -> Prepared:
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


@cache
def _parts(device: str) -> Parts:
    """Those of everything that is there for training, with the sources of its kernels built."""
    parts = as_recipe("all", device, PRESETS["gpt2"].in_training).parts
    if kernels := parts.train_ops.kernels:
        native.prepare(kernels)
    return parts


def piece(op: Callable, name: str) -> Callable:
    """What an op is composed of under that keyword, or the reference of that name."""
    while isinstance(op, partial):  # whose signature is that of what it wraps
        if name in op.keywords:
            return op.keywords[name]
        op = op.func
    bound = inspect.signature(op).parameters.get(name)
    return getattr(reference, name) if bound is None else bound.default


def ours(shape: Any, inputs: Inputs) -> Prepared:
    """The parts' norm, loss or attention, differentiated, or their optimizer's update."""
    if isinstance(shape, AdamWShape):
        return our_update(inputs)
    parts = _parts(inputs[0].device.type)
    forwards: dict[type, Forward] = {
        NormGradShape: partial(piece(parts.train_ops.norm_linear, "norm"), empty=autograd),
        CrossEntropyShape: piece(parts.loss, "cross_entropy"),
        LinearCrossEntropyShape: partial(_our_linear_cross_entropy, parts),
        AttentionGradShape: partial(_our_attention, parts),
    }
    return differentiated(forwards, shape, inputs)


def _our_linear_cross_entropy(parts: Parts, states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    layer = Linear(weight, None)
    head = Head(lambda some, linear=reference.linear: linear(some, layer, empty=autograd), (weight,))
    return parts.loss(states, labels, head)


def _our_attention(parts: Parts, qkv: Tensor) -> Tensor:
    """Attention as a trainer's passes have it: the rows' tokens as the parts lay them out."""
    B, S, _, H, D = qkv.shape
    groups = [*parts.texts([Text([0] * S, None, (0,))] * B, Batching(B * S))]
    ops, outs = parts.train_ops.differentiable(None), []
    for group, some in zip(groups, qkv.split([len(group.texts) for group in groups]), strict=True):
        batch = sent(group.laid_out(), Staging(qkv.device)).batch
        attend = parts.attend(ops, batch, None, empty=autograd, window=None)
        outs.append(attend(0, some.reshape(-1, 3 * H * D), Spec(H, H, D)))
    return torch.cat(outs).view(B, S, H, D)


def our_update(inputs: Inputs) -> Prepared:
    """The parts' optimizer; 16-bit weights have a copy in fp32."""
    own = _with_gradients(inputs)
    groups = [{"params": list(own), "weight_decay": DECAY}]
    optimizer = _parts(own[0].device.type).optimizer(groups, "adamw", seed=0, lr=LR, betas=BETAS, eps=EPS)
    return _updates(optimizer, own)


def torch_update(how: str, shape: Any, inputs: Inputs) -> Prepared:
    """PyTorch's, over weights and gradients in fp32, as autocast keeps them."""
    own = _with_gradients(inputs, torch.float32)
    options = {how: True, "capturable": own[0].is_cuda}
    return _updates(torch.optim.AdamW(own, LR, BETAS, EPS, DECAY, **options), own)


def _with_gradients(inputs: Inputs, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The weights, whose gradients lie with them."""
    weights, grads = copied(inputs, dtype)
    for weight, grad in zip(weights, grads, strict=True):
        weight.requires_grad_().grad = grad
    return weights


def _updates(optimizer: Any, weights: tuple[Tensor, ...]) -> Prepared:
    def call() -> tuple[Tensor, ...]:
        optimizer.step()
        return tuple(weight.detach() for weight in weights)

    return Prepared(call)


def _on_gpu(what: str, device: str) -> str | None:
    return None if device == "cuda" else f"{what} needs an NVIDIA GPU"


def _liger_unavailable(device: str) -> str | None:
    if device != "cuda":
        return _on_gpu("Liger", device)
    there = find_spec("liger_kernel") and find_spec("triton")
    return None if there else "Liger is not installed: pip install liger-kernel"


def _chunked_unavailable(device: str) -> str | None:
    if hasattr(F, "linear_cross_entropy"):
        return None
    return f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy"


ALL = tuple(case.op for case in TRAIN_CASES)
GRADIENTS = tuple(op for op in ALL if op != "adamw")
LINEAR, LOSS = "linear_cross_entropy", "cross_entropy"
CHUNKED: dict[type, Forward] = {LinearCrossEntropyShape: chunked}
CUDNN = partial(sdpa, SDPBackend.CUDNN_ATTENTION)
TRAINING = (
    OpProvider(OURS, ALL, ours),
    OpProvider("torch-eager", ALL, eager),
    OpProvider("torch-compile", GRADIENTS, compiled, partial(_on_gpu, "PyTorch's compiled code")),
    OpProvider("torch-fused", ("adamw",), partial(torch_update, "fused")),
    OpProvider("torch-linear-cross-entropy", (LINEAR,), partial(differentiated, CHUNKED), _chunked_unavailable),
    OpProvider("torch-cudnn-attention", ("attention_backward",), CUDNN, partial(_on_gpu, "cuDNN's kernel")),
    OpProvider("liger", ("norm_backward", LOSS, LINEAR), partial(differentiated, LIGER), _liger_unavailable),
)
