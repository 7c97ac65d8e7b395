"""Margins: how far another choice of a token is from what precise logits would have chosen.

V words. All margins are in units of the logits, so that they can be held against what rounding does to those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eet_lab.engine.settings import Settings
from eet_lab.ops.reference import gumbel, noise_keys


def greedy_margin(logits: Tensor, token: int) -> float:
    """How far below the best word `token` lies; logits [V]."""
    return (logits.max() - logits[token]).item()


def drawn_margin(logits: Tensor, token: int, noise: Tensor, settings: Settings, slack: float) -> float:
    """How far `token` lies below the word that a draw must take: logits [V], Gumbel noise [V].

    Two logits may move against each other by `slack`. Words that this lets in or out of the top-k or the top-p are
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
    """Words [V] that top-k and top-p may keep, and those that they must, where scores may move by `slack`."""
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
        least = mass[torch.searchsorted(-ordered, -(scores + slack))]  # of the words that are above in any case
        most = mass[torch.searchsorted(-ordered, -(scores - slack), right=True)] - inside.softmax(-1)
        # A share P moves by P (1 - P) <= 1/4 of what its log odds move; twice, as words at the top-k's end come and go.
        moved = slack / 2
        possible, certain = possible & (least - moved < p), certain & (most + moved < p)
    return possible, certain
