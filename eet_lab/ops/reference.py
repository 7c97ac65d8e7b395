"""What each op means, in plain PyTorch. An op asks `empty` for every activation that it makes.

What attention means is in `attention`; norms are in `norms`, embeddings in `embeddings`. T tokens, B rows, C channels,
N outputs, H heads, G KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from eet_lab.ops.attention import append, attend_heads, attention, dense_mask, gathered, heads, masked_attention
from eet_lab.ops.cross_attention import cross_attention, cross_mask
from eet_lab.ops.embeddings import dropped, embed, embed_norm, embedded
from eet_lab.ops.int8 import dequantized
from eet_lab.ops.noise import Dropout, all_kept, gumbel, noise_keys
from eet_lab.ops.norms import norm, softmax
from eet_lab.ops.types import Batch, Choice, Empty, Layer, Linear, Norm, Sampling, TokenBuffer

__all__ = [
    "activate",
    "advance",
    "append",
    "attend_heads",
    "attention",
    "choose",
    "choose_top_k",
    "cross_attention",
    "cross_mask",
    "dense_mask",
    "dropped",
    "embed",
    "embed_norm",
    "embedded",
    "fused_layer",
    "gathered",
    "gumbel",
    "heads",
    "linear",
    "linear_act",
    "linear_residual",
    "linear_residual_norm",
    "masked_attention",
    "newest_logits",
    "next_token",
    "noise_keys",
    "norm",
    "norm_linear",
    "softmax",
]


def linear(x: Tensor, w: Linear, *, empty: Empty) -> Tensor:
    """[T,C] -> [T,N]. An int8 weight is first made what it stands for, whole, in the activations' dtype."""
    weight = w.weight
    if w.scale is not None:
        weight = dequantized(w.weight, w.scale, out=empty("dequantized", w.weight.shape, x))
    out = empty("linear", (len(x), len(weight)), x)
    return torch.mm(x, weight.t(), out=out) if w.bias is None else torch.addmm(w.bias, x, weight.t(), out=out)


GATED = {"swiglu": "silu", "geglu": "gelu_tanh"}
"""Activations whose first half of the numbers is activated so, and multiplied by the second."""


def activate(x: Tensor, act: str, *, empty: Empty) -> Tensor:
    """An activation by name: "gelu_tanh", "gelu" (erf), "relu", "silu" or "tanh", [T,N] -> [T,N]; a gated one ->
    [T,N/2].
    """
    if act in GATED:
        gate, value = x.chunk(2, -1)
        return activate(gate, GATED[act], empty=empty).mul_(value)
    out = empty("activated", x.shape, x)
    if act == "relu":
        return relu(x) if out is None else torch.clamp_min(x, 0, out=out)  # whose slope at 0 would be 1
    if act == "tanh":
        return torch.tanh(x, out=out)
    if act == "silu":
        return silu(x) if out is None else torch.ops.aten.silu.out(x, out=out)
    approximate = {"gelu_tanh": "tanh", "gelu": "none"}[act]
    return (
        gelu(x, approximate=approximate)
        if out is None
        else torch.ops.aten.gelu.out(x, approximate=approximate, out=out)
    )


def linear_act(x: Tensor, w: Linear, act: str | None, *, empty: Empty, linear: Callable = linear) -> Tensor:
    """act(linear(x)): [T,C] -> [T,N], or [T,N/2] where the activation is gated."""
    y = linear(x, w, empty=empty)
    del x  # the caller has no name for it: its memory is free for what is activated
    return y if act is None else activate(y, act, empty=empty)


def norm_linear(
    x: Tensor,
    norm_w: Norm | None,
    w: Linear,
    act: str | None = None,
    *,
    empty: Empty,
    norm: Callable = norm,
    linear: Callable = linear,
    linear_act: Callable = linear_act,
) -> Tensor:
    """act(linear(norm(x))): [T,C] -> [T,N], or [T,N/2] where the activation is gated. No norm: x is normed already."""
    return linear_act(x if norm_w is None else norm(x, norm_w, empty=empty), w, act, empty=empty, linear=linear)


def linear_residual(x: Tensor, w: Linear, residual: Tensor, *, empty: Empty, drop: Dropout = all_kept) -> Tensor:
    """linear(x) + residual: [T,C], [T,N] -> [T,N]. It may write into `residual`: use only the result."""
    y = drop(linear(x, w, empty=empty))
    return torch.add(y, residual, out=empty("residual", residual.shape, x))


def linear_residual_norm(
    x: Tensor,
    w: Linear,
    residual: Tensor,
    norm_w: Norm,
    *,
    empty: Empty,
    drop: Dropout = all_kept,
    linear_residual: Callable = linear_residual,
    norm: Callable = norm,
) -> Tensor:
    """norm(linear(x) + residual): [T,C], [T,N] -> [T,N]. It may write into `residual`: use only the result."""
    return norm(linear_residual(x, w, residual, empty=empty, drop=drop), norm_w, empty=empty)


def fused_layer(
    attended: Tensor, x: Tensor, w: Layer, following: Layer | None, act: str, *, empty: Empty
) -> tuple[Tensor, Tensor | None]:
    """What follows a layer's attention, up to the next one's: [T,C], [T,C] -> x [T,C], and the next layer's
    qkv [T,(H+2G)D], or None after the last. It may write into x: use only the result.
    """
    x = linear_residual(attended, w.proj, x, empty=empty)
    x = linear_residual(norm_linear(x, w.norm_2, w.fc_1, act, empty=empty), w.fc_2, x, empty=empty)
    return x, following and norm_linear(x, following.norm_1, following.qkv, empty=empty)


def newest_logits(
    x: Tensor, batch: Batch, norm_w: Norm, head: Linear, *, empty: Empty, norm_linear: Callable = norm_linear
) -> Tensor:
    """The logits [B,V] of each row's newest token; x [T,C]."""
    newest = torch.index_select(x, 0, batch.last, out=empty("newest", (len(batch.last), x.shape[1]), x))
    return norm_linear(newest, norm_w, head, empty=empty)


def next_token(
    x: Tensor,
    batch: Batch,
    norm_w: Norm,
    head: Linear,
    sampling: Sampling,
    *,
    empty: Empty,
    norm_linear: Callable = norm_linear,
) -> Tensor:
    """The next token of every row: x [T,C] -> [B]."""
    logits = newest_logits(x, batch, norm_w, head, empty=empty, norm_linear=norm_linear)
    return choose(logits, batch.positions.index_select(0, batch.last), sampling)


def choose(logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """Arg-max, or a draw by the Gumbel-max trick, each row as it asks for: logits [B,V], positions [B] -> [B].

    A score is the logit times 1 / temperature, both in fp32. Tokens that tie with the last one of the top-k or top-p
    stay.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    is_drawn = (sampling.temperature > 0)[:, None]
    scores = logits.float() * torch.where(is_drawn[:, 0], 1 / sampling.temperature, 1)[:, None]
    if sampling.choice == Choice.LIMITED:
        top_k, top_p = (torch.where(is_drawn, part[:, None], 1) for part in (sampling.top_k, sampling.top_p))
        least = least_kept(scores, top_k, top_p)
        scores = scores.masked_fill((scores < least) & is_drawn, -torch.inf)
    noisy = scores + gumbel(sampling.noise, positions, scores.shape[-1])
    return torch.where(is_drawn, noisy, scores).argmax(-1)


def least_kept(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest score [B,1] that the top-k [B,1] and then the top-p [B,1] of each row keep: scores [B,V]."""
    V = scores.shape[-1]
    kept = torch.where(top_k > 0, top_k, V).clamp(max=V)
    if scores.device.type == "cpu" and not (top_p < 1).any():  # the host may look, and a sort takes 200 times as long
        return scores.topk(int(kept.max())).values.gather(-1, kept - 1)
    ordered = scores.sort(-1, descending=True).values
    least = ordered.gather(-1, kept - 1)
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    before_last = ordered.softmax(-1).cumsum(-1) < top_p
    reaches = before_last.sum(-1, keepdim=True).clamp_(max=V - 1)  # the token that reaches the mass
    return torch.where(top_p < 1, ordered.gather(-1, reaches), least)


def choose_top_k(
    logits: Tensor, best: Tensor, rows: Tensor, positions: Tensor, sampling: Sampling, *, empty: Empty
) -> Tensor:
    """The draw of `choose`, where the largest logits of parts of the tokens are known: [B,V] -> [B].

    Those are in `best`, which is not needed here. Row i has position positions[rows[i]].
    """
    return choose(logits, positions.index_select(0, rows), sampling)


def advance(buffer: TokenBuffer, token: Tensor, count: Tensor, *, empty: Empty) -> None:
    """Move each row on by the `count` [B] tokens that a pass read, and write `token` [B] where they end.

    Where the prompt still stands, it stays. A row that is at its limit, or was not read, stays where it is.
    """
    after = buffer.columns + count
    moves = (count > 0) & (after <= buffer.limit)
    column = torch.where(moves, after, buffer.columns)
    known = buffer.tokens.gather(1, column[:, None])[:, 0]
    buffer.ids.copy_(torch.where(moves & (column >= buffer.end), token, known))
    buffer.tokens.scatter_(1, column[:, None], buffer.ids[:, None])
    buffer.positions.add_(column - buffer.columns)
    buffer.columns.copy_(column)
    buffer.log.index_copy_(0, buffer.num_passes % len(buffer.log), buffer.ids[None])
    buffer.num_passes.add_(1)
