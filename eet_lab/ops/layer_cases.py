"""Cases of what lies between two layers' attention.

T tokens, A channels of what attention gave, C channels, F channels inside, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eet_lab.ops.cases import Case
from eet_lab.ops.reference import GATED
from eet_lab.ops.shapes import Normal, Shape
from eet_lab.ops.types import Empty, Layer, Linear, Norm


@dataclass(frozen=True)
class LayerShape(Shape):
    """One layer and the next."""

    T: int
    C: int
    F: int
    act: str = "gelu_tanh"
    last: bool = False  # nothing follows
    rms: bool = False  # and no biases
    mean: float = 1  # of x
    wide: tuple[int, int] | None = None  # A and N; None: C and 3C

    @property
    def gated(self) -> bool:
        """Whether fc_1 has a gate for each of the F channels, and what it lets through."""
        return self.act in GATED

    @property
    def fc_1_rows(self) -> int:
        return self.F * (2 if self.gated else 1)

    @property
    def A(self) -> int:
        return self.wide[0] if self.wide else self.C

    @property
    def N(self) -> int:
        return self.wide[1] if self.wide else 3 * self.C

    def __str__(self) -> str:
        words = f"/{self.act}" * (self.act != "gelu_tanh") + "/last" * self.last + "/rms" * self.rms
        words += f"/mean{self.mean:g}" * (self.mean != 1) + (f"/a{self.A}/n{self.N}" if self.wide else "")
        return f"t{self.T}/c{self.C}/f{self.F}{words}"

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What fused_layer takes."""
        normal = Normal(device, dtype, seed)

        def norm() -> Norm:
            return Norm(normal(self.C) + 1, None if self.rms else normal(self.C), 1e-5)

        def linear(N: int, C: int) -> Linear:
            return Linear(normal(N, C, scale=C**-0.5), None if self.rms else normal(N))

        def layer() -> Layer:
            C, F = self.C, self.F
            return Layer(norm(), linear(self.N, C), linear(C, self.A), norm(), linear(self.fc_1_rows, C), linear(C, F))

        attended, x = normal(self.T, self.A), normal(self.T, self.C) + self.mean
        return attended, x, layer(), None if self.last else layer(), self.act

    def read_bytes(self, itemsize: int) -> int:
        """Weights, and activations of each op on its own; each once."""
        N = 0 if self.last else self.N
        weights = self.C * (self.A + self.fc_1_rows + self.F + N)
        return itemsize * (weights + self.T * (self.A + 5 * self.C + 2 * self.F + bool(N) * (self.C + N)))


@dataclass(frozen=True)
class LayerCase(Case):
    """Its op gives two tensors, which are judged together."""

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    def call(self, op: Callable[..., Any], inputs: tuple[Any, ...], empty: Empty) -> Tensor:
        """x and qkv side by side."""
        x, qkv = op(*inputs, empty=empty)
        return x if qkv is None else torch.cat((x, qkv), -1)


LAYER_CASES = (
    LayerCase(
        "fused_layer",
        "fused_layer",
        (
            *(LayerShape(T, 64, 256) for T in (1, 2)),
            LayerShape(1, 8, 24, "relu"),  # fewer outputs than blocks
            LayerShape(2, 72, 288, "gelu", rms=True),
            LayerShape(2, 256, 1024, mean=300),  # so far from 0 that its norm looks again
            LayerShape(1, 320, 128),  # narrower inside than out
            *(LayerShape(T, 768, 3072, last=T == 2) for T in (1, 2)),
            LayerShape(1, 1600, 6400),
            LayerShape(2, 1600, 6400, rms=True),
            LayerShape(2, 2048, 8192, last=True),
            *(LayerShape(T, 72, 200, "swiglu", rms=True, wide=(128, 256)) for T in (1, 2)),
            LayerShape(1, 64, 512, "geglu", wide=(32, 96)),
            LayerShape(1, 1024, 3072, "swiglu", rms=True, wide=(2048, 4096)),
            LayerShape(2, 2048, 4096, "swiglu", rms=True, last=True),
            LayerShape(1, 2048, 8192, "swiglu", rms=True, wide=(2048, 3072)),
            LayerShape(1, 4096, 16384),  # stages of fewer outputs, and many times around the ring
        ),
        (
            *(LayerShape(T, 1600, 6400) for T in (1, 2)),
            LayerShape(1, 2048, 8192, "swiglu", rms=True, wide=(2048, 3072)),
        ),
    ),
)
