"""Linear layers with what surrounds them. T tokens, C channels, N outputs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eet_lab.errors import KernelError
from eet_lab.ops import native
from eet_lab.ops.cuda import choice, int8
from eet_lab.ops.cuda.gate import gate
from eet_lab.ops.cuda.launching import (
    DTYPES,
    REMEDY,
    Limits,
    at,
    check,
    gpu,
    needs,
    number_of,
    stream_of,
    unfit_layers,
    unfit_widths,
)
from eet_lab.ops.cuda.norm import check_residual_norm, norm, residual_norm
from eet_lab.ops.fits import refuses
from eet_lab.ops.reference import GATED
from eet_lab.ops.types import Empty, Linear, Norm

PRODUCTS = ("linear", "vector_linear", "register_linear", "wgmma_linear", "int8_linear", "dequantize")
CUBLAS_ACT = "gelu_tanh"  # the activation that cuBLAS ends a product with
MOST_TILE_TOKENS = 64  # of wgmma_linear


@refuses(unfit_layers)
@needs(*PRODUCTS, "norm", "epilogue", "gate")
def norm_linear(
    x: Tensor,
    norm_w: Norm | None,
    w: Linear,
    act: str | None = None,
    *,
    empty: Empty,
    norm_rows: int = 1,
    dependent: bool = False,
) -> Tensor:
    """act(linear(norm(x))): [T,C] -> [T,N], or [T,N/2] where the activation is gated. No norm: x is normed already.

    Few tokens (`takes_few`): one launch, which streams the weights once. A gated activation takes one more where that
    kernel does not stream gates beside what they let through (`pairs_gates`).
    More: our norm (`norm_rows` at a time) and the product, a launch each; one more where the activation is not cuBLAS's
    (`_ends_apart`), and one for int8 weights, which expands them.
    """
    if norm_w is None:
        x, w = _filled_up(x, w)
    T, _, N = _check_linear(x, w, act)
    if act in GATED and not pairs_gates(T, x, w):
        both = norm_linear(x, norm_w, w, empty=empty, norm_rows=norm_rows, dependent=dependent)
        return gate(both, act, empty=empty, dependent=dependent)
    if act not in GATED and not takes_few(T, x, w, normed=norm_w is not None):
        normed = x if norm_w is None else norm(x, norm_w, empty=empty, rows=norm_rows, dependent=dependent)
        return _product(normed, w, act, empty, dependent)
    out = empty("activated", (T, N // 2), x) if act in GATED else empty("linear", (T, N), x)
    if not x.is_meta and T:
        _stream(out, None, x, None, w, None, norm_w, act, dependent)
    return out


def _filled_up(x: Tensor, w: Linear) -> tuple[Tensor, Linear]:
    """Both with zeros up to a multiple of 8 channels: a patch of ViT-H/14 has 588 numbers. Such weights are copied."""
    missing = -x.shape[1] % 8
    if not missing or w.scale is not None:
        return x, w
    return pad(x, (0, missing)), w._replace(weight=pad(w.weight, (0, missing)))


def _product(x: Tensor, w: Linear, act: str | None, empty: Empty, dependent: bool) -> Tensor:
    """act(linear(x)), of more than few tokens: in tiles, or by cuBLAS."""
    (T, N), number = (len(x), len(w.weight)), number_of(act)
    weight, out = int8.expanded(w, x, empty=empty), empty("linear", (T, N), x)
    if x.is_meta or not T:
        return out
    if takes_tiles(T, x):
        _by_tiles(out, x, weight, w.bias, None, act, dependent)
        return out
    if _ends_apart(x, w, act):
        torch.mm(x, weight.t(), out=out)
        native.loaded("epilogue").eet_epilogue(
            out=at(out), y=at(out), bias=at(w.bias), residual=None, dtype=DTYPES[x.dtype], T=T, N=N, act=number,
            stream=stream_of(x),
        )  # fmt: skip
    elif w.bias is None:
        torch.mm(x, weight.t(), out=out)
    elif act is None:
        torch.addmm(w.bias, x, weight.t(), out=out)
    else:
        torch._addmm_activation(w.bias, x, weight.t(), use_gelu=True, out=out)
    return out


@refuses(unfit_widths)
@needs(*PRODUCTS, "epilogue")
def linear_residual(x: Tensor, w: Linear, residual: Tensor, *, empty: Empty, dependent: bool = False) -> Tensor:
    """linear(x) + residual, written over `residual`: [T,C], [T,N] -> [T,N].

    Few tokens (as in `norm_linear`), and some (`takes_tiles`): one launch. More: cuBLAS, and our bias with residual.
    Int8 weights of more than few tokens take one more.
    """
    T, _, N = _check_linear(x, w)
    check(residual, "residual", x.dtype, (T, N))
    few, tiles = takes_few(T, x, w, normed=False), takes_tiles(T, x)
    weight = w.weight if few else int8.expanded(w, x, empty=empty)
    product = x if few or tiles else empty("linear", (T, N), x)
    if x.is_meta or not T:
        return residual
    if few:
        _stream(residual, None, x, None, w, residual, None, None, dependent)
        return residual
    if tiles:
        _by_tiles(residual, x, weight, w.bias, residual, None, dependent)
        return residual
    torch.mm(x, weight.t(), out=product)
    native.loaded("epilogue").eet_epilogue(
        out=at(residual), y=at(product), bias=at(w.bias), residual=at(residual), dtype=DTYPES[x.dtype], T=T, N=N, act=0,
        stream=stream_of(x),
    )  # fmt: skip
    return residual


@needs(*PRODUCTS, "residual_norm")
def linear_residual_norm(
    x: Tensor, w: Linear, residual: Tensor, norm_w: Norm, *, empty: Empty, dependent: bool = False
) -> Tensor:
    """norm(linear(x) + residual), written over `residual`: [T,C], [T,N] -> [T,N]; N a multiple of 8.

    Two launches: the product with the residual, streamed for few tokens (as in `norm_linear`), in tiles for some
    (`takes_tiles`) and else by cuBLAS, and the norm, with the bias of cuBLAS's product. int8 weights that are not
    streamed take one more.
    """
    T, _, N = _check_linear(x, w)
    check(residual, "residual", x.dtype, (T, N))
    few = takes_few(T, x, w, normed=False)
    weight = w.weight if few else int8.expanded(w, x, empty=empty)
    check_residual_norm(residual, norm_w)
    if x.is_meta or not T:
        return residual
    if few:
        _stream(residual, None, x, None, w, residual, None, None, dependent)
    elif takes_tiles(T, x):
        _by_tiles(residual, x, weight, w.bias, residual, None, dependent)
    else:
        residual.addmm_(x, weight.t())
        return residual_norm(residual, norm_w, bias=w.bias)
    return residual_norm(residual, norm_w, dependent=dependent)


class Draw(NamedTuple):
    """Outputs are logits, of which one is drawn: the largest divided by the temperature and with its noise.

    Where the temperature is 0 it is the largest output.
    """

    positions: Tensor  # [.] int64, of the rows of x
    noise: Tensor  # [T] int64
    temperature: Tensor  # [T] fp32


@needs("linear", "vector_linear", "int8_linear")
def largest_outputs(
    x: Tensor,
    rows: Tensor,
    norm_w: Norm,
    w: Linear,
    draw: Draw | None = None,
    *,
    empty: Empty,
    dependent: bool = False,
) -> Tensor:
    """Where linear(norm(x[rows])) is largest, or drawn, and never written: x [.,C], rows [T] -> [T,blocks] int64.

    One launch, for few tokens (`takes_few`). Every block leaves the largest of its outputs in a number; as unsigned
    numbers, the largest of a row has the largest output, of those that tie the first: 2**32 - 1 minus its lower half.
    A draw takes no int8 weights, whose kernels take long enough to compile without it.
    """
    T, blocks = _check_choice(x, rows, w, draw)
    best = empty("best", (T, blocks), rows)
    if not x.is_meta and T:
        _stream(None, best, x, rows, w, None, norm_w, None, dependent, draw)
    return best


@needs("linear", "vector_linear", "int8_linear")
def outputs_and_largest(
    x: Tensor, rows: Tensor, norm_w: Norm, w: Linear, *, empty: Empty, dependent: bool = False
) -> tuple[Tensor, Tensor]:
    """linear(norm(x[rows])) [T,N], and where it is largest as `largest_outputs` tells it, in one launch."""
    T, blocks = _check_choice(x, rows, w)
    out, best = empty("linear", (T, len(w.weight)), x), empty("best", (T, blocks), rows)
    if not x.is_meta and T:
        _stream(out, best, x, rows, w, None, norm_w, None, dependent)
    return out, best


def _check_choice(x: Tensor, rows: Tensor, w: Linear, draw: Draw | None = None) -> tuple[int, int]:
    """T and the number of blocks."""
    N, T = _check_linear(x, w)[2], len(rows)
    check(rows, "rows", torch.int64, (T,))
    if draw is not None:
        if w.scale is not None:
            raise KernelError(f"An int8 head draws no tokens. Write its logits, and draw from those. {REMEDY}")
        check(draw.positions, "positions", torch.int64, (len(x),))
        check(draw.noise, "noise", torch.int64, (T,))
        check(draw.temperature, "temperature", torch.float32, (T,))
    return T, num_blocks(N)


def takes_few(T: int, x: Tensor, w: Linear, *, normed: bool = True, gathered: bool = False) -> bool:
    """Whether a kernel that streams weights takes T tokens such as those of x; the same answer for meta tensors.

    At most 16, whose activations fit in shared memory beside the norm's weights and a ring, or in registers; with
    outputs that are a multiple of 8, as cuBLAS wants them, of at most 49,152 channels, with a norm 12,288 (3,584 from
    nine tokens on, but for a head). On Hopper products in tiles (`takes_tiles`) are ahead from nine tokens on, but for
    gates and heads. `gathered`: they are rows of x that lie apart, which are a head's.
    """
    (N, C), itemsize = w.weight.shape, x.element_size()
    if w.scale is not None:
        return choice.takes_int8(T, N, C, itemsize, normed, w.scale.shape[1], gpu())
    return streaming_kernel(T, N, C, itemsize, normed=normed, gathered=gathered) is not None


def pairs_gates(T: int, x: Tensor, w: Linear) -> bool:
    """Whether the kernel that streams such weights, with a norm, has each gate beside what it lets through."""
    sizes = (T, *w.weight.shape, x.element_size())
    return w.scale is None and streaming_kernel(*sizes, normed=True, gated=True) is not None


def num_launches(
    T: int,
    x: Tensor,
    w: Linear,
    act: str | None = None,
    *,
    normed: bool = True,
    residual: bool = False,
    gathered: bool = False,
) -> int:
    """The launches of a product of T tokens such as those of x, with what surrounds it."""
    if act in GATED and pairs_gates(T, x, w):
        return 1
    if act in GATED:
        return 1 + num_launches(T, x, w, normed=normed, gathered=gathered)
    if takes_few(T, x, w, normed=normed, gathered=gathered):
        return 1
    apart = not takes_tiles(T, x) and (residual or _ends_apart(x, w, act))
    return 1 + normed + apart + (w.scale is not None)


def takes_tiles(T: int, x: Tensor) -> bool:
    """Whether wgmma_linear takes a product of T tokens such as those of x that no other kernel streams."""
    return choice.FEW_IN_TILES <= T <= MOST_TILE_TOKENS and x.element_size() == 2 and gpu().is_hopper


def _by_tiles(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str | None,
    dependent: bool,
) -> None:
    """act(x weight^T + bias) + residual, in one launch."""
    launchers, has_residual = native.loaded("wgmma_linear"), residual is not None
    sizes = _in_tiles(launchers.eet_wgmma_clusters, DTYPES[x.dtype], len(x), *weight.shape, has_residual, gpu())
    launchers.eet_wgmma_linear(
        **sizes, out=at(out), x=at(x), weight=at(weight), bias=at(bias), residual=at(residual), act=number_of(act),
        dependent=dependent, stream=stream_of(x),
    )  # fmt: skip


@cache
def _in_tiles(
    ask: Callable[..., None], dtype: int, T: int, N: int, C: int, has_residual: bool, on: Limits
) -> dict[str, int]:
    """What wgmma_linear is told of sizes and of shared memory; `ask` tells how many clusters run at once."""
    most = _most_clusters(ask, dtype, T > 32, on.num_blocks)
    return {"dtype": dtype} | choice.tiled(T, N, C, has_residual, most, on)


@cache
def _most_clusters(ask: Callable[..., None], dtype: int, many: bool, num_blocks: int) -> tuple[int, ...]:
    """How many clusters of 1, 2 and 4 blocks this GPU runs at once, as a launcher tells; `many`: of over 32 tokens."""
    found = (ctypes.c_int * 3)(num_blocks)
    ask(found=ctypes.addressof(found), dtype=dtype, T=MOST_TILE_TOKENS if many else 32, num_blocks=num_blocks)
    return tuple(found)


def _ends_apart(x: Tensor, w: Linear, act: str | None) -> bool:
    """Whether cuBLAS leaves the activation of a product to us: of one with a bias it knows `CUBLAS_ACT`.

    Its tanh is off by some 1e-5, which 16 bits do not show, but fp32 does.
    """
    return act is not None and (act != CUBLAS_ACT or w.bias is None or x.dtype == torch.float32)


def _stream(
    out: Tensor | None,
    best: Tensor | None,
    x: Tensor,
    rows: Tensor | None,
    w: Linear,
    residual: Tensor | None,
    norm_w: Norm | None,
    act: str | None,
    dependent: bool,
    draw: Draw | None = None,
) -> None:
    """The product of few tokens, with all that surrounds it, in one launch that streams the weights."""
    T, (N, C) = len(x if rows is None else rows), w.weight.shape
    norm_weight, norm_bias, eps = norm_w or (None, None, 0.0)
    check(norm_weight, "norm weight", x.dtype, (C,))
    check(norm_bias, "norm bias", x.dtype, (C,))
    kernel, sizes = choice.streamed(
        T, N, C, x.element_size(), norm_w is not None, rows is not None, act in GATED, residual is not None,
        0 if w.scale is None else w.scale.shape[1], gpu(),
    )  # fmt: skip
    arguments = {
        **sizes, "out": at(out), "x": at(x), "weight": at(w.weight), "bias": at(w.bias), "residual": at(residual),
        "norm_weight": at(norm_weight), "norm_bias": at(norm_bias), "eps": eps,
        "dtype": DTYPES[x.dtype], "act": number_of(act), "dependent": dependent, "stream": stream_of(x),
    }  # fmt: skip
    library = native.loaded(kernel)
    if kernel == "register_linear":
        library.eet_register_linear(**arguments)
        return
    arguments["best"] = None if best is None else best.data_ptr()
    arguments["rows"] = None if rows is None else rows.data_ptr()
    if w.scale is not None:
        library.eet_int8_linear(**arguments, scale=at(w.scale), **int8.groups(w, w.scale))
        return
    arguments |= _drawn(draw) if draw else NO_DRAW
    launch = library.eet_vector_linear if kernel == "vector_linear" else library.eet_linear
    launch(**arguments)


NO_DRAW = dict.fromkeys(Draw._fields)


def _drawn(draw: Draw) -> dict[str, int]:
    """A draw for launchers."""
    return {name: part.data_ptr() for name, part in zip(NO_DRAW, draw, strict=True)}


def streaming_kernel(
    T: int, N: int, C: int, itemsize: int, *, normed: bool, gathered: bool = False, gated: bool = False
) -> str | None:
    """The kernel that streams the weights of such a product, none of them int8; None: no kernel does.

    `gated`: of N/2 gates and N/2 outputs that they let through, side by side.
    """
    return choice.streaming_kernel(T, N, C, itemsize, normed, gathered, gated, gpu())


def num_blocks(N: int) -> int:
    """The blocks of a product with N outputs: one a multiprocessor."""
    return min(N, gpu().num_blocks)


def _check_linear(x: Tensor, w: Linear, act: str | None = None) -> tuple[int, int, int]:
    """T, C, N."""
    number_of(act)
    (T, C), (N, weight_C) = x.shape, w.weight.shape
    if x.dtype not in DTYPES:
        raise KernelError(f"x is {x.dtype}; kernels take {', '.join(map(str, DTYPES))}. {REMEDY}")
    if C % 8:
        raise KernelError(f"x has {C} channels; kernels need a multiple of 8. {REMEDY}")
    if not N:
        raise KernelError(f"weight {tuple(w.weight.shape)} has no outputs; kernels need at least one. {REMEDY}")
    dtype = x.dtype if w.scale is None else torch.int8
    if weight_C != C or w.weight.dtype != dtype or not (x.is_contiguous() and w.weight.is_contiguous()):
        check(x, "x", x.dtype, (T, C))
        check(w.weight, "weight", dtype, (N, C))
    if w.scale is not None:
        check(w.scale, "scale", torch.float32, (N, w.scale.shape[1]))
    check(w.bias, "bias", x.dtype, (N,))
    return T, C, N
