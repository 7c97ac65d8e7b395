"""Fused sampling: a launch for each end of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.ops import cuda, native
from eet_lab.parts import Parts
from eet_lab.technique import Technique


@dataclass(frozen=True)
class FusedSampling(Technique):
    """Embed, choose and move on in one launch each.

    A step also does small work before and after its layers: it looks up and adds two embeddings, chooses a token from
    the logits, and advances the token buffer and the positions. Without this technique, PyTorch does that in about
    fifteen launches, which take as long as several layers of a small model. Sampling with a temperature adds 75 to 130
    launches, and with top-p it sorts the whole vocabulary. With this technique, it is three launches.

    Where few rows are decoded, the LM head takes part in the choice: each of its blocks writes its largest logit, and
    the next launch chooses among those. So a greedy step writes no logits at all. Nor does one with a temperature
    alone: the head adds the random noise that samples a token (an int8 head writes its logits instead).

    With `top_k` no larger than the number of blocks, 132 on an H200, the k-th largest of the blocks' maxima is a lower
    bound for the k largest logits. Few tokens reach it: the launch sorts these, and applies `top_k` and `top_p`. With a
    larger `top_k`, with `top_p` alone, or with many rows it does not sort. It finds the threshold by a radix select:
    passes over the logits, four bits in each.

    The noise is the same as without it, bit for bit: it depends on seed, row and position alone. Logits may differ in
    their last bit, where another kernel computes the head.

    Expect every token to take a constant time less, whatever the model: much for a small model, little for a large one,
    and several times as much when sampling as for a greedy step.

    Source: Gumbel-max sampling (Kool et al., 2019); sampling without sorting as in FlashInfer (2024); a bound from
    partial results, as in the threshold algorithm (Fagin et al., 2001).
    """

    name: ClassVar[str] = "fused_sampling"
    title: ClassVar[str] = "Fused sampling"
    lesson: ClassVar[str] = "04_decode_speed"
    requires: ClassVar[tuple[str, ...]] = ("fused_kernels",)
    numerics: ClassVar[str] = "reordered"

    def apply(self, parts: Parts) -> Parts:
        ops = replace(parts.ops, embed=cuda.embed, next_token=cuda.next_token, advance=cuda.advance)
        return replace(parts, ops=ops)

    def unavailable(self, device: str = "cpu") -> str | None:
        return native.available(device)
