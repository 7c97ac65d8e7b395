"""Int8 weights of the linear ops: what launchers are told of them, and how they are made whole for cuBLAS.

T tokens, C channels, N outputs, G groups of an output's inputs with a scale each.
"""

from __future__ import annotations

from torch import Tensor

from eet_lab.ops import native
from eet_lab.ops.cuda.launching import DTYPES, at, stream_of
from eet_lab.ops.int8 import group_size
from eet_lab.ops.types import Empty, Linear


def groups(w: Linear, scale: Tensor) -> dict[str, int]:
    """G for launchers, and the logarithm of the number of inputs that share a scale (0 where all do)."""
    (_, C), G = w.weight.shape, scale.shape[1]
    return {"G": G, "log_inputs": group_size(C, G).bit_length() - 1 if G > 1 else 0}


def expanded(w: Linear, x: Tensor, *, empty: Empty) -> Tensor:
    """The weight [N,C] in x's dtype: itself, or what an int8 one stands for, in one launch."""
    if w.scale is None:
        return w.weight
    out = empty("dequantized", w.weight.shape, x)
    if not x.is_meta and len(x):
        N, K = w.weight.shape
        native.loaded("dequantize").eet_dequantize(
            out=at(out), weight=at(w.weight), scale=at(w.scale), dtype=DTYPES[x.dtype], N=N, K=K,
            **groups(w, w.scale), stream=stream_of(x),
        )  # fmt: skip
    return out
