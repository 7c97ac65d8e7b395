"""Op records: what is known of each op beside its reference and its kernel, in one place.

B rows, T tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from eet_lab.ops import reference
from eet_lab.ops.cases import CASES, Case
from eet_lab.ops.cross_cases import CROSS_CASES
from eet_lab.ops.cuda import linear
from eet_lab.ops.cuda.attention import rotates
from eet_lab.ops.cuda.rotary import is_rotated
from eet_lab.ops.encoder_cases import ENCODER_CASES, PLAIN_ENCODER_CASES
from eet_lab.ops.int8_cases import INT8_CASES
from eet_lab.ops.layer_cases import LAYER_CASES, LayerShape
from eet_lab.ops.next_token_case import NextTokenShape
from eet_lab.ops.row_cases import ROW_CASES
from eet_lab.ops.shapes import AttentionShape, LinearShape, Shape
from eet_lab.ops.token_cases import TOKEN_CASES, AdvanceShape, EmbedShape
from eet_lab.ops.types import KV, NO_EXTRAS, Batch, Choice, Extras, Layer, Linear, Norm, Sampling, Spec, TokenBuffer

ALL_CASES = (*CASES, *INT8_CASES, *LAYER_CASES, *ROW_CASES, *TOKEN_CASES, *ENCODER_CASES)
"""Every case of every op with kernels: what the checks on a GPU go through."""


@dataclass(frozen=True)
class Op:
    """One op that models call. `read_bytes` is told the arguments of a call, without `empty`: bytes that it moves, each
    once. `more_launches` is told the same: launches of the CUDA op beyond those that its cases declare.
    """

    name: str
    read_bytes: Callable[..., int]
    more_launches: Callable[..., int] = lambda *arguments, **keywords: 0

    @property
    def reference(self) -> Callable:
        """What it means, in plain PyTorch."""
        return getattr(reference, self.name)

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """What it is tested and timed on."""
        return tuple(case for case in (*ALL_CASES, *PLAIN_ENCODER_CASES, *CROSS_CASES) if case.op == self.name)

    @cached_property
    def launches(self) -> int | None:
        """The launches of the CUDA op in a decode step, with 16 bits, few rows and few channels; None: no kernel."""
        with_kernels = (case for case in ALL_CASES if case.op == self.name and not case.name.startswith("prefill"))
        return next((case.launches for case in with_kernels), None)


def _linear_bytes(w: Linear, shape: Shape, itemsize: int) -> int:
    """With what an int8 weight is smaller than the shape knows."""
    scale = 0 if w.scale is None else w.scale.nbytes
    return shape.read_bytes(itemsize) - w.weight.numel() * itemsize + w.weight.nbytes + scale


def _norm_linear(x: Tensor, norm_w: Norm | None, w: Linear, act: str | None = None) -> int:
    return _linear_bytes(w, LinearShape(len(x), len(w.weight), x.shape[1], act), x.itemsize)


def _linear_residual(x: Tensor, w: Linear, residual: Tensor, norm_w: Norm | None = None) -> int:
    return _linear_bytes(w, LinearShape(len(x), len(w.weight), x.shape[1], residual=True), x.itemsize)


def _fused_layer(attended: Tensor, x: Tensor, w: Layer, following: Layer | None, act: str) -> int:
    T, C = x.shape
    wide = attended.shape[1], len(w.qkv.weight)
    shape = LayerShape(T, C, w.fc_2.weight.shape[1], act, last=following is None, wide=wide)
    return shape.read_bytes(x.itemsize)


def _attention(qkv: Tensor, kv: KV, batch: Batch, spec: Spec, extras: Extras = NO_EXTRAS) -> int:
    lengths = tuple(end - begin for begin, end in batch.keys.spans or ((0, batch.max_kv),) * batch.num_rows)
    shape = AttentionShape(lengths, spec.heads, spec.kv_heads, spec.head_dim, decode=True, window=spec.window)
    return shape.read_bytes(qkv.itemsize)


def _masked_attention(qkv: Tensor, kv: KV, batch: Batch, spec: Spec, extras: Extras, mask: Tensor) -> int:
    return _attention(qkv, kv, batch, spec._replace(window=None), extras)  # a mask hides what is read all the same


def _next_token(x: Tensor, batch: Batch, norm_w: Norm, head: Linear, sampling: Sampling) -> int:
    (V, C), choice = head.weight.shape, sampling.choice
    drawn, limited = choice > Choice.GREEDY, choice == Choice.LIMITED
    shape = NextTokenShape(len(batch.last), len(x), V, C, temperature=float(drawn), top_k=int(limited))
    return _linear_bytes(head, shape, x.itemsize)


def _cross_attention(q: Tensor, kv: KV, batch: Batch, source: Batch, spec: Spec, mask: Tensor | None = None) -> int:
    return 2 * q.nbytes + sum(part.nbytes for part in kv)


def _embed(
    ids: Tensor, positions: Tensor, token_embedding: Tensor, position_embedding: Tensor | None, **how: Any
) -> int:
    T, C = len(ids), token_embedding.shape[1]
    itemsize = token_embedding.itemsize
    return 2 * T * C * itemsize + ids.nbytes if position_embedding is None else EmbedShape(T, C).read_bytes(itemsize)


def _embed_norm(
    ids: Tensor,
    positions: Tensor,
    types: Tensor | None,
    token_embedding: Tensor,
    position_embedding: Tensor,
    type_embedding: Tensor | None,
    norm: Norm,
    **how: Any,
) -> int:
    of_types = 0 if type_embedding is None else len(ids) * type_embedding.shape[1] * type_embedding.itemsize
    return _embed(ids, positions, token_embedding, position_embedding) + of_types


def _advance(buffer: TokenBuffer, token: Tensor, count: Tensor) -> int:
    return AdvanceShape(len(buffer.ids)).read_bytes(buffer.ids.itemsize)


def _more_of_embed_norm(
    ids: Tensor,
    positions: Tensor,
    types: Tensor | None,
    token_embedding: Tensor,
    position_embedding: Tensor,
    type_embedding: Tensor | None,
    norm: Norm,
) -> int:
    return int(types is not None and type_embedding is not None)  # types that are told are gathered


def _more_of_norm_linear(x: Tensor, norm_w: Norm | None, w: Linear, act: str | None = None) -> int:
    return linear.num_launches(len(x), x, w, act, normed=norm_w is not None) - 1


def _more_of_residual(x: Tensor, w: Linear, residual: Tensor) -> int:
    return linear.num_launches(len(x), x, w, normed=False, residual=True) - 1


def _more_of_residual_norm(x: Tensor, w: Linear, residual: Tensor, norm_w: Norm) -> int:
    return linear.num_launches(len(x), x, w, normed=False) - 1  # the norm is one, or cuBLAS's epilogue


def _more_of_next_token(x: Tensor, batch: Batch, norm_w: Norm, head: Linear, sampling: Sampling) -> int:
    return linear.num_launches(len(batch.last), x, head, gathered=True) - 1


def _more_of_attention(
    qkv: Tensor, kv: KV, batch: Batch, spec: Spec, extras: Extras = NO_EXTRAS, mask: Tensor | None = None
) -> int:
    apart = is_rotated(spec, extras) and not rotates(spec.head_dim, qkv.itemsize)
    return apart + int(qkv.itemsize == 4)  # in fp32 it writes its cache in a launch of its own


OPS = {
    op.name: op
    for op in (
        Op("embed", _embed),
        Op("norm_linear", _norm_linear, _more_of_norm_linear),
        Op("linear_residual", _linear_residual, _more_of_residual),
        Op("fused_layer", _fused_layer),
        Op("masked_attention", _masked_attention, _more_of_attention),
        Op("attention", _attention, _more_of_attention),
        Op("next_token", _next_token, _more_of_next_token),
        Op("advance", _advance),
        Op("embed_norm", _embed_norm, _more_of_embed_norm),
        Op("linear_residual_norm", _linear_residual, _more_of_residual_norm),
        Op("cross_attention", _cross_attention),
    )
}
"""The records by name, which is also the name of a field of `Ops`."""
