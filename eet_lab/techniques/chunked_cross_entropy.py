"""Chunked cross entropy: the loss without the logits of a whole batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.parts import Parts, losses
from eet_lab.technique import Technique, knob


@dataclass(frozen=True)
class ChunkedCrossEntropy(Technique):
    """Take the loss and its gradient a few tokens at a time, so that the logits of a batch never exist together.

    Without it, a step of training writes the logits of all its tokens [tokens, vocabulary] in fp32 and keeps them for
    the backward pass: 3.3 GB for 16,384 tokens of GPT-2, more than all its weights, gradients and moments. With it, the
    logits of `chunk` tokens are made, their loss and its gradient are taken, and they are gone. Nothing is computed
    twice; kept are the gradients of the hidden states and of the head's weights, the latter in fp32: on a GPU, with
    PyTorch 2.10 or newer, the product of each chunk is added to it in one pass. Products of GPT-2's 50,257 words would
    take longer than those of a multiple of 64, so the head's last words are multiplied apart, with rows of zeros beside
    them (0.1 MB).

    Expect the peak of a step's memory to fall by nearly all of its logits, and the time to stay as it was, or to fall
    where memory was the limit. Very small chunks cost time: each is a product of few rows, and adds to the gradient of
    the whole head.

    Source: the fused linear cross entropy of Liger-Kernel (Hsu et al., 2024); LightSeq2 (Wang et al., SC 2022) for a
    criterion that keeps no probabilities.
    """

    name: ClassVar[str] = "chunked_cross_entropy"
    title: ClassVar[str] = "Chunked cross entropy"
    numerics: ClassVar[str] = "reordered"
    stages: ClassVar[tuple[str, ...]] = ("train",)
    lesson: ClassVar[str] = "08_fast_training"

    chunk: int = knob(
        2048, "How many tokens' logits exist at a time.", label="Chunk", unit="tokens", low=1, high=1048576
    )

    def apply(self, parts: Parts) -> Parts:
        return replace(parts, loss=losses.Chunked(self.chunk))
