"""Row by row: norms and softmax, with X rows reduced at a time. T rows, C numbers a row."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native
from eet_lab.ops.cuda.launching import DTYPES, REMEDY, at, check, needs, stream_of
from eet_lab.ops.types import Empty, Norm

MOST_HELD = 8192  # channels of a row that stays in registers
INTERLEAVED = (1, 2, 4)
"""Rows that a team of warps may reduce at a time, so that the shuffles of one hide behind those of the others."""


def norm_arguments(w: Norm) -> dict[str, Any]:
    """A norm for launchers."""
    return {"norm_weight": at(w.weight), "norm_bias": at(w.bias), "eps": w.eps}


@needs("norm")
def norm(
    x: Tensor,
    w: Norm,
    *,
    empty: Empty,
    rows: int = 1,
    dependent: bool = False,
    mean: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Layer norm, or RMS norm without a bias: [T,C] -> [T,C]. C a multiple of 8; `rows` one of INTERLEAVED.

    `mean` and `scale` [T] fp32 get each row's mean, and 1 / standard deviation, for a backward pass.
    """
    T, C = _check_rows(x, rows)
    if C % 8:
        raise KernelError(f"x has {C} channels; the norm kernel needs a multiple of 8. {REMEDY}")
    check(w.weight, "the norm's weight", x.dtype, (C,))
    check(w.bias, "the norm's bias", x.dtype, (C,))
    out = empty("normed", x.shape, x)
    if x.is_meta or not T:
        return out
    native.loaded("norm").eet_norm(
        out=at(out), mean=at(mean), scale=at(scale), x=at(x), **norm_arguments(w), dtype=DTYPES[x.dtype], T=T, C=C,
        X=rows, dependent=dependent, stream=stream_of(x),
    )  # fmt: skip
    return out


def residual_norm(
    residual: Tensor, w: Norm, y: Tensor | None = None, bias: Tensor | None = None, *, dependent: bool = False
) -> Tensor:
    """norm(y + bias + residual), written over `residual`: all [T,C], bias [C]. One launch."""
    T, C = residual.shape
    native.loaded("residual_norm").eet_residual_norm(
        residual=at(residual), y=at(y), bias=at(bias), **norm_arguments(w), dtype=DTYPES[residual.dtype], T=T, C=C,
        dependent=dependent, stream=stream_of(residual),
    )  # fmt: skip
    return residual


def check_residual_norm(residual: Tensor, w: Norm) -> None:
    """KernelError for what `residual_norm` does not take."""
    C = residual.shape[1]
    if C % 8 or C > MOST_HELD:
        raise KernelError(
            f"The residual has {C:,} channels; its norm takes a multiple of 8, at most {MOST_HELD:,}. {REMEDY}"
        )
    check(w.weight, "the norm's weight", residual.dtype, (C,))
    check(w.bias, "the norm's bias", residual.dtype, (C,))


@needs("softmax")
def softmax(x: Tensor, *, empty: Empty, rows: int = 1, dependent: bool = False) -> Tensor:
    """Softmax over the last dimension: [T,C] -> [T,C], any C. `rows` is one of INTERLEAVED."""
    T, C = _check_rows(x, rows)
    out = empty("softmax", x.shape, x)
    if x.is_meta or not x.numel():
        return out
    native.loaded("softmax").eet_softmax(
        out=at(out), x=at(x), dtype=DTYPES[x.dtype], T=T, C=C, X=rows, dependent=dependent, stream=stream_of(x)
    )
    return out


def _check_rows(x: Tensor, rows: int) -> tuple[int, int]:
    """T, C."""
    if rows not in INTERLEAVED:
        raise KernelError(f"rows is {rows}, but kernels reduce {', '.join(map(str, INTERLEAVED))} rows at a time.")
    if x.dtype not in DTYPES or x.ndim != 2 or not x.is_contiguous():
        raise KernelError(
            f"x is {tuple(x.shape)} {x.dtype}{'' if x.is_contiguous() else ', not contiguous'}; "
            f"kernels need [T,C], contiguous, of {', '.join(map(str, DTYPES))}."
        )
    return x.shape[0], x.shape[1]
