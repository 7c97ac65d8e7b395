"""Cases of the linear ops with int8 weights: the same ops and checks. T tokens, C channels, N outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from eet_lab.ops.cases import XL_LINEAR_RESIDUALS, XL_NORM_LINEARS, Case
from eet_lab.ops.int8 import quantized
from eet_lab.ops.shapes import LinearShape
from eet_lab.ops.types import Linear


@dataclass(frozen=True)
class Int8Shape(LinearShape):
    """A linear layer whose weights are int8; `group` inputs share a scale (0: all of an output's)."""

    form = LinearShape.form.plus("/int8[g<group inputs that share a scale>]")

    group: int = 0

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What norm_linear or linear_residual takes."""

        def int8(part: Any) -> Any:
            if not isinstance(part, Linear):
                return part
            whole, scale = quantized(part.weight, self.group)
            return Linear(whole, part.bias, scale)

        return tuple(map(int8, super().inputs(device, dtype, seed)))

    def read_bytes(self, itemsize: int) -> int:
        """Weights, scales and activations, each once."""
        num_groups = -(-self.C // self.group) if self.group else 1
        activations = super().read_bytes(itemsize) - itemsize * self.N * self.C
        return self.N * (self.C + 4 * num_groups) + activations


SHAPES = (
    *(Int8Shape(T, 96, 64, "gelu_tanh") for T in (1, 2, 8, 9, 16, 17)),
    Int8Shape(0, 96, 64),
    Int8Shape(3, 331, 16, "relu"),
    Int8Shape(2, 40, 200, group=64),  # C is no multiple of 16: expanded, however few the tokens are
    Int8Shape(5, 1000, 1616, "gelu", group=128),  # the last group is shorter
    Int8Shape(1, 4800, 1600, rms=True),
    Int8Shape(1, 1600, 1600, group=64),
    Int8Shape(12, 40, 1600, group=64),
    Int8Shape(16, 6400, 1600, "gelu_tanh"),
    Int8Shape(64, 515, 1608, "gelu_tanh", group=64),
    Int8Shape(1, 50257, 768, bias=False),
)
ONE_STAGE = (  # of the ring: there is no room for more on 132 multiprocessors, or, which sanitizers pretend, on eight
    Int8Shape(8, 2176, 8192),
    Int8Shape(16, 2176, 5120, "relu", group=128),
    Int8Shape(16, 136, 5120),
)
WIDE = Int8Shape(1, 64, 6400), Int8Shape(4, 64, 16384), Int8Shape(16, 2176, 5632)


def _int8(shapes: Iterable[LinearShape]) -> tuple[Int8Shape, ...]:
    """The same sizes with int8 weights."""
    return tuple(Int8Shape(**asdict(shape)) for shape in shapes)


INT8_CASES = (
    Case("int8_norm_linear", "norm_linear", (*SHAPES, *ONE_STAGE), _int8(XL_NORM_LINEARS)),
    Case(
        "int8_linear_residual",
        "linear_residual",
        tuple(replace(shape, residual=True, act=None) for shape in (*SHAPES, *WIDE)),
        _int8(XL_LINEAR_RESIDUALS),
    ),
)
