"""Pre-padding: read ragged prompts in one parallel pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.models.config import Config
from eet_lab.parts import Parts
from eet_lab.parts.passes import padded
from eet_lab.scheduling import LEFT_PADDED, UP_TO_THE_SHORTEST
from eet_lab.technique import Technique, knob

READ = {"whole": LEFT_PADDED, "shortest": UP_TO_THE_SHORTEST}


@dataclass(frozen=True)
class PrePadding(Technique):
    """Pad ragged prompts on the left, so that the whole batch is read in one parallel pass.

    Without it, prompts are read token by token: a prompt of 500 tokens costs 500 steps before its first new token,
    and the batch is not done until its longest prompt has been read and continued. Padded on the left, all prompts end
    in the same column: one pass reads them, and from then on every row generates at every step. The pads cost some
    arithmetic in that pass (their share of the token matrix), and positions are shifted, so that each row starts at
    position 0.

    Expect the time to first token to fall from as many steps as the longest prompt has tokens to a single pass, and
    the time per token to stay as it was.

    An encoder reads a text in one pass in any case. Without this technique, each text is a pass of its own; with it, as
    many texts as fit into a batch share one. Training reads whole texts as well, and likewise.

    Source: EET (Li et al., NAACL 2022 industry track), "pre-padding decoding". `read=shortest` is FasterTransformer
    v4.0's way: no pads, in parallel only up to the shortest prompt.
    """

    name: ClassVar[str] = "pre_padding"
    title: ClassVar[str] = "Pre-padding"
    lesson: ClassVar[str] = "01_pre_padding"
    numerics: ClassVar[str] = "reordered"
    stages: ClassVar[tuple[str, ...]] = ("generate", "encode", "seq2seq", "train")
    headline: ClassVar[bool] = True

    read: str = knob(
        "whole",
        "How much of the prompts the first pass reads.",
        label="First pass reads",
        choices=READ,
        words={"whole": "whole prompts", "shortest": "up to the shortest prompt"},
    )

    def apply(self, parts: Parts) -> Parts:
        return replace(parts, schedule=READ[self.read], texts=padded)

    def unfit(self, config: Config) -> str | None:
        if config.stage != "generate" and self.read != "whole":
            reader = "training" if config.stage == "train" else "an encoder"
            return f"read=shortest reads the rest token by token, and {reader} needs whole texts; choose read=whole"
        return super().unfit(config)
