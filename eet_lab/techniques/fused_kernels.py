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

    Without it, a layer is about a dozen launches, and every intermediate result travels to memory and back. With it,
    a decode layer is five: norm + QKV, attention (which also appends to the KV cache), projection + residual, norm +
    FC1 + GELU, FC2 + residual. Batches of up to 16 rows read every weight once, in one launch a linear, where that was
    measured to be faster; longer passes, and very wide ones, leave the product to cuBLAS, with what that adds itself,
    and fuse the rest.

    `norm_rows` is TurboTransformers' batch reduction: a team of warps reduces several rows at a time, so that the steps
    of one hide behind those of the others. On an H200 the many warps at work hide them already: with more than one row
    some widths gain a little, and others lose more.

    Attention exists here with and without a mask, so that fusing is not credited with mask removal's gain.

    Expect the time per token to fall with the number of launches; more so for small models.

    Source: the fused decoder kernels of FasterTransformer and EET; batch reduction from TurboTransformers (Fang et al.,
    2021); online softmax from FlashAttention (Dao et al., 2022).
    """

    name: ClassVar[str] = "fused_kernels"
    title: ClassVar[str] = "Fused kernels"
    numerics: ClassVar[str] = "reordered"

    norm_rows: int = knob(1, "Rows that a long pass's norms reduce at a time.", choices=INTERLEAVED)

    def apply(self, parts: Parts) -> Parts:
        ops = replace(
            parts.ops,
            norm_linear=with_options(cuda.norm_linear, norm_rows=self.norm_rows),
            linear_residual=cuda.linear_residual,
            masked_attention=cuda.masked_attention,
            attention=cuda.attention,
            next_token=cuda.next_token_by_torch,
        )
        return replace(parts, ops=ops)

    def unavailable(self, device: str = "cpu") -> str | None:
        return native.available(device)
