"""Updates of flat buffers and the norm of gradients, over csrc/optimizer.cu.

`update` is (lr, scale, step, skip), 0-d on the device: in fp32, and skip a bool. Moments and `master` are in fp32.
`rounding` are `noise` and `number`, what rounding at random is drawn from, beside the step; without `noise` weights are
rounded to the nearest. One launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native
from eet_lab.ops.cuda.launching import DTYPES, REMEDY, at, check, gpu, needs, stream_of

MOST_BLOCKS_EACH = 4  # of a multiprocessor, in a sum over a buffer
READ_EACH = 1 << 14  # numbers that a block has at least


@needs("optimizer")
def adamw(
    weights: Tensor,
    grads: Tensor,
    moments: Sequence[Tensor],
    master: Tensor | None,
    update: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    **rounding: Any,
) -> None:
    """AdamW as PyTorch's fused one: weights, grads [n]; moments are the averages of gradients and of their squares."""
    shared = _shared(weights, grads, moments, master, update, **rounding)
    native.loaded("optimizer").eet_adamw(
        **shared, exp_avg=at(moments[0]), exp_avg_sq=at(moments[1]), beta1=betas[0], beta2=betas[1], eps=eps,
        weight_decay=weight_decay,
    )  # fmt: skip


@needs("optimizer")
def sgd(
    weights: Tensor,
    grads: Tensor,
    moments: Sequence[Tensor],
    master: Tensor | None,
    update: Sequence[Tensor],
    *,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    **rounding: Any,
) -> None:
    """SGD as PyTorch's fused one, without dampening: weights, grads [n]; moments are the momentum, or nothing."""
    shared = _shared(weights, grads, moments, master, update, **rounding)
    native.loaded("optimizer").eet_sgd(
        **shared, momentum_buffer=at(moments[0]) if moments else None, momentum=momentum, weight_decay=weight_decay,
        nesterov=nesterov,
    )  # fmt: skip


@needs("optimizer")
def norm_of(buffers: Sequence[Tensor]) -> Tensor:
    """The norm of all numbers of flat buffers, which is not finite where one of them is not: a launch each, and one."""
    first, most = buffers[0], MOST_BLOCKS_EACH * gpu().num_blocks
    blocks = [max(1, min(most, x.numel() // READ_EACH)) for x in buffers]
    sums, norm = (first.new_empty(shape, dtype=torch.float32) for shape in (sum(blocks), ()))
    library, stream, begin = native.loaded("optimizer"), stream_of(first), 0
    for x, num_blocks in zip(buffers, blocks, strict=True):
        _check_weights(x, "The gradients")
        library.eet_squares(
            sums=sums[begin:].data_ptr(), x=at(x), dtype=DTYPES[x.dtype], n=x.numel(), num_blocks=num_blocks,
            stream=stream,
        )  # fmt: skip
        begin += num_blocks
    library.eet_root(root=norm.data_ptr(), sums=sums.data_ptr(), count=len(sums), stream=stream)
    return norm


def _shared(
    weights: Tensor,
    grads: Tensor,
    moments: Sequence[Tensor],
    master: Tensor | None,
    update: Sequence[Tensor],
    noise: int | None = None,
    number: int = 0,
) -> dict[str, Any]:
    """What both launchers take."""
    _check_weights(weights, "The weights")
    check(grads, "grads", weights.dtype, tuple(weights.shape))
    for tensor in (*moments, master):
        check(tensor, "a moment or master copy", torch.float32, tuple(weights.shape))
    for name, part in zip(("lr", "scale", "step", "skip"), update, strict=True):
        check(part, name, torch.bool if name == "skip" else torch.float32, ())
    if noise is not None and weights.dtype != torch.bfloat16:
        raise KernelError(f"The weights are {weights.dtype}; rounding at random is for {torch.bfloat16}.")
    lr, scale, step, skip = (part.data_ptr() for part in update)
    return {
        "weights": at(weights), "grads": at(grads), "master": at(master), "lr": lr, "scale": scale, "step": step,
        "skip": skip, "dtype": DTYPES[weights.dtype], "n": weights.numel(), "noise": -1 if noise is None else noise,
        "number": number, "stream": stream_of(weights),
    }  # fmt: skip


def _check_weights(x: Tensor, name: str) -> None:
    if x.dtype not in DTYPES or x.ndim != 1 or not x.is_contiguous():
        raise KernelError(
            f"{name} are {tuple(x.shape)} {x.dtype}; the kernel takes one dimension, contiguous, of "
            f"{', '.join(map(str, DTYPES))}. {REMEDY}"
        )
