"""Fused residuals: bias, dropout and residual in one launch, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.ops.cuda import train_epilogue
from eet_lab.ops.cuda.launching import with_options
from eet_lab.parts import Parts
from eet_lab.technique import TrainingKernels


@dataclass(frozen=True)
class FusedResiduals(TrainingKernels):
    """Let one kernel add a linear layer's bias, apply dropout, and add the residual.

    Without it, dropout by key is a dozen launches over 64-bit numbers [tokens, channels], and the backward pass makes
    them again. With it, the noise is drawn in registers, from the same keys: the very same numbers are dropped. Nothing
    is kept for the backward pass, which draws them again and sums the bias's gradient in the same kernel, by rows of
    column sums that a second launch adds up in a fixed order. The residual's gradient is the one that came, not a copy.

    Expect a step with dropout to take little longer than one without, and one without dropout to gain the two trips
    through memory of a bias and its gradient.

    Source: LightSeq2 (Wang et al., SC 2022); counter-based noise as in Philox (Salmon et al., 2011).
    """

    name: ClassVar[str] = "fused_residuals"
    title: ClassVar[str] = "Fused residuals"

    def apply(self, parts: Parts) -> Parts:
        ops, fused = parts.train_ops, train_epilogue.linear_residual
        behind = with_options(ops.linear_residual_norm, linear_residual=fused)
        return replace(parts, train_ops=replace(ops, linear_residual=fused, linear_residual_norm=behind))
