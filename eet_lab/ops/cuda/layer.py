"""What lies between two layers' attention, in one launch.

T tokens, A channels of what attention gave, C channels, F channels inside, N outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native
from eet_lab.ops.cuda.launching import (
    DTYPES,
    Limits,
    at,
    check,
    gpu,
    needs,
    number_of,
    stream_of,
    unfit_act,
)
from eet_lab.ops.cuda.plan import BARRIER_BYTES, CHUNK, CHUNKS, STAGE_OUTPUTS, WARPS, ceil, odd_stride
from eet_lab.ops.fits import Shapes, refuses
from eet_lab.ops.reference import GATED
from eet_lab.ops.types import Empty, Layer, Linear, Norm

MOST_TOKENS = 2
NUM_READERS = 256  # threads that multiply
FEWEST_ROWS = 4  # outputs of a stage, unless a block has fewer
FEWEST_STAGES = 4  # that the ring of weights can hold, or all
MOST_COPIES = 8  # of what blocks exchange
ASIDE = 11 * 1024  # bytes of shared memory that are left to the kernels around it and to the system
LEAST_BYTES = 48 << 20  # of a layer's weights: with fewer there is too little to hide (LOG)
LEAVE_OUT = "Leave persistent_layers out."


def unfit(model: Shapes) -> str | None:
    """Why one launch does not take a model's layers, or None."""
    return unfit_act(model) if model.spec.causal else "one launch takes norms before linears, and this is an encoder"


class Sizes(NamedTuple):
    """The sizes of layers that are alike."""

    A: int
    C: int
    F: int
    N: int
    gated: bool  # twice as many rows of fc_1: all gates, then what they let through

    @property
    def fc_1_rows(self) -> int:
        return self.F * (2 if self.gated else 1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a layer's weights in 16 bits."""
        return 2 * self.C * (self.A + self.fc_1_rows + self.F + self.N)


@refuses(unfit)
@needs("vector_layer")
def fused_layer(
    attended: Tensor,
    x: Tensor,
    w: Layer,
    following: Layer | None,
    act: str,
    *,
    empty: Empty,
    dependent: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What follows a layer's attention, up to the next one's, written over x: [T,A], [T,C] -> x, qkv [T,N] or None.

    One launch, for one or two tokens in 16 bits. All its blocks have to be on the device at once, so two of these must
    not run at the same time: not on two streams, nor in two processes that share a GPU's multiprocessors (MPS).
    """
    (T, C), activation = x.shape, number_of(act)
    layers = (w,) if following is None else (w, following)
    if problem := _refused(layers, T, gpu()):
        raise KernelError(f"{problem} {LEAVE_OUT}")
    _check_layers(w, following, w.proj.weight.dtype)
    check(x, "x", w.proj.weight.dtype, (T, C))
    sizes = _sizes(w)
    if sizes.gated != (act in GATED):
        raise KernelError(
            f"The activation is {act}, but fc_1 has {sizes.fc_1_rows:,} outputs for {sizes.F:,} channels inside; a "
            f"gated activation ({', '.join(GATED)}) takes twice as many, all others as many."
        )
    A, _, F, N, _ = sizes
    check(attended, "attended", x.dtype, (T, A))
    qkv = None if following is None else empty("linear", (T, N), x)
    if x.is_meta:
        return x, qkv
    linears = (
        (w.proj, None),
        (w.fc_1, w.norm_2),
        (w.fc_2, None),
        (following and following.qkv, following and following.norm_1),
    )
    pointers = (ctypes.c_void_p * 16)(*(pointer for pair in linears for pointer in _pointers(*pair)))
    num_blocks = _num_blocks(C, F, gpu())
    copies = _copies(T, sizes, num_blocks)
    numbers, turns = _exchange(x.device, T, C, F, copies)
    native.loaded("vector_layer").eet_vector_layer(
        x=at(x), qkv=at(qkv), attended=at(attended), exchange=at(numbers), turns=turns.data_ptr(), copies=copies,
        linears=ctypes.addressof(pointers), dtype=DTYPES[x.dtype], T=T, A=A, C=C, F=F, N=N, act=activation,
        gated=sizes.gated, eps_2=w.norm_2.eps, next_eps=following.norm_1.eps if following else 0.0,
        num_blocks=num_blocks, **_planned(T, sizes, 3 + (following is not None), gpu()), dependent=dependent,
        stream=stream_of(x),
    )  # fmt: skip
    return x, qkv


def takes_layers(layers: Sequence[Layer], T: int) -> bool:
    """Whether `fused_layer` takes T tokens through these layers, and gains by it; the same for meta tensors."""
    return _refused(layers, T, gpu()) is None and _sizes(layers[0]).weight_bytes >= LEAST_BYTES


def _refused(layers: Sequence[Layer], T: int, gpu: Limits) -> str | None:
    """Why one launch cannot take T tokens through these layers; None: it can."""
    if not 0 < T <= MOST_TOKENS:
        return f"One launch takes 1 to {MOST_TOKENS} tokens through a layer, and not {T}."
    if any(part.scale is not None for w in layers for part in _linears(w)):
        return "One launch takes layers in 16 bits, and these weights are quantized."
    dtype, sizes = layers[0].proj.weight.dtype, _sizes(layers[0])
    if dtype not in DTYPES or dtype.itemsize != 2:
        return f"One launch takes layers in 16 bits, and these are in {dtype}."
    if different := next((each for each in map(_sizes, layers) if each != sizes), None):
        return f"One launch takes layers that are alike: here are {sizes} and {different}."
    if sizes.A % 8 or sizes.C % 8 or sizes.F % 8:
        return (
            f"One launch takes layers whose channels are multiples of 8: these have {sizes.C}, and "
            f"{sizes.F} inside, after {sizes.A} of attention."
        )
    if plan(T, sizes, 4, gpu) is None:
        return (
            f"One launch takes no {T} tokens through layers of {sizes.C} channels and {sizes.F} inside: of "
            f"{gpu.shared_bytes:,} bytes of shared memory their activations leave too little to weights."
        )
    return None


def _check_layers(w: Layer, following: Layer | None, dtype: torch.dtype) -> None:
    """KernelError for a tensor that the kernel cannot read."""
    A, C, F, N, _ = sizes = _sizes(w)
    linears = [("proj", w.proj, (C, A)), ("fc_1", w.fc_1, (sizes.fc_1_rows, C)), ("fc_2", w.fc_2, (C, F))]
    norms = [("norm_2", w.norm_2)]
    if following is not None:
        linears.append(("the next qkv", following.qkv, (N, C)))
        norms.append(("the next norm_1", following.norm_1))
    for name, linear, shape in linears:
        check(linear.weight, f"{name}'s weight", dtype, shape)
        check(linear.bias, f"{name}'s bias", dtype, shape[:1])
    for name, norm in norms:
        check(norm.weight, f"{name}'s weight", dtype, (C,))
        check(norm.bias, f"{name}'s bias", dtype, (C,))


def _sizes(w: Layer) -> Sizes:
    (rows, C), gated = w.fc_1.weight.shape, len(w.fc_1.weight) == 2 * w.fc_2.weight.shape[1]
    return Sizes(w.proj.weight.shape[1], C, rows // 2 if gated else rows, len(w.qkv.weight), gated)


def _linears(w: Layer) -> tuple[Linear, ...]:
    return w.qkv, w.proj, w.fc_1, w.fc_2


class Plan(NamedTuple):
    """What the launcher is told of shared memory."""

    most_chunks: int  # inputs of a stage, by CHUNK
    most_rows: int  # outputs of a stage
    num_stages: int
    shared_bytes: int


@cache
def plan(T: int, sizes: Sizes, num_linears: int, gpu: Limits) -> Plan | None:
    """The plan for the first of the four linears, the last layer's three or all; None: they do not fit."""
    A, C, F, N, _ = sizes
    num_blocks, row_chunks = _num_blocks(C, F, gpu), ceil(C, CHUNK)
    if not _copies(T, sizes, num_blocks):
        return None
    most_chunks = ceil(row_chunks, ceil(row_chunks, WARPS * CHUNKS))
    linears = ((C, A), (sizes.fc_1_rows, C), (C, F), (N, C))[:num_linears]
    for most_rows in range(STAGE_OUTPUTS, FEWEST_ROWS - 1, -1):
        needed = partial = rows = 0
        for outputs, inputs in linears:
            its_outputs, steps = _of_a_block(outputs, sizes, num_blocks), ceil(ceil(inputs, CHUNK), most_chunks)
            its_tiles = ceil(its_outputs, most_rows)
            tile = ceil(its_outputs, its_tiles)
            stages = ceil(its_outputs, tile) * steps
            rows, needed = max(rows, tile), needed + stages
            partial = max(partial, 4 * stages * STAGE_OUTPUTS * T * WARPS)
        stage_bytes = rows * odd_stride(2 * CHUNK * most_chunks) + BARRIER_BYTES
        others = partial + T * odd_stride(2 * max(inputs for _, inputs in linears)) + 4 * C
        num_stages = min(needed, max(0, gpu.shared_bytes - ASIDE - others) // stage_bytes)
        if num_stages >= min(needed, FEWEST_STAGES):
            return Plan(most_chunks, most_rows, num_stages, others + num_stages * stage_bytes)
    return None


@cache
def _planned(T: int, sizes: Sizes, num_linears: int, gpu: Limits) -> dict[str, int]:
    """The plan by the launcher's names, for layers that were not refused."""
    found = plan(T, sizes, num_linears, gpu)
    if found is None:
        raise KernelError(f"One launch takes no {T} tokens through these layers: {sizes}. {LEAVE_OUT}")
    return found._asdict()


def _num_blocks(C: int, F: int, gpu: Limits) -> int:
    """A block a multiprocessor, but none that would send nothing: nobody would wait for it before its turn is over."""
    return min(gpu.num_blocks, max(C, F))


def _of_a_block(outputs: int, sizes: Sizes, num_blocks: int) -> int:
    """Outputs at most; a gate is in the block of what it lets through."""
    unit = 2 if sizes.gated and outputs == sizes.fc_1_rows else 1
    return ceil(outputs // unit, num_blocks) * unit


@cache
def _copies(T: int, sizes: Sizes, num_blocks: int) -> int:
    """Of what blocks send to each other: a group of threads, an output each, sends to one. 0: it does not fit."""
    _, C, _, N, _ = sizes
    most = max(_of_a_block(outputs, sizes, num_blocks) for outputs in (C, sizes.fc_1_rows, N))
    group = 1 << (most - 1).bit_length()
    return min(MOST_COPIES, NUM_READERS // group // T)


@cache
def _exchange(device: torch.device, T: int, C: int, F: int, copies: int) -> tuple[Tensor, Tensor]:
    """Where blocks pass their outputs on. Launches of these sizes share it, and leave it as the next one needs it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelError(
            "The first launch of fused_layer for these sizes cannot be captured: it makes memory that stays. "
            "Run the step once before it is captured."
        )
    numbers = torch.full((2 * copies * T * (2 * C + F),), -1, dtype=torch.int16, device=device)
    return numbers, torch.zeros(1, dtype=torch.int32, device=device)


def _pointers(w: Linear | None, norm: Norm | None) -> tuple[int | None, ...]:
    if w is None:
        return None, None, None, None
    return at(w.weight), at(w.bias), at(norm and norm.weight), at(norm and norm.bias)
