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

    Around a step's layers stand small things: two embeddings are looked up and added, a token is chosen among the
    logits, the canvas and the positions move on. Without it, PyTorch does them in about fifteen launches, which take as
    long as several layers of a small model; a draw is 75 to 130 more, and with top-p it sorts the whole vocabulary.
    With it, they are three.

    Where few rows are decoded, the LM head takes part in the choice: each of its blocks leaves its largest logit, and
    the next launch chooses among those. So a greedy step writes no logits at all. Nor does one with a temperature
    alone: the head adds the random noise that draws a word (an int8 head writes its logits instead).

    With `top_k` no larger than the number of blocks, 132 on an H200, only words as large as the k-th largest of the
    blocks' can be among the k largest. They are few: the launch puts them in order, and reads `top_k` and `top_p` off.
    With a larger `top_k`, with `top_p` alone, or with many rows it sorts nothing, and finds the lowest score that stays
    in passes over the logits, four bits of it in each.

    The noise is the same as without it to the bit, by seed, row and position alone; logits may differ in their last
    bit, where the head is multiplied by another kernel.

    Expect about the same time less for every token, whatever the model: much for a small one, little for a large, and
    several times as much for a draw as for a greedy step.

    Source: Gumbel-max sampling (Kool et al., 2019); sampling without sorting as in FlashInfer (2024); a bound from
    what is known of parts, as in the threshold algorithm (Fagin et al., 2001).
    """

    name: ClassVar[str] = "fused_sampling"
    title: ClassVar[str] = "Fused sampling"
    requires: ClassVar[tuple[str, ...]] = ("fused_kernels",)
    numerics: ClassVar[str] = "reordered"

    def apply(self, parts: Parts) -> Parts:
        ops = replace(parts.ops, embed=cuda.embed, next_token=cuda.next_token, advance=cuda.advance)
        return replace(parts, ops=ops)

    def unavailable(self, device: str = "cpu") -> str | None:
        return native.available(device)
