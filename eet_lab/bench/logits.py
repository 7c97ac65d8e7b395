"""Logits: those of a run, those at higher precision that it is held against, and how far a token lies below the best.

B rows, N generated tokens that are checked, C channels, V vocabulary. Margins are in units of the logits, so that they
can be held against what rounding does to those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eet_lab.engine.settings import Settings
from eet_lab.engine.tasks import next_tokens
from eet_lab.errors import Cancelled
from eet_lab.models.decoder import Decoder, forward, logits, mapped, op_by_op
from eet_lab.ops import reference
from eet_lab.ops.oom import memory_for
from eet_lab.ops.reference import gumbel, noise_keys
from eet_lab.ops.types import KV, Batch, Empty, Extras, Linear, Norm, Sampling, Spec, fresh
from eet_lab.parts import Ops
from eet_lab.parts.attend import Bounds
from eet_lab.parts.batches import left_padded
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

    def embed(
        ids: Tensor, positions: Tensor, token_emb: Tensor, position_emb: Tensor | None, *, empty: Empty
    ) -> Tensor:
        x = token_emb[ids].to(high)
        return x if position_emb is None else x + position_emb[positions].to(high)

    def norm_linear(x: Tensor, norm_w: Norm, w: Linear, act: str | None = None, *, empty: Empty) -> Tensor:
        return reference.norm_linear(x, wide(norm_w), wide(w), act, empty=empty)

    def linear_residual(x: Tensor, w: Linear, residual: Tensor, *, empty: Empty) -> Tensor:
        return reference.linear_residual(x, wide(w), residual, empty=empty)

    def attention(qkv: Tensor, kv: KV | None, batch: Batch, spec: Spec, extras: Extras, *, empty: Empty) -> Tensor:
        extras = Extras(wide(extras.q_norm), wide(extras.k_norm), extras.inv_freq)
        return reference.attention(qkv, kv, batch, spec, extras, empty=empty)

    read = [[*row, *new[: num_tokens - 1]] for row, new in zip(rows, tokens, strict=True)]
    batch = mapped(left_padded(read), lambda part: part.to(model.device))
    ops = Ops(embed=embed, norm_linear=norm_linear, linear_residual=linear_residual, attention=attention).bind(fresh)
    hidden = forward(model, ops, Bounds(ops, batch, None, empty=fresh), batch, op_by_op)
    newest = hidden.view(len(rows), -1, hidden.shape[1])[:, -num_tokens:]
    return logits(model, ops, newest.flatten(0, 1)).view(len(rows), num_tokens, -1)


def greedy_margin(logits: Tensor, token: int) -> float:
    """How far below the best token `token` lies; logits [V]."""
    return (logits.max() - logits[token]).item()


def drawn_margin(logits: Tensor, token: int, noise: Tensor, settings: Settings, slack: float) -> float:
    """How far `token` lies below the token that a draw must take: logits [V], Gumbel noise [V].

    Two logits may move against each other by `slack`. Tokens that this lets in or out of the top-k or the top-p are
    nobody's mistake: `token` has to beat those only that stay in, and must be able to be in itself.
    """
    T = settings.temperature
    scores = logits / T
    value = scores + noise
    possible, certain = _kept(scores, settings, slack / T)
    if not possible[token]:
        return greedy_margin(logits, token)  # above the slack, or it could have been in
    rounding = 2.0**-22 * value.abs().max()  # the op adds the noise in fp32
    best = value[certain].max() if certain.any() else value[token]
    return max((best - value[token] - rounding).item() * T, 0.0)


def noise_at(seed: int, row: int, position: int, like: Tensor) -> Tensor:
    """The Gumbel noise [V] of one draw, as the ops make it; `like` [V] tells the device."""
    key = noise_keys(seed, row + 1, like.device)[row:]
    return gumbel(key, torch.tensor([position], device=like.device), len(like))[0]


def _kept(scores: Tensor, settings: Settings, slack: float) -> tuple[Tensor, Tensor]:
    """Tokens [V] that top-k and top-p may keep, and those that they must, where scores may move by `slack`."""
    V, k, p = len(scores), settings.top_k, settings.top_p
    possible = certain = torch.ones_like(scores, dtype=torch.bool)
    inside = scores
    if 0 < k < V:
        first = scores.topk(k + 1).values
        possible, certain = scores >= first[k - 1] - slack, scores > first[k] + slack
        inside = scores.masked_fill(scores < first[k - 1], -torch.inf)
    if p < 1:
        ordered = inside.sort(descending=True).values
        mass = torch.cat([ordered.new_zeros(1), ordered.softmax(-1).cumsum(-1)])
        least = mass[torch.searchsorted(-ordered, -(scores + slack))]  # of the tokens that are above in any case
        most = mass[torch.searchsorted(-ordered, -(scores - slack), right=True)] - inside.softmax(-1)
        # A share P moves by P (1 - P) <= 1/4 of what its log odds move; twice: tokens at the top-k's end come and go.
        moved = slack / 2
        possible, certain = possible & (least - moved < p), certain & (most + moved < p)
    return possible, certain


class LogitsRecorder:
    """A task that keeps the logits of the first N generated tokens, and lets the recipe choose.

    Where they go is computed on the device from a token's position, so that a replayed graph records as well. The key
    of a slot's noise tells which prompt it has now, if any: `keys` [B] are the prompts' own.
    """

    def __init__(self, model: Decoder, lengths: Sequence[int], num_tokens: int, keys: Tensor) -> None:
        B, V = len(lengths), len(model.head.weight)
        self._num_tokens, self._keys = num_tokens, keys
        self._lengths = torch.tensor(lengths, device=model.device)
        with memory_for(f"the record of logits [{B} x {num_tokens + 1} x {V}]"):
            self._kept = torch.zeros(B, num_tokens + 1, V, device=model.device, dtype=model.dtype)

    def taken(self) -> Tensor:
        """[B,N,V], given away: the engine that ran with this is a cycle, and would keep them until it is collected."""
        kept, self._kept = self._kept, self._kept.new_empty(0)
        return kept[:, : self._num_tokens]  # the slot after N took what came before and after

    def __call__(self, model: Decoder, ops: Ops, hidden: Tensor, batch: Batch, sampling: Sampling) -> Tensor:
        newest = logits(model, ops, hidden.index_select(0, batch.last))
        if not hidden.is_meta:
            row, is_there = self._rows(batch, sampling)
            index = batch.positions.index_select(0, batch.last) + 1 - self._lengths[row]
            is_asked = is_there & (index >= 0) & (index < self._num_tokens)
            self._kept[row, index.masked_fill(~is_asked, self._num_tokens)] = newest
        return next_tokens(model, ops, hidden, batch, sampling)

    def _rows(self, batch: Batch, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Which prompt each row of the pass has, and whether it has one."""
        owns = (sampling.noise[:, None] == self._keys) & (batch.count > 0)[:, None]
        return owns.int().argmax(1), owns.any(1)


class PeakBytes(TorchDispatchMode):
    """While it is entered: the most bytes at once of all storages that operators have made."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in given:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))
        return result


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
