"""Between tokens and activations: the choice of the next token. T tokens, B rows, C channels, V words."""

from __future__ import annotations

from torch import Tensor

from eet_lab.ops import reference
from eet_lab.ops.cuda.launching import needs
from eet_lab.ops.cuda.linear import norm_linear
from eet_lab.ops.types import Empty, Linear, Norm, Sampling, Step


@needs(*norm_linear.kernels)  # type: ignore[attr-defined]
def next_token(x: Tensor, step: Step, norm_w: Norm, head: Linear, sampling: Sampling, *, empty: Empty) -> Tensor:
    """The next token of every row, [B]: the reference's choice among the logits of our norm and head."""
    return reference.next_token(x, step, norm_w, head, sampling, empty=empty, norm_linear=norm_linear)
