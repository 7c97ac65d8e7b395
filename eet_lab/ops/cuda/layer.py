"""What lies between two layers' attention, in one launch. T tokens, C channels, F channels inside, N outputs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native
from eet_lab.ops.cuda.launching import ACTS, DTYPES, Limits, at, check, limits, needs, stream_of
from eet_lab.ops.pads import serves_any_pads
from eet_lab.ops.types import Empty, Layer, Linear, Norm

MOST_TOKENS = 2
NUM_READERS = 256  # threads that multiply
FEWEST_STAGES = 4  # that the ring of weights can hold, or all
MOST_COPIES = 8  # of what blocks exchange
ASIDE = 11 * 1024  # bytes of shared memory that are left to the kernels around it and to the system
HOPPER = Limits(227 * 1024, 132)  # where there is no GPU to ask
LEAST_BYTES = 48 << 20  # of a layer's weights: with fewer there is too little to hide (H200: XL gains, GPT-2 Large not)


@needs("vector_layer")
@serves_any_pads
def rest_of_layer(
    attended: Tensor,
    x: Tensor,
    w: Layer,
    following: Layer | None,
    act: str,
    *,
    empty: Empty,
    dependent: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What follows a layer's attention, up to the next one's, written over x: [T,C], [T,C] -> x, qkv [T,N] or None.

    One launch, for what `takes_layers` takes. All its blocks have to be on the device at once, so two of these must
    not run at the same time on two streams.
    """
    T, C = x.shape
    sizes = _sizes((w,) if following is None else (w, following), T)
    if sizes is None or not _fits(T, *sizes):
        raise KernelError(
            f"One launch does not take {T} tokens through layers of {C} channels in {w.proj.weight.dtype}: it takes "
            f"{MOST_TOKENS} at most, layers that are alike, and 16 bits. Leave persistent_layers out."
        )
    check(x, "x", w.proj.weight.dtype, (T, C))
    check(attended, "attended", x.dtype, (T, C))
    if act not in ACTS:
        raise KernelError(f"There is no activation {act!r}; there are {', '.join(filter(None, ACTS))}.")
    F, N = sizes.F, sizes.N
    qkv = None if following is None else empty("linear", (T, N), x)
    if x.is_meta or not T:
        return x, qkv
    linears = (
        (w.proj, None),
        (w.fc_1, w.norm_2),
        (w.fc_2, None),
        (following and following.qkv, following and following.norm_1),
    )
    pointers = (ctypes.c_void_p * 16)(*(pointer for pair in linears for pointer in _pointers(*pair)))
    copies = _copies(T, C, F, N)
    numbers, turns = _exchange(x.device, T, C, F, copies)
    eps = w.norm_2.eps, following.norm_1.eps if following else 0.0
    how = (ACTS[act], *eps, _num_blocks(C, F), dependent, stream_of(x))
    native.loaded("vector_layer").eet_vector_layer(
        at(x), at(qkv), at(attended), at(numbers), turns.data_ptr(), copies, ctypes.addressof(pointers),
        DTYPES[x.dtype], T, C, F, N, *how,
    )  # fmt: skip
    return x, qkv


def takes_layers(layers: Sequence[Layer], T: int) -> bool:
    """Whether `rest_of_layer` takes T tokens through these layers, and gains by it; the same for meta tensors."""
    sizes = _sizes(layers, T)
    return sizes is not None and sizes.weight_bytes >= LEAST_BYTES and _fits(T, *sizes)


class Sizes(NamedTuple):
    C: int
    F: int
    N: int

    @property
    def weight_bytes(self) -> int:
        """In 16 bits."""
        return 2 * self.C * (self.C + 2 * self.F + self.N)


def _sizes(layers: Sequence[Layer], T: int) -> Sizes | None:
    """Of layers that are alike; None for those that are not, or are quantized, or wider than 16 bits."""
    if not 0 < T <= MOST_TOKENS:
        return None
    found = {tuple((*part.weight.shape, part.weight.dtype) for part in _linears(w)) for w in layers}
    if len(found) != 1 or any(part.scale is not None for w in layers for part in _linears(w)):
        return None
    [(qkv, proj, fc_1, fc_2)] = found
    F, C, dtype = fc_1
    alike = (qkv[1:], proj, fc_2) == ((C, dtype), (C, C, dtype), (C, F, dtype))
    return None if not alike or dtype.itemsize != 2 or C % 8 or F % 8 else Sizes(C, F, qkv[0])


def _linears(w: Layer) -> tuple[Linear, ...]:
    return w.qkv, w.proj, w.fc_1, w.fc_2


@cache
def _fits(T: int, C: int, F: int, N: int) -> bool:
    """As `plan` in vector_layer.cu."""
    if not _copies(T, C, F, N):
        return False
    num_blocks, row_chunks = _num_blocks(C, F), _ceil(C, 32)
    most_chunks = _ceil(row_chunks, _ceil(row_chunks, 64))  # of a stage's rows
    for most_rows in range(8, 3, -1):
        num_stages = partial = rows = 0
        for outputs, inputs in ((C, C), (F, C), (C, F), (N, C)):
            its_outputs, steps = _ceil(outputs, num_blocks), _ceil(_ceil(inputs, 32), most_chunks)
            tiles = _ceil(its_outputs, most_rows)
            rows = max(rows, _ceil(its_outputs, tiles))
            num_stages += tiles * steps
            partial = max(partial, 4 * tiles * steps * 8 * 8 * T)
        stage_bytes = rows * _odd_stride(64 * most_chunks) + 16
        room = _gpu().shared_bytes - ASIDE - partial - T * _odd_stride(2 * max(C, F)) - 4 * C
        if room // stage_bytes >= min(num_stages, FEWEST_STAGES):
            return True
    return False


def _num_blocks(C: int, F: int) -> int:
    """A block a multiprocessor, but none that would send nothing: nobody would wait for it before its turn is over."""
    return min(_gpu().num_blocks, max(C, F))


def _odd_stride(num_bytes: int) -> int:
    return (_ceil(num_bytes, 64) | 1) * 64


def _ceil(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@cache
def _copies(T: int, C: int, F: int, N: int) -> int:
    """Of what blocks send to each other: a group of threads, an output each, sends to one. 0: it does not fit."""
    group = 1 << (_ceil(max(C, F, N), _num_blocks(C, F)) - 1).bit_length()
    return min(MOST_COPIES, NUM_READERS // group // T)


@cache
def _exchange(device: torch.device, T: int, C: int, F: int, copies: int) -> tuple[Tensor, Tensor]:
    """Where blocks pass their outputs on. Launches of these sizes share it, and leave it as the next one needs it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelError(
            "The first launch of rest_of_layer for these sizes cannot be captured: it makes memory that stays. "
            "Run the step once before it is captured."
        )
    numbers = torch.full((2 * copies * T * (2 * C + F),), -1, dtype=torch.int16, device=device)
    return numbers, torch.zeros(1, dtype=torch.int32, device=device)


def _pointers(w: Linear | None, norm: Norm | None) -> tuple[int | None, ...]:
    if w is None:
        return None, None, None, None
    return at(w.weight), at(w.bias), at(norm and norm.weight), at(norm and norm.bias)


def _gpu() -> Limits:
    return limits() or HOPPER
