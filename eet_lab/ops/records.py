"""Op records: what is known of each op beside its reference and its kernel, in one place.

B rows, T tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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


class CallCost(NamedTuple):
    """What one call of an op is: bytes that it moves, each once, and launches beyond those that its cases declare."""

    num_bytes: int
    more_launches: int = 0


@dataclass(frozen=True)
class Op:
    """One op that models call. `work` is told the arguments of a call, without `empty`."""

    name: str
    work: Callable[..., CallCost]

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

    def launches_of(self, op: Callable) -> int | None:
        """The same of what is in the op's slot; None for plain PyTorch, and for an op of someone else."""
        return self.launches if hasattr(op, "kernels") and op.__name__ == self.name else None


def _linear_bytes(w: Linear, shape: Shape, itemsize: int) -> int:
    """With what an int8 weight is smaller than the shape knows."""
    scale = 0 if w.scale is None else w.scale.nbytes
    return shape.read_bytes(itemsize) - w.weight.numel() * itemsize + w.weight.nbytes + scale


def _norm_linear(x: Tensor, norm_w: Norm | None, w: Linear, act: str | None = None) -> CallCost:
    num_bytes = _linear_bytes(w, LinearShape(len(x), len(w.weight), x.shape[1], act), x.itemsize)
    return CallCost(num_bytes, linear.num_launches(len(x), x, w, act, normed=norm_w is not None) - 1)


def _residual_bytes(x: Tensor, w: Linear) -> int:
    return _linear_bytes(w, LinearShape(len(x), len(w.weight), x.shape[1], residual=True), x.itemsize)


def _linear_residual(x: Tensor, w: Linear, residual: Tensor) -> CallCost:
    return CallCost(_residual_bytes(x, w), linear.num_launches(len(x), x, w, normed=False, residual=True) - 1)


def _linear_residual_norm(x: Tensor, w: Linear, residual: Tensor, norm_w: Norm) -> CallCost:
    # The norm is one launch, or cuBLAS's epilogue.
    return CallCost(_residual_bytes(x, w), linear.num_launches(len(x), x, w, normed=False) - 1)


def _fused_layer(attended: Tensor, x: Tensor, w: Layer, following: Layer | None, act: str) -> CallCost:
    T, C = x.shape
    wide = attended.shape[1], len(w.qkv.weight)
    shape = LayerShape(T, C, w.fc_2.weight.shape[1], act, last=following is None, wide=wide)
    return CallCost(shape.read_bytes(x.itemsize))


def _attention(
    qkv: Tensor, kv: KV, batch: Batch, spec: Spec, extras: Extras = NO_EXTRAS, mask: Tensor | None = None
) -> CallCost:
    lengths = tuple(end - begin for begin, end in batch.keys.spans or ((0, batch.max_kv),) * batch.num_rows)
    window = spec.window if mask is None else None  # a mask hides what is read all the same
    shape = AttentionShape(lengths, spec.heads, spec.kv_heads, spec.head_dim, decode=True, window=window)
    apart = is_rotated(spec, extras) and not rotates(spec.head_dim, qkv.itemsize)
    in_fp32 = qkv.itemsize == 4  # it writes its cache in a launch of its own
    return CallCost(shape.read_bytes(qkv.itemsize), apart + in_fp32)


def _next_token(x: Tensor, batch: Batch, norm_w: Norm, head: Linear, sampling: Sampling) -> CallCost:
    (V, C), choice, B = head.weight.shape, sampling.choice, len(batch.last)
    drawn, limited = choice > Choice.GREEDY, choice == Choice.LIMITED
    shape = NextTokenShape(B, len(x), V, C, temperature=float(drawn), top_k=int(limited))
    return CallCost(_linear_bytes(head, shape, x.itemsize), linear.num_launches(B, x, head, gathered=True) - 1)


def _cross_attention(
    q: Tensor, kv: KV, batch: Batch, source: Batch, spec: Spec, mask: Tensor | None = None
) -> CallCost:
    return CallCost(2 * q.nbytes + sum(part.nbytes for part in kv))


def _embed(
    ids: Tensor, positions: Tensor, token_embedding: Tensor, position_embedding: Tensor | None, **how: Any
) -> CallCost:
    T, C, itemsize = len(ids), token_embedding.shape[1], token_embedding.itemsize
    if position_embedding is None:
        return CallCost(2 * T * C * itemsize + ids.nbytes)
    return CallCost(EmbedShape(T, C).read_bytes(itemsize))


def _embed_norm(
    ids: Tensor,
    positions: Tensor,
    types: Tensor | None,
    token_embedding: Tensor,
    position_embedding: Tensor,
    type_embedding: Tensor | None,
    norm: Norm,
    **how: Any,
) -> CallCost:
    num_bytes = _embed(ids, positions, token_embedding, position_embedding).num_bytes
    if type_embedding is not None:
        num_bytes += len(ids) * type_embedding.shape[1] * type_embedding.itemsize
    # Types that are told are gathered.
    return CallCost(num_bytes, int(types is not None and type_embedding is not None))


def _advance(buffer: TokenBuffer, token: Tensor, count: Tensor) -> CallCost:
    return CallCost(AdvanceShape(len(buffer.ids)).read_bytes(buffer.ids.itemsize))


OPS = {
    op.name: op
    for op in (
        Op("embed", _embed),
        Op("norm_linear", _norm_linear),
        Op("linear_residual", _linear_residual),
        Op("fused_layer", _fused_layer),
        Op("masked_attention", _attention),
        Op("attention", _attention),
        Op("next_token", _next_token),
        Op("advance", _advance),
        Op("embed_norm", _embed_norm),
        Op("linear_residual_norm", _linear_residual_norm),
        Op("cross_attention", _cross_attention),
    )
}
"""The records by name, which is also the name of a field of `Ops`."""
