"""Fused norms: one launch forward, two backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.ops.cuda import train_norm
from eet_lab.ops.cuda.launching import with_options
from eet_lab.parts import Parts
from eet_lab.technique import TrainingKernels


@dataclass(frozen=True)
class FusedNorms(TrainingKernels):
    """Take the gradient of a layer norm, or an RMS norm, in one pass over its rows, with two independent sums a row.

    Without it, PyTorch reads the rows once for the gradient of what was normed and once more for those of weight and
    bias, and at 512 to 1,024 channels most of the GPU has nothing to do meanwhile. With it, one to three blocks on each
    multiprocessor walk down the rows: both sums of a row are reduced at once, and what the row adds to weight and bias
    stays in registers. Each block leaves one row of those, and a second launch adds these rows up, always in the same
    order. Kept from the forward pass are the rows as they came, with their mean and scale in fp32, 8 bytes a row; so a
    weight of 0 loses no gradient.

    What a pre-norm layer norms goes on as a residual, too, and PyTorch adds the two gradients by a launch of its own.
    With it, the norm's kernel reads the residual's gradient as well and adds it, in fp32, before it rounds once.

    Expect the norms' backward pass to come near the memory's bandwidth, which is a few percent of a step.

    Source: LightSeq2 (Wang et al., SC 2022) for the two sums; two stages for weight and bias as in Apex and
    Liger-Kernel.
    """

    name: ClassVar[str] = "fused_norms"
    title: ClassVar[str] = "Fused norms"

    def apply(self, parts: Parts) -> Parts:
        ops = parts.train_ops
        changed = {
            name: with_options(getattr(ops, name), norm=train_norm.norm)
            for name in ("norm_linear", "linear_residual_norm", "embed_norm")
        }
        return replace(parts, train_ops=replace(ops, **changed))
