"""What follows the product of a linear layer that is trained: bias, activation, dropout and residual in one launch.

T tokens, C channels, N outputs of the product, F of what comes out: N, or N/2 where the activation is gated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eet_lab.ops import native, reference
from eet_lab.ops.cuda.launching import (
    DTYPES,
    at,
    check,
    drop_arguments,
    gpu,
    needs,
    number_of,
    stream_of,
    unfit_layers,
    unfit_width,
    untrainable,
)
from eet_lab.ops.cuda.plan import ceil
from eet_lab.ops.fits import refuses
from eet_lab.ops.noise import Dropout, Noise, all_kept
from eet_lab.ops.types import Empty, Linear

WARPS, VECTOR_BYTES = 8, 16  # rows that a block has at a time, each a warp's
BLOCKS = {False: 4, True: 3}  # of a multiprocessor, by whether it is gated: one wave


@refuses(unfit_layers, untrainable)
@needs("train_epilogue")
def linear_act(x: Tensor, w: Linear, act: str | None, *, empty: Empty, linear: Callable = reference.linear) -> Tensor:
    """act(linear(x)): [T,C] -> [T,F]. Of an activated layer the product without its bias is kept, and nothing else."""
    if act is None:
        if w.bias is None or len(w.bias) % 8 or linear is not reference.linear:  # what sums a weight's may sum these
            return linear(x, w, empty=empty)
        return Biased.apply(linear(x, w._replace(bias=w.bias.detach()), empty=empty), w.bias)
    return Epilogue.apply(linear(x, w._replace(bias=None), empty=empty), w.bias, None, act, None)


@refuses(unfit_width, untrainable)
@needs("train_epilogue")
def linear_residual(x: Tensor, w: Linear, residual: Tensor, *, empty: Empty, drop: Dropout = all_kept) -> Tensor:
    """linear(x) + residual: [T,C], [T,N] -> [T,N]. Kept is nothing; what is dropped is drawn again."""
    y = reference.linear(x, w._replace(bias=None), empty=empty)
    return Epilogue.apply(y, w.bias, residual, None, drop.noise())


@refuses(unfit_width, untrainable)
@needs("train_epilogue")
def dropped(x: Tensor, drop: Dropout) -> Tensor:
    """What a training pass keeps of hidden states: [T,C] -> [T,C]."""
    noise = drop.noise()
    return x if noise is None else Epilogue.apply(x, None, None, None, noise)


class Biased(torch.autograd.Function):
    """y, to which the product has added the bias; the bias's gradient is summed as in `Epilogue`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.mark_dirty(y)  # it is returned as it is, and whoever reads it may write over it
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return epilogue_backward(grads[0].contiguous(), None, None, None, None, wants_bias=ctx.needs_input_grad[1])


class Epilogue(torch.autograd.Function):
    """drop(act(y + bias)) + residual."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor | None, residual: Tensor | None, act: str | None, noise: Noise | None
    ) -> Tensor:
        ctx.save_for_backward(*((y, bias) if act else (None, None)))
        ctx.act, ctx.noise = act, noise
        return epilogue(y, bias, residual, act, noise)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, bias = ctx.saved_tensors
        dout = grads[0].contiguous()
        dy, dbias = epilogue_backward(dout, y, bias, ctx.act, ctx.noise, wants_bias=ctx.needs_input_grad[1])
        return dy, dbias, dout if ctx.needs_input_grad[2] else None, None, None


def epilogue(y: Tensor, bias: Tensor | None, residual: Tensor | None, act: str | None, noise: Noise | None) -> Tensor:
    """drop(act(y + bias)) + residual: y [T,N], bias [N], residual [T,F] -> [T,F]. One launch; F a multiple of 8."""
    (T, N), dtype = y.shape, y.dtype
    F = N // 2 if act in reference.GATED else N
    check(y, "y", dtype, (T, N))
    for name, part, shape in (("bias", bias, (N,)), ("residual", residual, (T, F))):
        check(part, name, dtype, shape)
    out = y.new_empty(T, F)
    native.loaded("train_epilogue").eet_train_epilogue(
        out=at(out), y=at(y), bias=at(bias), residual=at(residual), **drop_arguments(noise, T), **_how(act, y, F),
    )  # fmt: skip
    return out


def epilogue_backward(
    dout: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    act: str | None,
    noise: Noise | None,
    *,
    wants_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of y [T,N] and, where it is wanted, of the bias [N]; y and bias are those of an activation.

    Without an activation and dropout that of y is `dout` itself. At most two launches, and none where there is nothing
    to do.
    """
    T, F = dout.shape
    N = 2 * F if act in reference.GATED else F
    is_same = act is None and noise is None
    dy = None if is_same else dout.new_empty(T, N)
    dbias = dout.new_empty(N) if wants_bias else None
    how = _how(act, dout, F)
    if dy is not None or wants_bias:
        partial = torch.empty(how["R"] if wants_bias else 0, N, dtype=torch.float32, device=dout.device)
        native.loaded("train_epilogue").eet_train_epilogue_backward(
            dy=at(dy), dbias=at(dbias), partial=at(partial), dout=at(dout), y=at(y), bias=at(bias),
            **drop_arguments(noise, T), **how,
        )  # fmt: skip
    return dout if dy is None else dy, dbias


def _how(act: str | None, x: Tensor, F: int) -> dict[str, Any]:
    """The rest of the arguments of both launchers."""
    gated, strips = act in reference.GATED, ceil(F * x.element_size(), 32 * VECTOR_BYTES)
    R = max(1, min(ceil(len(x), WARPS), BLOCKS[gated] * gpu().num_blocks // strips))
    how = {"act": number_of(act), "gated": gated, "dtype": DTYPES[x.dtype]}
    return how | {"T": len(x), "F": F, "R": R, "stream": stream_of(x)}
