"""Packed prefill: prompts end to end, and no pad in any product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.errors import RecipeError
from eet_lab.parts import Parts, passes
from eet_lab.scheduling import PACKED, UP_TO_THE_SHORTEST
from eet_lab.technique import Technique


@dataclass(frozen=True)
class PackedPrefill(Technique):
    """Read ragged prompts end to end, so that the first pass computes real tokens and nothing else.

    Without it, the first pass is a rectangle, batch times longest prompt: attention skips the pads (`mask_removal`),
    but every norm, matrix product and activation computes them, and their results are thrown away. With it, the pass
    has as many tokens as the prompts together; attention gets the start and the length of each prompt. No row has pads
    any more: each begins in column 0 of the KV cache, and a later step reads as many columns of it as before.

    Expect the time to first token to fall by the pads' share of the rectangle, about a half where lengths are spread
    evenly from short to long, and the first pass's memory with it. Prompts of equal length have no pads, and gain
    nothing. Encoders and training do nothing but such passes, and gain the pads' share of all their time.

    Source: Effective Transformer (ByteDance, 2020); TurboTransformers' smart batching (Fang et al., 2021);
    variable-length attention over cu_seqlens as in FlashAttention (Dao et al., 2022).
    """

    name: ClassVar[str] = "packed_prefill"
    title: ClassVar[str] = "Packed prefill"
    lesson: ClassVar[str] = "02_mask_removal"
    requires: ClassVar[tuple[str, ...]] = ("pre_padding", "mask_removal")
    numerics: ClassVar[str] = "reordered"
    stages: ClassVar[tuple[str, ...]] = ("generate", "encode", "seq2seq", "train")

    def apply(self, parts: Parts) -> Parts:
        if parts.schedule == UP_TO_THE_SHORTEST:
            raise RecipeError(
                "packed_prefill cannot be combined with pre_padding:read=shortest, which has no pads to leave out. "
                "Choose read=whole, or leave packed_prefill out."
            )
        return replace(parts, schedule=PACKED, texts=passes.packed)
