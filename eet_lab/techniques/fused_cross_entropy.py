"""Fused cross entropy: a kernel that reads the logits once, and writes their gradient over them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from eet_lab.errors import RecipeError
from eet_lab.ops.cuda.launching import with_options
from eet_lab.parts import Parts, losses
from eet_lab.technique import TrainingKernels


@dataclass(frozen=True)
class FusedCrossEntropy(TrainingKernels):
    """Take the cross entropy of logits in a kernel that reads them once, and write their gradient over them.

    Without it, PyTorch makes a copy of the logits [tokens, vocabulary] in fp32 and writes the logarithms of all
    probabilities, which it keeps: the backward pass reads them and writes a gradient, which is then rounded to 16 bits.
    With it, the forward pass reads the 16-bit logits once: the maximum and the sum of exponentials are kept up to date
    while they pass by, and the smoothing of labels needs one more sum. It keeps two numbers a row. The backward pass
    reads the logits once more and writes their gradient in their place.

    With `chunked_cross_entropy` beside it, loss and gradient are one launch for each chunk. A row of logits waits in
    shared memory for its sum, so it is read from memory once, and written once.

    Expect the loss to take as long as its traffic, a fraction of PyTorch's, and the peak of memory to fall by the
    copies in fp32. What remains of the head's time are its three products.

    Source: LightSeq2's criterion (Wang et al., SC 2022); online softmax (Milakov and Gimelshein, 2018); the gradient in
    the logits' place as in Liger-Kernel (Hsu et al., 2024).
    """

    name: ClassVar[str] = "fused_cross_entropy"
    title: ClassVar[str] = "Fused cross entropy"
    wraps: ClassVar[bool] = True

    def apply(self, parts: Parts) -> Parts:
        loss: Any = parts.loss
        if "cross_entropy" not in inspect.signature(loss).parameters:
            raise RecipeError(
                f"{self.name} is for losses that take a cross entropy by the keyword `cross_entropy`, and {loss!r:.60} "
                "does not. Leave one of them out."
            )
        return replace(parts, loss=with_options(loss, cross_entropy=losses.fused_cross_entropy))
