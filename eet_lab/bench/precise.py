"""The logits that choose each token, at higher precision than the model's own: what recipes are held against.

B rows, N generated tokens that are checked, C channels, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eet_lab.errors import Cancelled
from eet_lab.models.decoder import Decoder, forward, logits, mapped
from eet_lab.ops import reference
from eet_lab.ops.oom import memory_for
from eet_lab.ops.types import Empty, Extras, KVLayer, Linear, Norm, Spec, Step, fresh
from eet_lab.parts import Ops
from eet_lab.parts.kv_cache import GrowingKV
from eet_lab.parts.mask import no_mask
from eet_lab.parts.prompts import right_aligned
from eet_lab.progress import Cancel

Rows = Sequence[Sequence[int]]


@memory_for("the pass at higher precision that recipes are held against")
@torch.inference_mode()
def reference_logits(model: Decoder, rows: Rows, tokens: Rows, num_tokens: int, cancel: Cancel | None = None) -> Tensor:
    """The logits [B,N,V] that choose each of the first N tokens, in one pass at higher precision.

    Weights are widened layer by layer as they are used, so that no second copy of the model is needed. `cancel` ends
    the pass at the next linear layer: Cancelled.
    """
    high = torch.float64 if model.dtype == torch.float32 else torch.float32

    def wide(w: Any) -> Any:
        if cancel is not None and cancel.is_set():
            raise Cancelled("The check of the output was stopped.")
        return mapped(w, lambda tensor: tensor.to(high))

    def embed(ids: Tensor, positions: Tensor, words: Tensor, places: Tensor | None, *, empty: Empty) -> Tensor:
        x = words[ids].to(high)
        return x if places is None else x + places[positions].to(high)

    def norm_linear(x: Tensor, norm_w: Norm, w: Linear, act: str | None = None, *, empty: Empty) -> Tensor:
        return reference.norm_linear(x, wide(norm_w), wide(w), act, empty=empty)

    def linear_residual(x: Tensor, w: Linear, residual: Tensor, *, empty: Empty) -> Tensor:
        return reference.linear_residual(x, wide(w), residual, empty=empty)

    def attention(qkv: Tensor, kv: KVLayer, step: Step, spec: Spec, extras: Extras, *, empty: Empty) -> Tensor:
        extras = Extras(wide(extras.q_norm), wide(extras.k_norm), extras.inv_freq)
        return reference.attention(qkv, kv, step, spec, extras, empty=empty)

    read = [[*row, *new[: num_tokens - 1]] for row, new in zip(rows, tokens, strict=True)]
    _, step = right_aligned(read, room=1)
    on_device: Any = (part.to(model.device) if isinstance(part, Tensor) else part for part in step)
    step = Step(*on_device)
    ops = Ops(embed=embed, norm_linear=norm_linear, linear_residual=linear_residual, attention=attention).bind(fresh)
    like, config = model.words.new_empty(0, dtype=high), model.config
    cache = GrowingKV(len(model.layers), config.num_kv_heads, config.head_dim, like)
    cache.open([0] * len(rows), step.extent)
    hidden = forward(model, ops, partial(no_mask, empty=fresh), list(cache), step)
    newest = hidden.view(len(rows), -1, hidden.shape[1])[:, -num_tokens:]
    return logits(model, ops, newest.flatten(0, 1)).view(len(rows), num_tokens, -1)
