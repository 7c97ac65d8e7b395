"""Pre-padding: read ragged prompts in one parallel pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.engine import prompts
from eet_lab.parts import Parts
from eet_lab.technique import Technique, knob

READ = {"whole": prompts.right_aligned, "shortest": prompts.up_to_the_shortest}


@dataclass(frozen=True)
class PrePadding(Technique):
    """Pad ragged prompts on the left, so that the whole batch is read in one parallel pass.

    Without it, prompts are read token by token: a prompt of 500 tokens costs 500 steps before its first new token,
    and a longer prompt in the batch keeps the shorter ones waiting for the end. Padded on the left, all prompts end
    in the same column: one pass reads them, and from then on every row generates at every step. The pads cost some
    arithmetic in that pass (their share of the token matrix), and positions are shifted, so that each row sees itself
    start at 0.

    Expect the time to first token to fall from as many steps as the longest prompt has tokens to a single pass, and
    the time per token to stay as it was.

    Source: EET (Li et al., NAACL 2022 industry track), "pre-padding decoding". `read=shortest` is FasterTransformer
    v4.0's way: no pads, in parallel only up to the shortest prompt.
    """

    name: ClassVar[str] = "pre_padding"
    title: ClassVar[str] = "Pre-padding"
    numerics: ClassVar[str] = "reordered"
    headline: ClassVar[bool] = True

    read: str = knob("whole", "How much of the prompts the first pass reads.", choices=READ)

    def apply(self, parts: Parts) -> Parts:
        return replace(parts, prompts=READ[self.read])
