"""Batched cross attention: the keys and values of all decoder layers by one product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.models import seq2seq
from eet_lab.models.config import Config, Seq2SeqConfig
from eet_lab.parts import Parts
from eet_lab.technique import Technique


@dataclass(frozen=True)
class BatchedCrossAttention(Technique):
    """Make the keys and values that all decoder layers look at by one product over what the encoder has read.

    Each layer of a decoder looks at the same hidden states of the encoder, with weights of its own. Without this
    technique that is a norm and a product for each layer, and in the backward pass two products for each and a sum
    over layers. With it, the weights are put beside each other: one norm and one product, forward, and two, backward,
    whose sums run over all layers. The keys and values of a layer are views of the result.

    Copying the weights together costs reading and writing them once a pass. Expect short sources to gain, whose
    products are too small for the GPU, and long ones to stay as they were.

    Source: LightSeq2 (Wang et al., SC 2022), "layer-batched cross attention".
    """

    name: ClassVar[str] = "batched_cross_attention"
    title: ClassVar[str] = "Batched cross attention"
    numerics: ClassVar[str] = "reordered"
    stages: ClassVar[tuple[str, ...]] = ("train",)

    def apply(self, parts: Parts) -> Parts:
        return replace(parts, cross_kv=seq2seq.all_layers_at_once)

    def unfit(self, config: Config) -> str | None:
        if isinstance(config, Seq2SeqConfig):
            return super().unfit(config)
        return "only encoder-decoders have cross attention, and this model is none"
