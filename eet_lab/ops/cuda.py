"""The same ops as `reference`, over the kernels in csrc/. Nothing here waits for the device, and nothing falls back.

T tokens, B rows, Q queries a row, K columns of the KV cache, C channels, N outputs, H heads, G KV heads, D head dim.
Types: float16, bfloat16, float32 (sums are always fp32). C a multiple of 8; D a multiple of 8 and at most 256.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native, reference
from eet_lab.ops.types import Empty, KVLayer, Linear, Norm, Sampling, Step

FEW = 16  # tokens that the weight-streaming product takes
SMALLEST_SHARED = 99 * 1024  # bytes of shared memory that a block can have on every GPU from sm_80 on
REDUCTION_SHARED = 34 * 1024  # bytes of it that eet_linear needs besides the activations
MAX_HEAD_DIM = 256
_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_ACTS = {None: 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
Op = TypeVar("Op", bound=Callable)


def needs(*kernels: str) -> Callable[[Op], Op]:
    """Tag an op with the sources in csrc/ that it launches from."""

    def tag(op: Op) -> Op:
        op.kernels = kernels  # type: ignore[attr-defined]
        return op

    return tag


@needs("linear", "norm")
def norm_linear(x: Tensor, norm_w: Norm, w: Linear, act: str | None = None, *, empty: Empty) -> Tensor:
    """act(linear(norm(x))): [T,C] -> [T,N].

    Few tokens (T <= 16, and T*C numbers fit in shared memory): one launch, which streams the weights once.
    More: our norm, cuBLAS, and our bias with activation, a launch each.
    """
    T, C, N = _check_linear(x, w)
    if act not in _ACTS:
        raise KernelError(f"There is no activation {act!r}; there are {', '.join(filter(None, _ACTS))}.")
    few = _is_few(T, C, x.element_size())
    normed = x if few else empty("normed", x.shape, x)
    out = empty("linear", (T, N), x)
    if x.is_meta or not T:
        return out
    bias, scale, shift = _at(w.bias), _at(norm_w.weight), _at(norm_w.bias)
    dtype, stream = _DTYPES[x.dtype], _stream(x)
    if few:
        native.loaded("linear").eet_linear(
            _at(out), _at(x), _at(w.weight), bias, None, scale, shift, dtype, T, N, C, _ACTS[act], norm_w.eps, stream
        )
        return out
    native.loaded("norm").eet_norm(_at(normed), _at(x), scale, shift, dtype, T, C, norm_w.eps, stream)
    torch.mm(normed, w.weight.t(), out=out)
    if w.bias is not None or act is not None:
        native.loaded("linear").eet_epilogue(_at(out), _at(out), bias, None, dtype, T, N, _ACTS[act], stream)
    return out


@needs("linear")
def linear_residual(x: Tensor, w: Linear, residual: Tensor, *, empty: Empty) -> Tensor:
    """linear(x) + residual, written over `residual`: [T,C], [T,N] -> [T,N].

    Few tokens (as in `norm_linear`): one launch. More: cuBLAS, and our bias with residual.
    """
    T, C, N = _check_linear(x, w)
    _check(residual, "residual", x.dtype, (T, N))
    few = _is_few(T, C, x.element_size())
    product = x if few else empty("linear", (T, N), x)
    if x.is_meta or not T:
        return residual
    out, bias, dtype, stream = _at(residual), _at(w.bias), _DTYPES[x.dtype], _stream(x)
    if few:
        native.loaded("linear").eet_linear(
            out, _at(x), _at(w.weight), bias, out, None, None, dtype, T, N, C, 0, 0.0, stream
        )
        return residual
    torch.mm(x, w.weight.t(), out=product)
    native.loaded("linear").eet_epilogue(out, _at(product), bias, out, dtype, T, N, 0, stream)
    return residual


@needs("append", "decode_attention", "prefill_attention", "plain_attention")
def masked_attention(qkv: Tensor, kv: KVLayer, step: Step, *, mask: Tensor, empty: Empty) -> Tensor:
    """Attention over all K columns with an additive mask [B,1,Q,K]: [T,(H+2G)D] -> [T,HD].

    The same kernels as `attention`; they read every column and the mask, pads included.
    """
    return _attend(qkv, kv, step, mask, empty)


@needs("append", "decode_attention", "prefill_attention", "plain_attention")
def attention(qkv: Tensor, kv: KVLayer, step: Step, *, empty: Empty) -> Tensor:
    """Attention without a mask: a query sees columns num_pad .. its own. [T,(H+2G)D] -> [T,HD]; pads' own output is 0.

    One token a row: one launch, which also writes the cache. More: one that writes the cache, one that attends.
    float32 takes a kernel without tensor cores. A row's new columns are consecutive.
    """
    return _attend(qkv, kv, step, None, empty)


@needs("linear", "norm")
def next_token(x: Tensor, step: Step, norm_w: Norm, head: Linear, sampling: Sampling, *, empty: Empty) -> Tensor:
    """The next token of every row, [B]: the reference's choice among the logits of our norm and head."""
    return reference.next_token(x, step, norm_w, head, sampling, empty=empty, norm_linear=norm_linear)


def _attend(qkv: Tensor, kv: KVLayer, step: Step, mask: Tensor | None, empty: Empty) -> Tensor:
    keys, values = kv.room(step)
    (T, width), (B, G, K, D), strides = qkv.shape, keys.shape, keys.stride()
    H = width // D - 2 * G
    _check_attention(qkv, keys, values, H, G, D)
    out = empty("attended", (T, H * D), qkv)
    if qkv.is_meta or not T:
        return out
    if mask is not None:
        _check(mask, "mask", qkv.dtype, (B, 1, T // B, K))
    tensors = (_at(out), _at(keys), _at(values), _at(qkv))
    dtype, stream = _DTYPES[qkv.dtype], _stream(qkv)
    columns, num_pad = step.columns.data_ptr(), step.num_pad.data_ptr()
    strides = (step.columns.stride(0), *strides[:3])
    one_each = T == B and (mask is not None or all(span.count == 1 for span in step.spans))
    if one_each and qkv.dtype != torch.float32:
        native.loaded("decode_attention").eet_decode_attention(
            *tensors, _at(mask), num_pad, columns, *strides, dtype, B, H, G, D, K, stream
        )
        return out
    num_real, longest = sum(span.count for span in step.spans), max(span.count for span in step.spans)
    rows, first, count = step.rows.data_ptr(), step.first.data_ptr(), step.count.data_ptr()
    zeroed = tensors[0] if mask is None and num_real != T else None
    native.loaded("append").eet_append(
        zeroed, *tensors[1:], rows, columns, first, count, *strides, dtype, T, H, G, D, stream
    )
    if qkv.dtype == torch.float32:
        native.loaded("plain_attention").eet_plain_attention(
            *tensors, _at(mask), rows, columns, first, count, num_pad, *strides, T, H, G, D, K, stream
        )
        return out
    queries = longest if mask is None else T // B
    native.loaded("prefill_attention").eet_prefill_attention(
        *tensors, _at(mask), first, count, num_pad, columns, *strides, dtype, B, queries, H, G, D, K, stream
    )
    return out


@cache
def _is_few(T: int, C: int, itemsize: int) -> bool:
    """Whether the weight-streaming kernel takes them; the same answer for a rehearsal on meta tensors."""
    row_bytes = (-(-C * itemsize // 64) | 1) * 64  # as row_stride in linear.cu
    return T <= FEW and T * row_bytes + REDUCTION_SHARED <= _shared_bytes()


@cache
def _shared_bytes() -> int:
    """Shared memory that a block can have on the present GPU."""
    if not torch.cuda.is_available():
        return SMALLEST_SHARED
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


def _stream(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.device.index)


def _at(x: Tensor | None) -> int | None:
    """The address for a launcher; kernels read 16 bytes at a time."""
    if x is None:
        return None
    address = x.data_ptr()
    if address % 16:
        raise KernelError(f"A tensor {tuple(x.shape)} begins at {address:#x}; kernels need a multiple of 16 bytes.")
    return address


def _check(x: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
        raise KernelError(
            f"{name} is {tuple(x.shape)} {x.dtype}{'' if x.is_contiguous() else ', not contiguous'}; "
            f"the kernel needs {tuple(shape)} {dtype}, contiguous."
        )


def _check_linear(x: Tensor, w: Linear) -> tuple[int, int, int]:
    """T, C, N."""
    (T, C), (N, weight_C) = x.shape, w.weight.shape
    if x.dtype not in _DTYPES:
        raise KernelError(f"x is {x.dtype}; kernels take {', '.join(map(str, _DTYPES))}.")
    if C % 8:
        raise KernelError(f"x has {C} channels; kernels need a multiple of 8.")
    if weight_C != C or w.weight.dtype != x.dtype or not (x.is_contiguous() and w.weight.is_contiguous()):
        _check(x, "x", x.dtype, (T, C))
        _check(w.weight, "weight", x.dtype, (N, C))
    return T, C, N


def _check_attention(qkv: Tensor, keys: Tensor, values: Tensor, H: int, G: int, D: int) -> None:
    if qkv.dtype not in _DTYPES or keys.dtype != qkv.dtype or values.dtype != qkv.dtype:
        raise KernelError(
            f"qkv is {qkv.dtype} and the cache {keys.dtype}; kernels take one of {list(_DTYPES)} for both."
        )
    if D % 8 or D > MAX_HEAD_DIM:
        raise KernelError(f"The head dim is {D}; kernels need a multiple of 8, at most {MAX_HEAD_DIM}.")
    if H <= 0 or H % G or qkv.shape[1] != (H + 2 * G) * D or not qkv.is_contiguous():
        raise KernelError(
            f"qkv {tuple(qkv.shape)} is not contiguous [T,(H+2G)D] with {G} KV heads of {D}, H a multiple of {G}."
        )
    if keys.stride() != values.stride() or keys.stride(3) != 1 or any(stride % 8 for stride in keys.stride()[:3]):
        raise KernelError(
            f"Keys and values have strides {keys.stride()} and {values.stride()}; kernels need the same for both, "
            "the last 1, the others multiples of 8."
        )
