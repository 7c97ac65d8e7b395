"""Attention of short rows: one kernel forward, one backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.ops.cuda import train_attention
from eet_lab.ops.cuda.launching import with_options
from eet_lab.parts import Parts
from eet_lab.technique import TrainingKernels


@dataclass(frozen=True)
class ShortAttention(TrainingKernels):
    """Attend to rows of at most 128 tokens, such as sentences and small images, by a kernel of their own.

    The libraries' kernels are made for long rows: they go through queries and keys in tiles of 64 to 128, keep their
    output and the sums of the softmax for the backward pass, and write the gradients of queries, keys and values to
    three places, which PyTorch then copies into one tensor. With it, a block of threads has all scores of a row and a
    head in its registers. It reads queries, keys and values once, where their product left them, and keeps nothing for
    the backward pass, which computes the scores again. That writes the three gradients into one tensor, always with the
    same bits.

    What `attention_dropout` drops here is what plain ops drop: it depends on the seed, the step and the two tokens, and
    the backward pass draws it again. What a decoder's attention to its encoder drops stays the libraries' choice.

    Left to packed attention are longer rows, windows that are shorter than a row, and rows of more than 64 tokens on
    GPUs with less than 128 KiB of shared memory for a block: an A100 has 163, an RTX 4090 has 99. It takes models with
    heads of 64 channels, each with keys of its own and without rotation: GPT-2, OPT, BERT, RoBERTa, BART and ViT.

    Expect a few percent of a step on sentences, and more on images of some 50 patches.

    Source: FlashAttention-2 (Dao, 2023) for the products in registers; ByteTransformer (Zhai et al., 2023) for a
    kernel of short rows.
    """

    name: ClassVar[str] = "short_attention"
    title: ClassVar[str] = "Attention of short rows"
    requires: ClassVar[tuple[str, ...]] = ("pre_padding", "mask_removal", "packed_prefill", "varlen_attention")

    def apply(self, parts: Parts) -> Parts:
        ops = parts.train_ops
        attention = with_options(ops.attention, attend_heads=train_attention.attend_heads)
        return replace(parts, train_ops=replace(ops, attention=attention))
