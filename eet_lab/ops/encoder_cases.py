"""Cases of what encoders ask of the ops: no cache, no norm before a linear, a norm behind a residual.

T tokens, B rows, C channels, N outputs, V vocabulary, S positions, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eet_lab.ops import reference
from eet_lab.ops.cases import Case, CaseFailed
from eet_lab.ops.shapes import AttentionShape, LinearShape, Normal, Shape
from eet_lab.ops.token_cases import EmbedShape
from eet_lab.ops.types import Batch, Empty, Linear, Norm, fresh


@dataclass(frozen=True)
class NormedLinearShape(LinearShape):
    """A linear layer of tokens that are normed already, or one with the norm behind its residual."""

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What norm_linear takes without a norm, or linear_residual_norm."""
        normal = Normal(device, dtype, seed)
        x = normal(self.T, self.C) + self.mean
        w = Linear(normal(self.N, self.C, scale=self.C**-0.5), normal(self.N) if self.bias else None)
        if not self.residual:
            return x, None, w, self.act
        return x, w, normal(self.T, self.N), Norm(normal(self.N) + 1, None if self.rms else normal(self.N), 1e-12)


@dataclass(frozen=True)
class EmbedNormShape(EmbedShape):
    """The same with token types, of which there may be none, or all may be 0."""

    types: int = 2
    told: bool = True

    def __str__(self) -> str:
        return f"{super().__str__()}/types{self.types}" + "/told" * self.told

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What embed_norm takes."""
        ids, positions, tokens, places = super().inputs(device, dtype, seed)
        normal = Normal(device, dtype, seed + 1)
        types = torch.randint(self.types, (self.T,), generator=normal.source).to(device) if self.told else None
        kinds = normal(self.types, self.C) if self.types else None
        return ids, positions, types, tokens, places, kinds, Norm(normal(self.C) + 1, normal(self.C), 1e-12)


@dataclass(frozen=True)
class TextsShape(Shape):
    """Texts of `lengths` tokens whose tokens see each other, packed or with pads on the left."""

    lengths: tuple[int, ...]
    H: int
    D: int
    G: int = 0  # 0: as many as heads
    packed: bool = False
    masked: bool = False
    causal: bool = False
    window: int | None = None

    def __str__(self) -> str:
        words = "/packed" * self.packed + "/causal" * self.causal + (f"/window{self.window}" if self.window else "")
        grouped = f"g{self.G}" if self.G else ""
        return f"b{len(self.lengths)}/s{min(self.lengths)}-{max(self.lengths)}/h{self.H}{grouped}/d{self.D}{words}"

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What attention takes without a cache, and with a mask what masked_attention takes besides."""
        shape = AttentionShape(self.lengths, self.H, self.G or self.H, self.D, packed=self.packed)
        batch, spec = shape.batch(device), shape.spec._replace(causal=self.causal, window=self.window)
        qkv = Normal(device, dtype, seed)(len(batch.ids), (self.H + 2 * (self.G or self.H)) * self.D)
        mask = (reference.dense_mask(batch, spec, qkv, empty=fresh),) if self.masked else ()
        return qkv, None, batch, spec, *mask

    def read_bytes(self, itemsize: int) -> int:
        """Queries, keys and values in, and what is mixed out."""
        return itemsize * self.D * 2 * (self.H + (self.G or self.H)) * sum(self.lengths)


@dataclass(frozen=True)
class TextsCase(Case):
    """Only real tokens count; a pad's own output is 0, or finite with a mask."""

    def call(self, op: Callable[..., Tensor], inputs: tuple[Any, ...], empty: Empty) -> Tensor:
        """The outputs of real tokens."""
        return super().call(op, inputs, empty)[_is_real(inputs[2])]

    def check(
        self, op: Callable[..., Tensor], shape: Shape, device: str, dtype: torch.dtype, seed: int = 0
    ) -> tuple[float, float]:
        """And what pads get."""
        inputs = shape.inputs(device, dtype, seed)
        self.poison(inputs)
        pads = super().call(op, inputs, fresh)[~_is_real(inputs[2])]
        if not bool((pads.isfinite() if self.op == "masked_attention" else pads == 0).all()):
            raise CaseFailed(f"{self.name}: a pad's own output is {pads.abs().max()}.")
        return super().check(op, shape, device, dtype, seed)

    def poison(self, inputs: tuple[Any, ...]) -> None:
        """Put NaN into pads, where attention without a mask must not look."""
        qkv, batch = inputs[0], inputs[2]
        if self.op == "attention":
            qkv.masked_fill_(~_is_real(batch)[:, None], torch.nan)


def _is_real(batch: Batch) -> Tensor:
    """Which tokens are no pads."""
    return batch.columns >= batch.keys.begin[batch.rows]


RAGGED = (64, 37, 37, 37, 1, 1, 20)  # neighbours of the same length, and rows alone
TEXTS = tuple(
    TextsShape(lengths, H, D, G)
    for lengths in (RAGGED, (5,), (1, 1), (16, 16, 16), (3, 9, 2))
    for H, D, G in ((12, 64, 0), (4, 8, 2))
)


def _texts(causal: Sequence[bool] = (False, True), **changes: Any) -> tuple[TextsShape, ...]:
    return tuple(TextsShape(s.lengths, s.H, s.D, s.G, causal=each, **changes) for s in TEXTS for each in causal)


def _long(**changes: Any) -> tuple[TextsShape, ...]:
    """Several blocks of queries, tiles of keys that are full and that are not; other head dims."""
    lengths = (300, 64, 65, 512, 1, 511)
    return tuple(TextsShape(lengths, *heads, **changes) for heads in ((2, 64), (2, 80), (1, 256), (4, 40, 2), (2, 32)))


BOTH_WAYS, CAUSAL = (False,), (True,)
WINDOWED = (
    *(shape for packed in (False, True) for shape in _texts(CAUSAL, window=5, packed=packed)),
    *(shape for packed in (False, True) for shape in _long(causal=True, window=70, packed=packed)),
)
WIDTHS = ((1, 64), (5, 96), (12, 64), (33, 768), (70, 96), (0, 64))

ENCODER_CASES = (
    Case(
        "embed_norm",
        "embed_norm",
        (
            *(EmbedNormShape(T, C) for T, C in WIDTHS),
            *(EmbedNormShape(7, 64, types=types, told=False) for types in (0, 1, 2)),
        ),
        launches=2,
    ),
    Case(
        "linear",
        "norm_linear",
        tuple(NormedLinearShape(T, 3 * C, C, act) for T, C in WIDTHS for act in (None, "gelu", "tanh", "relu")),
    ),
    Case(
        "linear_residual_norm",
        "linear_residual_norm",
        tuple(
            NormedLinearShape(T, C, inner, residual=True, rms=rms, mean=mean)
            for T, C in WIDTHS
            for inner, rms, mean in ((C, False, 1), (4 * C, False, 100), (C, True, 1))
        ),
        launches=2,
    ),
    TextsCase(
        "texts_attention", "attention", (*_texts(), *_texts(packed=True), *_long(), *_long(packed=True), *WINDOWED)
    ),
    TextsCase("texts_masked_attention", "masked_attention", (*_texts(masked=True), *_long(masked=True))),
)
PLAIN_ENCODER_CASES = (
    TextsCase(
        "texts_window_attention", "attention", (*_texts(BOTH_WAYS, window=5), *_texts(BOTH_WAYS, window=5, packed=True))
    ),
    TextsCase("texts_masked_window_attention", "masked_attention", _texts(BOTH_WAYS, window=5, masked=True)),
)
"""What has no kernels."""
