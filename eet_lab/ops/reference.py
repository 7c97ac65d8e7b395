"""What each op means, in plain PyTorch. An op asks `empty` for every activation that it makes.

T tokens, B rows, Q queries a row, K columns of the KV cache, C channels, N outputs, H heads, G KV heads, D head dim,
V words.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

from eet_lab.ops.int8 import dequantized
from eet_lab.ops.pads import serves_any_pads
from eet_lab.ops.types import Empty, KVLayer, Layer, Linear, Norm, Sampling, State, Step, fresh


@serves_any_pads
def embed(ids: Tensor, positions: Tensor, words: Tensor, places: Tensor, *, empty: Empty) -> Tensor:
    """Word plus position embedding: ids [T], positions [T], words [V,C], places [S,C] -> [T,C]."""
    x = torch.index_select(words, 0, ids, out=empty("embedded", (len(ids), words.shape[1]), words))
    place = torch.index_select(places, 0, positions, out=empty("place", x.shape, x))
    return x.add_(place)


def norm(x: Tensor, w: Norm, *, empty: Empty) -> Tensor:
    """Layer norm, or RMS norm without a bias: [T,C] -> [T,C]."""
    shape = x.shape[-1:]
    normed = rms_norm(x, shape, w.weight, w.eps) if w.bias is None else layer_norm(x, shape, w.weight, w.bias, w.eps)
    return empty("normed", x.shape, x).copy_(normed)


def softmax(x: Tensor, *, empty: Empty) -> Tensor:
    """Softmax over the last dimension: [T,C] -> [T,C]. Attention has its own, beside its products."""
    return torch.softmax(x, -1, out=empty("softmax", x.shape, x))


def linear(x: Tensor, w: Linear, *, empty: Empty) -> Tensor:
    """[T,C] -> [T,N]. An int8 weight is first made what it stands for, whole, in the activations' dtype."""
    weight = w.weight
    if w.scale is not None:
        weight = dequantized(w.weight, w.scale, out=empty("dequantized", w.weight.shape, x))
    out = empty("linear", (len(x), len(weight)), x)
    return torch.mm(x, weight.t(), out=out) if w.bias is None else torch.addmm(w.bias, x, weight.t(), out=out)


def activate(x: Tensor, act: str, *, empty: Empty) -> Tensor:
    """An activation by name: "gelu_tanh", "gelu" (erf) or "relu". [T,N] -> [T,N]."""
    out = empty("activated", x.shape, x)
    if act == "relu":
        return torch.clamp_min(x, 0, out=out)
    return torch.ops.aten.gelu.out(x, approximate={"gelu_tanh": "tanh", "gelu": "none"}[act], out=out)


@serves_any_pads
def norm_linear(x: Tensor, norm_w: Norm, w: Linear, act: str | None = None, *, empty: Empty) -> Tensor:
    """act(linear(norm(x))): [T,C] -> [T,N]."""
    y = linear(norm(x, norm_w, empty=empty), w, empty=empty)
    return y if act is None else activate(y, act, empty=empty)


@serves_any_pads
def linear_residual(x: Tensor, w: Linear, residual: Tensor, *, empty: Empty) -> Tensor:
    """linear(x) + residual: [T,C], [T,N] -> [T,N]. It may write into `residual`: use only the result."""
    y = linear(x, w, empty=empty)
    return torch.add(y, residual, out=empty("residual", residual.shape, x))


@serves_any_pads
def rest_of_layer(
    attended: Tensor, x: Tensor, w: Layer, following: Layer | None, act: str, *, empty: Empty
) -> tuple[Tensor, Tensor | None]:
    """What follows a layer's attention, up to the next one's: [T,C], [T,C] -> x [T,C], and the next layer's
    qkv [T,3C], or None after the last. It may write into x: use only the result.
    """
    x = linear_residual(attended, w.proj, x, empty=empty)
    x = linear_residual(norm_linear(x, w.norm_2, w.fc_1, act, empty=empty), w.fc_2, x, empty=empty)
    return x, following and norm_linear(x, following.norm_1, following.qkv, empty=empty)


def append(qkv: Tensor, kv: KVLayer, step: Step, *, empty: Empty = fresh) -> tuple[Tensor, Tensor, Tensor]:
    """Write the new keys and values into the cache: [T,(H+2G)D] -> queries [T,H,D], all keys and values [B,G,K,D].

    Those of a cache in pages are copied together, since PyTorch's products take rectangles.
    """
    kv_width = kv.num_heads * kv.head_dim
    q, k, v = (
        part.unflatten(-1, (-1, kv.head_dim))
        for part in qkv.split([qkv.shape[1] - 2 * kv_width, kv_width, kv_width], -1)
    )
    (keys, values), table = kv.room(step), kv.block_table
    if table is None:
        keys[step.rows, :, step.columns] = k
        values[step.rows, :, step.columns] = v
        return q, keys, values
    page = keys.shape[2]
    pages, columns = table[step.rows, step.columns // page], step.columns % page
    keys[pages, :, columns] = k
    values[pages, :, columns] = v
    blocks = table[:, : -(-step.extent // page)]
    keys, values = (gathered(part, blocks, name, empty) for part, name in ((keys, "keys"), (values, "values")))
    return q, keys[:, :, : step.extent], values[:, :, : step.extent]


def gathered(pages: Tensor, blocks: Tensor, name: str, empty: Empty) -> Tensor:
    """Pages [P,G,page,D] in the order of a block table [B,blocks] -> [B,G,blocks*page,D]."""
    (B, num_blocks), (_, G, page, D) = blocks.shape, pages.shape
    head = torch.arange(G, device=blocks.device)
    chosen = (blocks[:, None] * G + head[:, None]).flatten()
    out = empty(name, (len(chosen), page, D), pages)
    return torch.index_select(pages.flatten(0, 1), 0, chosen, out=out).view(B, G, num_blocks * page, D)


@serves_any_pads
def dense_mask(step: Step, like: Tensor, *, empty: Empty) -> Tensor:
    """An additive mask [B,1,Q,K]: 0 where a query may look, and half the lowest number elsewhere.

    Half of it, so that no sum with a score overflows: the row of a pad is hidden altogether, and would become NaN.
    """
    B, K = len(step.num_pad), step.extent
    mask = empty("mask", (B, 1, len(step.ids) // B, K), like).zero_()
    key = torch.arange(K, device=like.device)
    hidden = (key < step.num_pad[step.rows, None]) | (key > step.columns[:, None])
    return mask.masked_fill_(hidden.view(mask.shape), torch.finfo(mask.dtype).min / 2)


@serves_any_pads
def masked_attention(qkv: Tensor, kv: KVLayer, step: Step, *, mask: Tensor, empty: Empty) -> Tensor:
    """Attention as EET's baseline had it: every score is computed, then a mask [B,1,Q,K] is added.

    [T,(H+2G)D] -> [T,HD].
    """
    q, keys, values = append(qkv, kv, step, empty=empty)
    (B, G, K, D), (T, H, _) = keys.shape, q.shape
    if H > G:
        keys, values = keys.repeat_interleave(H // G, 1), values.repeat_interleave(H // G, 1)
    q = q.unflatten(0, (B, -1)).transpose(1, 2).mul(D**-0.5)
    scores = torch.matmul(q, keys.transpose(-1, -2), out=empty("scores", (B, H, T // B, K), q))
    scores = torch.add(scores, mask, out=empty("masked_scores", scores.shape, q))
    weights = torch.softmax(scores, -1, out=empty("attention_weights", scores.shape, q))
    mixed = torch.matmul(weights, values, out=empty("mixed", q.shape, q))
    return empty("attended", (T, H * D), qkv).view(B, -1, H, D).copy_(mixed.transpose(1, 2)).view(T, H * D)


def attention(qkv: Tensor, kv: KVLayer, step: Step, *, empty: Empty) -> Tensor:
    """Attention without a mask: a query sees columns num_pad .. its own. [T,(H+2G)D] -> [T,HD]; a pad's own is 0.

    Plain PyTorch has no call for rows with different numbers of pads: rows that differ get a call each, by the host's
    `step.spans`. So a captured call serves the same pads alone.
    """
    q, keys, values = append(qkv, kv, step, empty=empty)
    out, B, (T, H, D) = empty("attended", q.shape, q), len(step.spans), q.shape
    if out.is_meta:  # a rehearsal only wants to know what was asked for
        return out.flatten(1)
    if sum(span.count for span in step.spans) < T:
        out.zero_()
    first, count, num_pad = step.spans[0]
    alike = B * count == T and all(span[1:] == (count, num_pad) for span in step.spans)
    for rows in [slice(0, B)] if alike else [slice(row, row + 1) for row in range(B)]:
        first, count, num_pad = step.spans[rows.start]
        now, seen = slice(first, first + count * (rows.stop - rows.start)), slice(num_pad, step.extent)
        k, v, bound = keys[rows, :, seen], values[rows, :, seen], None
        if not step.exact:
            column = torch.arange(num_pad, step.extent, device=q.device)
            bound = column <= step.columns[now].view(-1, 1, count, 1)
        out[now] = _attend(q[now].view(-1, count, H, D), k, v, bound).flatten(0, 1)
    return out.flatten(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, bound: Tensor | None) -> Tensor:
    """q [R,Q,H,D], k and v [R,G,K,D] -> [R,Q,H,D]; the queries are the newest Q columns, or see what `bound` allows."""
    causal = bound is None and q.shape[1] > 1
    grouped = {"enable_gqa": True} if q.shape[2] > k.shape[1] else {}
    mixed = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bound, is_causal=causal, **grouped)
    return mixed.transpose(1, 2)


def newest_logits(
    x: Tensor, step: Step, norm_w: Norm, head: Linear, *, empty: Empty, norm_linear: Callable = norm_linear
) -> Tensor:
    """The logits [B,V] of each row's newest token; x [T,C]."""
    newest = torch.index_select(x, 0, step.last, out=empty("newest", (len(step.last), x.shape[1]), x))
    return norm_linear(newest, norm_w, head, empty=empty)


@serves_any_pads
def next_token(
    x: Tensor,
    step: Step,
    norm_w: Norm,
    head: Linear,
    sampling: Sampling,
    *,
    empty: Empty,
    norm_linear: Callable = norm_linear,
) -> Tensor:
    """The next token of every row: x [T,C] -> [B]."""
    logits = newest_logits(x, step, norm_w, head, empty=empty, norm_linear=norm_linear)
    return choose(logits, step.positions.index_select(0, step.last), sampling)


def choose(logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """Arg-max, or a draw by the Gumbel-max trick: logits [B,V], positions [B] -> [B].

    Words that tie with the last one of the top-k or top-p stay.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered = scores.sort(-1, descending=True).values
        before_last = ordered.softmax(-1).cumsum(-1) < sampling.top_p
        last = before_last.sum(-1, keepdim=True).clamp_(max=scores.shape[-1] - 1)  # the word that reaches the mass
        scores = scores.masked_fill(scores < ordered.gather(-1, last), -torch.inf)
    return (scores + gumbel(sampling.seed, positions, scores.shape[-1])).argmax(-1)


def choose_top_k(
    logits: Tensor, best: Tensor, rows: Tensor, positions: Tensor, sampling: Sampling, *, empty: Empty
) -> Tensor:
    """The draw of `choose`, where the largest logits of parts of the words are known: [B,V] -> [B].

    Those are in `best`, which is not needed here. Row i has position positions[rows[i]].
    """
    return choose(logits, positions.index_select(0, rows), sampling)


def gumbel(seed: Tensor, positions: Tensor, num_words: int) -> Tensor:
    """Gumbel noise [B,V] that depends on (seed, row, position, word) alone, whatever the layout of the batch."""
    row = torch.arange(len(positions), device=positions.device)
    key = _mix(_mix(_mix(_mix(seed) + (seed >> 31)) + row) + positions)
    bits = _mix(key[:, None] + torch.arange(num_words, device=key.device)) & 0x7FFFFF
    uniform = (bits.float() + 0.5) * 2.0**-23  # 23 bits: one more would round up to 1, whose noise is infinite
    return uniform.log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """A 31-bit integer hash (two rounds of the multiply-xorshift family; constants by C.

    Wellons, "hash-prospector").
    """
    x = x & 0x7FFFFFFF
    for multiplier in (0x2C1B3C6D, 0x297A2D39):
        x = ((x ^ (x >> 15)) * multiplier) & 0x7FFFFFFF
    return x ^ (x >> 15)


@serves_any_pads
def advance(state: State, token: Tensor, *, empty: Empty) -> None:
    """Write `token` [B] into the next column of the canvas, except where the prompt still stands; step forward."""
    state.column.add_(1)
    known = state.tokens.index_select(1, state.column)[:, 0]
    state.ids.copy_(torch.where(state.column >= state.end, token, known))
    state.tokens.index_copy_(1, state.column, state.ids[:, None])
    state.positions.add_(1)
