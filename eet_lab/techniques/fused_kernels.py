"""Fused kernels: five launches a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.ops import cuda, native
from eet_lab.ops.cuda.launching import with_options
from eet_lab.ops.cuda.norm import INTERLEAVED
from eet_lab.parts import Parts
from eet_lab.technique import Technique, knob


@dataclass(frozen=True)
class FusedKernels(Technique):
    """Let one kernel do what several did: norm with its linear, GELU and residual as epilogues, attention in one pass.

    Without it, a layer is about a dozen launches, and every intermediate result is written to memory and read back.
    With it, a decode layer is five: norm + QKV, attention (which also appends to the KV cache), projection + residual,
    norm + FC1 + GELU, FC2 + residual. Batches of up to 16 rows read every weight once, in one launch per linear, where
    that was measured to be faster. A Hopper GPU does so for up to 64 rows in 16 bits. From nine rows on, it runs the
    norms by launches of their own, unless the norm is followed by a gated activation. Longer passes, and very wide
    ones, use cuBLAS and its epilogues for the product, and fuse the rest.

    `norm_rows` is TurboTransformers' batch reduction: a group of warps reduces several rows at a time, which hides the
    latency of each row's reduction behind the others. On an H200 enough warps are active to hide it already: with more
    than one row some widths gain a little, and others lose more.

    An encoder's layer is eight: four products by cuBLAS, two of them with the residual, attention over the whole pass,
    GELU, and two norms.

    The attention kernel works with and without a mask, so that fusing is not credited with mask removal's gain.

    Expect the time per token to fall with the number of launches; more so for small models.

    Source: the fused decoder kernels of FasterTransformer and EET; batch reduction from TurboTransformers (Fang et al.,
    2021); online softmax from FlashAttention (Dao et al., 2022).
    """

    name: ClassVar[str] = "fused_kernels"
    title: ClassVar[str] = "Fused kernels"
    lesson: ClassVar[str] = "04_decode_speed"
    numerics: ClassVar[str] = "reordered"
    stages: ClassVar[tuple[str, ...]] = ("generate", "encode")

    norm_rows: int = knob(
        1,
        "How many rows the norms of a long pass reduce at a time, as TurboTransformers does.",
        label="Rows per reduction",
        unit="rows",
        choices=INTERLEAVED,
    )

    def apply(self, parts: Parts) -> Parts:
        ops = replace(
            parts.ops,
            norm_linear=with_options(cuda.norm_linear, norm_rows=self.norm_rows),
            linear_residual=cuda.linear_residual,
            linear_residual_norm=cuda.linear_residual_norm,
            masked_attention=cuda.masked_attention,
            attention=cuda.attention,
            next_token=cuda.next_token_by_torch,
            embed_norm=cuda.embed_norm,
        )
        return replace(parts, ops=ops)

    def unavailable(self, device: str = "cpu") -> str | None:
        return native.available(device)
