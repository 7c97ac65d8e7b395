"""Linear layers with what surrounds them. T tokens, C channels, N outputs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native
from eet_lab.ops.cuda.launching import ACTS, DTYPES, at, check, needs, stream_of
from eet_lab.ops.cuda.norm import norm
from eet_lab.ops.types import Empty, Linear, Norm

FEW = 16  # tokens that the weight-streaming product takes
SMALLEST_SHARED = 99 * 1024  # bytes of shared memory that a block can have on every GPU from sm_80 on
STAGE_SHARED = 19 * 1024  # bytes of it that one stage of eet_linear's ring needs, with what is small
FEWEST_BLOCKS = 108  # where there is no GPU to ask


@needs("linear", "norm", "epilogue")
def norm_linear(
    x: Tensor,
    norm_w: Norm,
    w: Linear,
    act: str | None = None,
    *,
    empty: Empty,
    norm_rows: int = 1,
    dependent: bool = False,
) -> Tensor:
    """act(linear(norm(x))): [T,C] -> [T,N].

    Few tokens (T <= 16, and T*C numbers fit in shared memory): one launch, which streams the weights once.
    More: our norm (`norm_rows` at a time), cuBLAS, and our bias with activation, a launch each.
    """
    T, C, N = _check_linear(x, w)
    if act not in ACTS:
        raise KernelError(f"There is no activation {act!r}; there are {', '.join(filter(None, ACTS))}.")
    few = _is_few(T, C, x.element_size())
    normed = x if few else norm(x, norm_w, empty=empty, rows=norm_rows, dependent=dependent)
    out = empty("linear", (T, N), x)
    if x.is_meta or not T:
        return out
    bias, scale, shift = at(w.bias), at(norm_w.weight), at(norm_w.bias)
    dtype, stream = DTYPES[x.dtype], stream_of(x)
    if few:
        tensors = (at(out), None, at(x), None, at(w.weight), bias, None, scale, shift)
        sizes = (dtype, T, N, C, ACTS[act], norm_w.eps, _num_blocks(N))
        native.loaded("linear").eet_linear(*tensors, *sizes, dependent, stream)
        return out
    torch.mm(normed, w.weight.t(), out=out)
    if w.bias is not None or act is not None:
        native.loaded("epilogue").eet_epilogue(at(out), at(out), bias, None, dtype, T, N, ACTS[act], stream)
    return out


@needs("linear", "epilogue")
def linear_residual(x: Tensor, w: Linear, residual: Tensor, *, empty: Empty, dependent: bool = False) -> Tensor:
    """linear(x) + residual, written over `residual`: [T,C], [T,N] -> [T,N].

    Few tokens (as in `norm_linear`): one launch. More: cuBLAS, and our bias with residual.
    """
    T, C, N = _check_linear(x, w)
    check(residual, "residual", x.dtype, (T, N))
    few = _is_few(T, C, x.element_size())
    product = x if few else empty("linear", (T, N), x)
    if x.is_meta or not T:
        return residual
    out, bias, dtype, stream = at(residual), at(w.bias), DTYPES[x.dtype], stream_of(x)
    if few:
        tensors = (out, None, at(x), None, at(w.weight), bias, out, None, None)
        native.loaded("linear").eet_linear(*tensors, dtype, T, N, C, 0, 0.0, _num_blocks(N), dependent, stream)
        return residual
    torch.mm(x, w.weight.t(), out=product)
    native.loaded("epilogue").eet_epilogue(out, at(product), bias, out, dtype, T, N, 0, stream)
    return residual


@needs("linear")
def largest_outputs(
    x: Tensor, rows: Tensor, norm_w: Norm, w: Linear, *, empty: Empty, dependent: bool = False
) -> Tensor:
    """Where linear(norm(x[rows])) is largest, which is never written: x [.,C], rows [T] -> [T,blocks] int64.

    One launch, for few tokens (`takes_few`). Every block leaves the largest of its outputs in a number; as unsigned
    numbers, the largest of a row has the largest output, of those that tie the first: 2**32 - 1 minus its lower half.
    """
    T, C, N = len(rows), *_check_linear(x, w)[1:]
    check(rows, "rows", torch.int64, (T,))
    best = empty("best", (T, _num_blocks(N)), rows)
    if x.is_meta or not T:
        return best
    tensors = (None, best.data_ptr(), at(x), rows.data_ptr(), at(w.weight), at(w.bias), None)
    norms = (at(norm_w.weight), at(norm_w.bias))
    sizes = (DTYPES[x.dtype], T, N, C, ACTS[None], norm_w.eps, best.shape[1])
    native.loaded("linear").eet_linear(*tensors, *norms, *sizes, dependent, stream_of(x))
    return best


def takes_few(T: int, w: Linear) -> bool:
    """Whether the weight-streaming kernel takes this many tokens."""
    return w.scale is None and _is_few(T, w.weight.shape[1], w.weight.element_size())


@cache
def _is_few(T: int, C: int, itemsize: int) -> bool:
    """Whether the weight-streaming kernel takes them; the same answer for a rehearsal on meta tensors."""
    row_bytes = (-(-C * itemsize // 64) | 1) * 64  # as row_stride in linear.cu
    partial_bytes = T * (4096 if T <= 8 else 512)
    return T <= FEW and T * row_bytes + partial_bytes + STAGE_SHARED <= _gpu()[0]


def _num_blocks(N: int) -> int:
    """A block a multiprocessor."""
    return min(N, _gpu()[1])


@cache
def _gpu() -> tuple[int, int]:
    """Bytes of shared memory that a block can have, and multiprocessors, of the present GPU."""
    if not torch.cuda.is_available():
        return SMALLEST_SHARED, FEWEST_BLOCKS
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.shared_memory_per_block_optin, properties.multi_processor_count


def _check_linear(x: Tensor, w: Linear) -> tuple[int, int, int]:
    """T, C, N."""
    (T, C), (N, weight_C) = x.shape, w.weight.shape
    if x.dtype not in DTYPES:
        raise KernelError(f"x is {x.dtype}; kernels take {', '.join(map(str, DTYPES))}.")
    if C % 8:
        raise KernelError(f"x has {C} channels; kernels need a multiple of 8.")
    if weight_C != C or w.weight.dtype != x.dtype or not (x.is_contiguous() and w.weight.is_contiguous()):
        check(x, "x", x.dtype, (T, C))
        check(w.weight, "weight", x.dtype, (N, C))
    return T, C, N
