"""Attention of short rows to themselves, in training. T tokens, B rows, H heads of 64 channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native, reference
from eet_lab.ops.cuda.launching import DTYPES, at, check, drop_arguments, gpu, needs, stream_of
from eet_lab.ops.fits import Shapes, refuses
from eet_lab.ops.noise import Dropout, Noise, all_kept
from eet_lab.ops.rows import attend_rows
from eet_lab.ops.types import NO_EXTRAS, Batch, Empty, Extras, Spec
from eet_lab.ops.varlen import HALVES, untrainable, with_cu_seqlens

HEAD_DIM = 64
LONGEST = 128
"""Tokens of a row, whose scores a block has in registers."""
SHARED_BYTES = 128 * 1024
"""What a block takes for the gradient of rows of more than half as many tokens; for shorter ones it takes 48 KiB."""


def _longest() -> int:
    """Tokens of a row for which blocks of this GPU have room."""
    return LONGEST if gpu().shared_bytes >= SHARED_BYTES else LONGEST // 2


def _unfit(model: Shapes) -> str | None:
    """Why the kernel takes no row of a model, or None."""
    spec = model.spec
    if spec.head_dim != HEAD_DIM:
        return f"the kernel for short rows takes heads of {HEAD_DIM} channels, and this model's have {spec.head_dim}"
    if spec.kv_heads != spec.heads:
        return f"the kernel for short rows takes one KV head a head, and this model has {spec.kv_heads}"
    if spec.rope or spec.max_distance:
        what = "rotates queries and keys" if spec.rope else "adds a bias of relative positions to its scores"
        return f"the kernel for short rows reads queries and keys as their product made them, and this model {what}"
    return None


@refuses(_unfit, untrainable)
@needs("train_attention")
def attend_heads(
    qkv: Tensor,
    batch: Batch,
    spec: Spec,
    extras: Extras = NO_EXTRAS,
    *,
    empty: Empty,
    drop: Dropout = all_kept,
    attend_rows: Callable = attend_rows,
) -> Tensor:
    """`reference.attend_heads` of rows of at most 128 tokens: one launch, and one for the gradient. [T,3HD] -> [T,HD].

    Longer rows and windows that are shorter than a row are left to `attend_rows`; so are rows of more than 64 tokens on
    a GPU whose blocks have less than `SHARED_BYTES`. Which of the two it is follows from shapes, as in
    `varlen.attend_packed`. Nothing is kept but qkv, and what is dropped is drawn again. Each token must belong to a
    row, rows lie end to end, and the positions of each begin at 0.
    """
    has_window = spec.window is not None and spec.window < batch.max_q
    if batch.max_q > _longest() or has_window:
        return reference.attend_heads(qkv, batch, spec, extras, empty=empty, drop=drop, attend_rows=attend_rows)
    if any(part is not None for part in extras):
        raise KernelError(
            "The kernel for short rows reads queries and keys as their product made them, without norms, rotation or a "
            "bias of scores. Leave short_attention out."
        )
    if batch.keys.padded or batch.num_dummy:
        what = "pads" if batch.keys.padded else f"{batch.num_dummy:,} tokens of no row"
        raise KernelError(
            f"The kernel for short rows reads rows end to end, and this pass has {what}. Turn packed_prefill on."
        )
    cu_seqlens = with_cu_seqlens(batch).cu_seqlens
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    noise = drop.attention_noise()
    return ShortAttention.apply(qkv, cu_seqlens, spec.heads, batch.max_q, scale, spec.causal, noise)


class ShortAttention(torch.autograd.Function):
    """`short_attention`, which autograd differentiates once: qkv [T,3HD] -> [T,HD]."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cu_seqlens: Tensor,
        heads: int,
        longest: int,
        scale: float,
        causal: bool,
        noise: Noise | None,
    ) -> Tensor:
        ctx.save_for_backward(qkv, cu_seqlens)
        ctx.how = heads, longest, scale, causal, noise
        return short_attention(qkv, None, cu_seqlens, *ctx.how)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cu_seqlens = ctx.saved_tensors
        return short_attention(qkv, grads[0].contiguous(), cu_seqlens, *ctx.how), *(None,) * 6


def short_attention(
    qkv: Tensor,
    dout: Tensor | None,
    cu_seqlens: Tensor,
    heads: int,
    longest: int,
    scale: float,
    causal: bool,
    noise: Noise | None = None,
) -> Tensor:
    """Attention of rows of at most `longest` tokens to themselves, or its gradient, by one launch.

    qkv [T,3HD] -> [T,HD]; with the output's gradient `dout` [T,HD] -> the gradient of qkv.
    """
    T, C = len(qkv), heads * HEAD_DIM
    if qkv.dtype not in HALVES:
        raise KernelError(
            f"The kernel for short rows computes in float16 and bfloat16, not {qkv.dtype}. Load the model in bfloat16."
        )
    check(qkv, "qkv", qkv.dtype, (T, 3 * C))
    check(dout, "the gradient", qkv.dtype, (T, C))
    check(cu_seqlens, "the ends of rows", torch.int32, (len(cu_seqlens),))
    to = qkv.new_empty(T, C) if dout is None else torch.empty_like(qkv)
    if T:
        native.loaded("train_attention").eet_short_attention(
            to=at(to), qkv=at(qkv), dout=at(dout), ends=cu_seqlens.data_ptr(), **drop_arguments(noise, T),
            dtype=DTYPES[qkv.dtype], B=len(cu_seqlens) - 1, H=heads, longest=longest, scale=scale, causal=causal,
            stream=stream_of(qkv),
        )  # fmt: skip
    return to
