"""Cases of the ops that reduce row by row: norms and softmax. T rows, C numbers a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from eet_lab.naming import Form
from eet_lab.ops.cases import Case
from eet_lab.ops.shapes import NamedShape, Normal, Shape
from eet_lab.ops.types import Norm


@dataclass(frozen=True)
class NormShape(NamedShape):
    """T rows of C channels, with a mean that the norm has to take away."""

    form = Form("t<T tokens>/c<C channels>{/rms}")

    T: int
    C: int
    rms: bool = False

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What norm takes."""
        normal = Normal(device, dtype, seed)
        x, weight = normal(self.T, self.C) + 1, normal(self.C) + 1
        return x, Norm(weight, None if self.rms else normal(self.C), 1e-5)

    def read_bytes(self, itemsize: int) -> int:
        """Each row in and out."""
        return itemsize * 2 * self.T * self.C


@dataclass(frozen=True)
class SoftmaxShape(NamedShape):
    """T rows of C scores that are `spread` wide."""

    form = Form("t<T rows>/c<C channels>")

    T: int
    C: int
    spread: float = 3.0

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What softmax takes."""
        return (Normal(device, dtype, seed)(self.T, self.C, scale=self.spread),)

    def read_bytes(self, itemsize: int) -> int:
        """Each row in and out."""
        return itemsize * 2 * self.T * self.C


def _sizes(make: Any, *channels: int) -> tuple[Shape, ...]:
    """Rows that fill no team, some, and many; and channels as asked for."""
    return (
        *(make(T, 64) for T in (0, 1, 2, 3, 7, 33)),
        *(make(5, C) for C in channels),
        make(700, 768),
    )


LONG = (8, 264, 1600, 4096, 8208, 12288, 40000)  # around what one warp and what sixteen hold, and far beyond
BENCH = ((64, 1600), (8192, 768), (8192, 1600), (8192, 4096), (8192, 12288))

ROW_CASES = (
    Case(
        "norm",
        "norm",
        (*_sizes(NormShape, *LONG), *(NormShape(3, C, rms=True) for C in (8, 1600, 40000))),
        tuple(NormShape(T, C) for T, C in BENCH),
    ),
    Case(
        "softmax",
        "softmax",
        (*_sizes(SoftmaxShape, 1, 3, 131, 5001, *LONG), SoftmaxShape(4, 1000, spread=100.0)),
        tuple(SoftmaxShape(T, C) for T, C in BENCH),
    ),
)
