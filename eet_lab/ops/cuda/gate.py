"""Gated activations. T tokens, F channels of what comes out."""

from __future__ import annotations

from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native
from eet_lab.ops.cuda.launching import DTYPES, REMEDY, at, needs, number_of, stream_of
from eet_lab.ops.types import Empty


@needs("gate")
def gate(x: Tensor, act: str, *, empty: Empty, dependent: bool = False) -> Tensor:
    """The first half of the channels, activated, times the second: [T,2F] -> [T,F]. One launch; F a multiple of 8."""
    T, F = len(x), x.shape[1] // 2
    if F % 8:
        raise KernelError(f"A gated layer has {F} channels; the kernel needs a multiple of 8. {REMEDY}")
    out = empty("activated", (T, F), x)
    if out.is_meta or not T:
        return out
    native.loaded("gate").eet_gate(
        out=at(out), x=at(x), act=number_of(act), dtype=DTYPES[x.dtype], T=T, F=F,
        dependent=dependent, stream=stream_of(x),
    )  # fmt: skip
    return out
