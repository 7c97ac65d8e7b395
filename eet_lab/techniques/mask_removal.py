"""Mask removal: bounds instead of a mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.parts import Parts
from eet_lab.parts.attend import Bounds
from eet_lab.technique import Technique


@dataclass(frozen=True)
class MaskRemoval(Technique):
    """Tell attention how many pads a row has, instead of adding a mask to every score.

    Without it, each step builds a mask [batch, 1, queries, keys]. Every layer computes all scores, pads and future
    included, and adds the mask so that softmax gives the unwanted ones a weight of 0. With it, a query's keys run from
    the row's first real token to the query's own column: no mask is built or read, and keys and values of pads are
    never loaded.

    Without `pre_padding` there are no pads, and only the mask's own cost is saved. Plain PyTorch needs one call for
    each number of pads in the batch, which can cost more than the mask did; the kernel of `fused_kernels` needs one
    call.

    Source: EET (Li et al., NAACL 2022 industry track), "mask fusion".
    """

    name: ClassVar[str] = "mask_removal"
    title: ClassVar[str] = "Mask removal"
    lesson: ClassVar[str] = "02_mask_removal"
    numerics: ClassVar[str] = "reordered"
    stages: ClassVar[tuple[str, ...]] = ("generate", "encode", "seq2seq", "train")
    headline: ClassVar[bool] = True

    def apply(self, parts: Parts) -> Parts:
        return replace(parts, attend=Bounds)
