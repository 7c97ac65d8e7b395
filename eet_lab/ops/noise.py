"""Noise that is keyed: the same numbers for the same key, in whatever layout, pass or recipe they are drawn.

T tokens, B rows, C channels, H heads, Q queries and K keys of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Whole = TypeVar("Whole", int, Tensor)

SEVERAL = 2**31
"""How many hashes there are."""


def mix(x: Whole) -> Whole:
    """A 31-bit integer hash: two rounds of multiply and xorshift. Constants: Chris Wellons, "hash-prospector"."""
    x = x & 0x7FFFFFFF
    for multiplier in (0x2C1B3C6D, 0x297A2D39):
        x = ((x ^ (x >> 15)) * multiplier) & 0x7FFFFFFF
    return x ^ (x >> 15)


def noise_key(seed: int, row: Whole) -> Whole:
    """What the noise of a row is drawn from, or of several [B] int64: it depends on (seed, row) alone."""
    return mix(mix(mix(seed) + (seed >> 31)) + row)


def noise_keys(seed: int, num_rows: int, device: torch.device | str = "cpu") -> Tensor:
    """The same of so many rows, [B] int64."""
    return noise_key(seed, torch.arange(num_rows, device=device))


def gumbel(noise: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Gumbel noise [B,V] that depends on (noise key [B], position [B], token) alone, whatever the batch's layout."""
    key = mix(noise + positions)
    bits = mix(key[:, None] + torch.arange(num_tokens, device=key.device)) & 0x7FFFFF
    uniform = (bits.float() + 0.5) * 2.0**-23  # 23 bits: one more would round up to 1, whose noise is infinite
    return uniform.log_().neg_().log_().neg_()


class Noise(NamedTuple):
    """What one call of a pass drops: element [t,c] is drawn from mix(tokens[t] + call) and c."""

    tokens: Tensor  # [T] int64 keys
    call: int
    p: float  # the share that is dropped


class Dropout:
    """What one training pass drops.

    An element's noise depends on (seed, step, sequence, position, call, channel) alone: a batch loses the same numbers
    padded and packed, whole and in parts, and the backward pass draws them again instead of keeping a mask. `p` is the
    share of hidden states, `attention_p` that of attention's weights; `tokens` [T] are the keys of `token_keys`. An
    attention that leaves it to a library (`library_noise`) is a call, too.

    Source: counter-based noise as in Philox (Salmon et al., 2011), which PyTorch's compiler draws again in the backward
    pass, too.
    """

    def __init__(self, p: float, attention_p: float, tokens: Tensor, positions: Tensor) -> None:
        self.p, self.attention_p, self.tokens, self.positions = p, attention_p, tokens, positions
        self._num_calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states [T,C], of which some are 0 and the rest grow."""
        noise = self.noise()
        if noise is None:
            return x
        channels = torch.arange(x.shape[-1], device=x.device)
        return _Dropped.apply(x, mix(noise.tokens + noise.call)[:, None], channels, noise.p)

    def noise(self) -> Noise | None:
        """What the next call drops, for a kernel that drops on its way; None: nothing."""
        if not self.p:
            return None
        self._num_calls += 1
        return Noise(self.tokens, self._num_calls, self.p)

    def of_attention(self) -> Callable[..., Tensor] | None:
        """What the next attention drops of its weights, wherever it computes them; None: nothing.

        It takes weights [B,H,Q,K] of tokens [B,Q] of the pass among each other, or for keys of positions [B,K].
        """
        drawn = self.attention_noise()
        if drawn is None:
            return None
        noise = mix(drawn.tokens + drawn.call)  # without a mix, neighbours would share their noise

        def dropped(weights: Tensor, tokens: Tensor, keys: Tensor | None = None) -> Tensor:
            positions = self.positions[tokens] if keys is None else keys
            heads = torch.arange(weights.shape[1], device=weights.device)
            rows = mix(noise[tokens][:, None] + heads[:, None])[..., None]
            return _Dropped.apply(weights, rows, positions[:, None, None], drawn.p)

        return dropped

    def attention_noise(self) -> Noise | None:
        """What the next attention drops, for a kernel that drops on its way; None: nothing.

        Weight [h,t,k] is drawn from mix(mix(tokens[t] + call) + h) and the key's position k.
        """
        if not self.attention_p:
            return None
        self._num_calls += 1
        return Noise(self.tokens, self._num_calls, self.attention_p)


all_kept = Dropout(0.0, 0.0, torch.empty(0), torch.empty(0))
"""The dropout of everything but training: none."""


class _Dropped(torch.autograd.Function):
    """x where its noise is not below p, over 1 - p; element [i,j] is drawn from rows [i] and columns [j]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, columns: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(rows, columns)
        ctx.p = p
        return _dropped(x, rows, columns, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns = ctx.saved_tensors
        return _dropped(grads[0], rows, columns, ctx.p), None, None, None


def _dropped(x: Tensor, rows: Tensor, columns: Tensor, p: float) -> Tensor:
    kept = mix(rows + columns) >= int(p * SEVERAL)
    return torch.where(kept, x * (1 / (1 - p)), 0)


def token_keys(start: Whole, sequences: Tensor, positions: Tensor) -> Tensor:
    """What tokens' noise is drawn from, [T] int64, by the number of a token's sequence [T] and its position [T].

    `start` is the `noise_key` of a seed and a step.
    """
    return mix(mix(start + sequences) + positions)


@contextmanager
def library_noise(key: int, device: torch.device) -> Iterator[None]:
    """What PyTorch's own calls draw meanwhile follows from the key, in their order; replayed graphs draw the same.

    Whoever draws afterwards draws as if nothing had been drawn.
    """
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    before = generator.get_state()
    generator.manual_seed(key)
    try:
        yield
    finally:
        generator.set_state(before)
