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
    long as several layers of a small model; a draw with top-p sorts the whole vocabulary besides. With it, they are
    three.

    Where few rows are decoded, the LM head takes part in the choice: each of its blocks leaves its largest logit, and
    the next launch chooses among those. So an arg-max writes no logits at all, nor does a draw from all words, whose
    noise the head adds (but for an int8 head, which writes its logits).

    With a top-k of no more words than there are blocks, 132 on an H200, the k-th largest of these is a bound: the few
    words that reach it are put in order, and top-k and top-p are read off. With a larger one, more rows, or top-p alone
    nothing is sorted: the lowest score that stays is found digit by digit, a pass over the logits for every four bits.

    The noise is the same as without it to the bit, by seed, row and position alone; logits may differ in their last
    bit, where the head is multiplied by another kernel.

    Expect about the same time less for every token, whatever the model: much for a small one, little for a large.

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
