"""Cases of attention to sources. They have no kernels yet.

T tokens, S source tokens, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from eet_lab.ops import reference
from eet_lab.ops.cases import Case
from eet_lab.ops.shapes import AttentionShape, Normal, Shape
from eet_lab.ops.types import fresh


@dataclass(frozen=True)
class CrossShape(Shape):
    """Rows of `lengths` tokens whose sources have `sources` tokens; both packed, or with pads on the left."""

    lengths: tuple[int, ...]
    sources: tuple[int, ...]
    H: int
    G: int
    D: int
    packed: bool = False
    masked: bool = False

    def __str__(self) -> str:
        sizes = f"b{len(self.lengths)}/s{max(self.sources)}/q{max(self.lengths)}"
        return f"{sizes}/h{self.H}g{self.G}/d{self.D}" + "/packed" * self.packed + "/masked" * self.masked

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What cross_attention takes, and a mask besides."""
        of_queries, of_sources = (
            AttentionShape(lengths, self.H, self.G, self.D, packed=self.packed)
            for lengths in (self.lengths, self.sources)
        )
        batch, source, normal = of_queries.batch(device), of_sources.batch(device), Normal(device, dtype, seed)
        q = normal(len(batch.ids), self.H * self.D)
        keys, values = (normal(len(source.ids), self.G, self.D) for _ in range(2))
        mask = reference.cross_mask(source, q, empty=fresh) if self.masked else None
        return q, (keys, values), batch, source, of_queries.spec._replace(causal=False), mask

    def read_bytes(self, itemsize: int) -> int:
        """Keys, values, queries and outputs, each once."""
        return itemsize * self.D * 2 * (self.G * sum(self.sources) + self.H * sum(self.lengths))


class CrossCase(Case):
    """Cross attention, whose sources have pads."""

    def poison(self, inputs: tuple[Any, ...]) -> None:
        """NaN in pads of sources, where there is no mask over them."""
        _, kv, _, source, _, mask = inputs
        if mask is None:
            for part in kv:
                real = torch.zeros(len(part), dtype=torch.bool)
                for first, count in source.spans:
                    real[first : first + count] = True
                part[~real.to(part.device)] = torch.nan


CROSS_CASES = (
    CrossCase(
        "cross_attention",
        "cross_attention",
        (
            CrossShape((1, 1, 1), (5, 9, 2), 4, 4, 8),
            CrossShape((3, 1, 3, 7), (9, 9, 4, 1), 6, 2, 8),
            CrossShape((3, 1, 3, 3), (9, 4, 4, 4), 4, 4, 12, packed=True),
        ),
    ),
    CrossCase("masked_cross_attention", "cross_attention", (CrossShape((3, 1, 3), (9, 2, 4), 6, 2, 8, masked=True),)),
)
