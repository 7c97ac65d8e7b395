"""The residuals of pre-norm layers in training: a norm's backward pass adds their gradient to its own. T tokens,
C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from eet_lab.ops.types import Empty, Linear, Norm

PassesOn = Callable[..., tuple[Tensor, Tensor]]
"""A norm that also gives the x that it has read, [T,C] -> [T,C] and x: its backward pass gets both gradients."""


def passes_on(norm: Callable | None) -> PassesOn | None:
    """The version of a norm that passes x on, which is its attribute of this name, or None."""
    return getattr(norm, "passes_on", None)


class Residuals:
    """Those of one training pass: where x is normed, the residual is x as the norm has passed it on.

    Then the norm alone reads x, and x has one gradient; else autograd adds two, by a kernel of its own. What a norm has
    passed on is kept until the next op that adds a residual, or the next norm; of the last norm, for as long as these
    ops.
    """

    def __init__(self, norm: PassesOn) -> None:
        self._norm = norm
        self._passed: tuple[Tensor, Tensor] | None = None  # the last x that was normed, and what the norm made of it

    def norm(self, x: Tensor, w: Norm, *, empty: Empty) -> Tensor:
        """The piece `norm`."""
        normed, on = self._norm(x, w, empty=empty)
        self._passed = x, on
        return normed

    def linear_residual(
        self, x: Tensor, w: Linear, residual: Tensor, *, linear_residual: Callable[..., Tensor], **how: Any
    ) -> Tensor:
        """The op of that name, by its piece. A residual that is not the last x that was normed stays as it is."""
        passed, self._passed = self._passed, None
        if passed is not None and passed[0] is residual:
            residual = passed[1]
        return linear_residual(x, w, residual, **how)
