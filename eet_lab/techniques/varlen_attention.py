"""Packed attention: one call for all texts of a pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.ops import varlen
from eet_lab.ops.cuda.launching import with_options
from eet_lab.parts import Parts, attend
from eet_lab.technique import Technique


@dataclass(frozen=True)
class VarlenAttention(Technique):
    """Attend to all texts of a packed batch by one call, forward and backward, whatever their lengths.

    Without it, plain PyTorch has a call for each text, and for neighbours of the same length: a layer over 64 ragged
    texts launches hundreds of kernels, most of them too small for the GPU, and copies each result to its place. With
    it, texts of different lengths are read by flash attention, which is told where each begins (`cu_seqlens`, made
    once a pass). Texts of the same length are a rectangle, and so is a batch of images: they get PyTorch's dense call,
    with cuDNN's attention first on Hopper. Queries, keys and values are read where their product left them; their
    gradients are copied once, beside each other.

    It computes in float16 and bfloat16. What `attention_dropout` drops is the libraries' choice, which the seed and the
    step repeat, and not that of plain ops: it changes with the layout of a batch. T5 adds a bias to its scores, which
    no such call takes.

    Expect ragged batches to gain most, where the host launches more slowly than the GPU works.

    Source: FlashAttention-2 (Dao, 2023); Effective Transformer (ByteDance, 2020) for batches without pads.
    """

    name: ClassVar[str] = "varlen_attention"
    title: ClassVar[str] = "Packed attention"
    requires: ClassVar[tuple[str, ...]] = ("pre_padding", "mask_removal", "packed_prefill")
    numerics: ClassVar[str] = "reordered"
    stages: ClassVar[tuple[str, ...]] = ("train",)

    def apply(self, parts: Parts) -> Parts:
        ops = replace(
            parts.train_ops,
            attention=with_options(parts.train_ops.attention, attend_rows=varlen.attend_packed),
            cross_attention=with_options(parts.train_ops.cross_attention, attend_rows=varlen.attend_packed),
        )
        return replace(parts, attend=attend.Packed, train_ops=ops)

    def unavailable(self, device: str = "cpu") -> str | None:
        return varlen.unavailable(device)
