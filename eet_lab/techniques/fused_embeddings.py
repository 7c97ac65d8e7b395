"""Fused embeddings: one launch forward, and gradients of the tables that are the same in every run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.ops.cuda import train_embedding, train_epilogue
from eet_lab.ops.cuda.launching import with_options
from eet_lab.parts import Parts
from eet_lab.technique import TrainingKernels


@dataclass(frozen=True)
class FusedEmbeddings(TrainingKernels):
    """Add a token's embeddings in one launch, and the gradients of each table's rows in the order of the tokens.

    Without it, token, position and type embedding, their scale and dropout are up to seven launches, and the gradients
    of a table are added up by atomics, in another order each time. With it, the tokens are sorted by the row of the
    table that they read. Each 32 of them are added up by one warp in fp32, and a second launch joins the sums of rows
    that more tokens have read: so a word that is everywhere takes no longer than others, and two runs are equal to the
    bit. What dropout dropped is drawn again. Padding is not trained.

    Expect launches to go more than time: embeddings are a small part of a step.

    Source: LightSeq2's embedding (Wang et al., SC 2022), without its atomics; sorted segments as in PyTorch's
    deterministic backward pass.
    """

    name: ClassVar[str] = "fused_embeddings"
    title: ClassVar[str] = "Fused embeddings"

    def apply(self, parts: Parts) -> Parts:
        ops, fused = parts.train_ops, train_embedding.embedded
        normed = with_options(ops.embed_norm, embedded=fused, dropped=train_epilogue.dropped)
        return replace(parts, train_ops=replace(ops, embed=with_options(ops.embed, embedded=fused), embed_norm=normed))
