"""One `Case` for each op with kernels: inputs, shapes to test and to time, and the check against the reference.

T tokens, B rows, K columns of the KV cache, C channels, N outputs, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eet_lab.errors import EETError
from eet_lab.ops import reference
from eet_lab.ops.shapes import AttentionShape, LinearShape, Shape, copied, num_columns, place
from eet_lab.ops.types import Empty, fresh

RED_ZONE = 512  # bytes on either side of what an op gets from `empty`
SENTINEL = 0xFF  # in every byte; as a number it is NaN, so what is never written cannot pass


class CaseFailed(EETError, AssertionError):
    """An op that does not do what its reference does."""


class RedZones:
    """An `Empty` whose memory is full of NaN and surrounded by bytes that must not change."""

    def __init__(self) -> None:
        self.given: list[tuple[str, Tensor]] = []

    def __call__(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or like.dtype
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        whole = torch.full((num_bytes + 2 * RED_ZONE,), SENTINEL, dtype=torch.uint8, device=like.device)
        self.given.append((name, whole))
        return whole[RED_ZONE : RED_ZONE + num_bytes].view(dtype).view(shape)

    def check(self) -> None:
        """Raises CaseFailed when an op wrote outside of what it asked for."""
        for name, whole in self.given:
            if bool((torch.cat((whole[:RED_ZONE], whole[-RED_ZONE:])) != SENTINEL).any()):
                raise CaseFailed(f"The op wrote outside of its buffer {name!r}.")


def error_budget(lost: float, largest: float, dtype: torch.dtype, num_eps: int = 4) -> float:
    """How far numbers may be off that are computed in `dtype`, in another order than plain PyTorch's.

    Twice what plain PyTorch itself has `lost` there, and a few roundings of the largest number.
    """
    return 2 * lost + num_eps * torch.finfo(dtype).eps * largest


@dataclass(frozen=True)
class Case:
    """An op by name, what to run it on, and what counts as right."""

    name: str
    op: str
    shapes: tuple[Shape, ...]
    bench: tuple[Shape, ...] = ()
    launches: int = 1  # of the CUDA op, on the first bench shape in a 16-bit type, on Hopper
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)  # that the CUDA op takes

    @property
    def reference(self) -> Callable[..., Any]:
        """What the op means, in plain PyTorch."""
        return getattr(reference, self.op)

    def call(self, op: Callable[..., Tensor], inputs: tuple[Any, ...], empty: Empty) -> Tensor:
        """The op on its inputs; a mask, the last of them, goes by keyword."""
        if self.op in ("masked_attention", "cross_attention"):
            return op(*inputs[:-1], mask=inputs[-1], empty=empty)
        return op(*inputs, empty=empty)

    def check(
        self, op: Callable[..., Tensor], shape: Shape, device: str, dtype: torch.dtype, seed: int = 0
    ) -> tuple[float, float]:
        """Compare an op with the reference: (error, budget), both absolute.

        Raises CaseFailed when the error is larger, a buffer was left unwritten, or its surroundings were written to.
        """
        inputs, empty = shape.inputs(device, dtype, seed), RedZones()
        mine = copied(inputs)
        self.poison(mine)
        got = self.call(op, mine, empty)
        empty.check()
        error, budget = self.compared(shape, dtype, inputs, mine, got)
        if not error <= budget:  # NaN is not
            raise CaseFailed(f"{self.name}/{shape} {dtype}: error {error:.3g}, the budget is {budget:.3g}.")
        return error, budget

    def compared(
        self, shape: Any, dtype: torch.dtype, inputs: tuple[Any, ...], mine: tuple[Any, ...], got: Tensor
    ) -> tuple[float, float]:
        """How far an output is from the reference in fp64, and how far it may be. `mine`: inputs as the op left them.

        The budget is what the reference itself loses in `dtype`, twice, and four roundings of the largest number.
        """
        plain, precise, rounded = self.reference, copied(inputs, torch.float64), copied(inputs)
        exact, low = self.call(plain, precise, fresh), self.call(plain, rounded, fresh)
        if got.shape != exact.shape or got.dtype != dtype:
            raise CaseFailed(
                f"{self.name}/{shape}: {tuple(got.shape)} {got.dtype} instead of {tuple(exact.shape)} {dtype}."
            )
        if isinstance(shape, AttentionShape):
            exact, low, got = self.real_tokens(shape, (exact, low, got), (precise, rounded, mine))
        if not got.numel():
            return 0.0, 0.0
        error, lost = (float((x.double() - exact).abs().max()) for x in (got, low))
        return error, error_budget(lost, float(exact.abs().max()), dtype)

    def poison(self, inputs: tuple[Any, ...]) -> None:
        """Put NaN where attention without a mask must not look: in pads, behind the newest column, before windows."""
        if self.op != "attention":
            return
        qkv, kv, batch, spec = inputs[:4]
        keys, begin, newest = batch.keys, batch.keys.begin, batch.columns[batch.last]
        if spec.window is not None:
            begin = begin.maximum(batch.columns[batch.first] + 1 - spec.window)
        column = torch.arange(num_columns(kv, keys), device=qkv.device)
        rows, columns = ((column >= begin[:, None]) & (column <= newest[:, None])).nonzero(as_tuple=True)
        visible = torch.zeros_like(kv[0][:, 0, :, 0], dtype=torch.bool).index_put(
            place(kv, keys, rows, columns), torch.ones((), dtype=torch.bool, device=qkv.device)
        )
        for cache in kv:
            cache.masked_fill_(~visible[:, None, :, None], torch.nan)
        qkv.masked_fill_((batch.columns < keys.begin[batch.rows])[:, None], torch.nan)

    def real_tokens(
        self, shape: AttentionShape, outputs: tuple[Tensor, ...], inputs: tuple[tuple[Any, ...], ...]
    ) -> list[Tensor]:
        """Outputs without pads, whose own must be 0, or finite with a mask; and the cache must hold what is new.

        Of the reference in fp64, of the reference, and of the op.
        """
        (qkv, kv, batch), got = inputs[-1][:3], outputs[-1]
        real = batch.columns >= batch.keys.begin[batch.rows]
        pads = got[~real]
        if not bool((pads.isfinite() if shape.masked else pads == 0).all()):
            raise CaseFailed(f"{self.name}/{shape}: a pad's own output is {pads.abs().max()}.")
        rows, columns = place(kv, batch.keys, batch.rows[real], batch.columns[real])
        new = qkv[real, shape.H * shape.D :].view(-1, 2, shape.G, shape.D)
        exact, low, mine = (each[1][0][rows, :, columns].double() for each in inputs)
        slack = 0.0
        if shape.rope or shape.normed:  # which round
            slack = 2 * float((low - exact).abs().max()) + 4 * torch.finfo(qkv.dtype).eps * float(exact.abs().max())
        if not torch.equal(kv[1][rows, :, columns], new[:, 1]) or not bool(((mine - exact).abs() <= slack).all()):
            raise CaseFailed(f"{self.name}/{shape}: the cache does not hold the new keys and values.")
        return [output[real] for output in outputs]


RAGGED = (37, 1, 130, 64)
XL = (25, 25, 64)  # heads of GPT-2 XL
GATED = tuple(
    LinearShape(T, N, C, act, bias)
    for T, N, C, act, bias in (
        (1, 96, 64, "swiglu", False),
        (5, 512, 64, "swiglu", True),
        (33, 528, 64, "geglu", False),
        (0, 96, 64, "swiglu", False),
        (3, 48, 4096, "geglu", True),  # fewer gates than blocks, and steps of their inputs
        (4, 1040, 1608, "swiglu", False),  # blocks with unequal shares
        (2, 16384, 1200, "swiglu", False),  # in stages of 16 outputs, as are those of more tokens
        (8, 1040, 1608, "geglu", True),
        (16, 6416, 1600, "swiglu", False),
    )
)
LINEARS = (
    *(LinearShape(T, 96, 64, "gelu_tanh") for T in (1, 2, 8, 9, 16, 17, 65)),
    LinearShape(0, 96, 64),
    LinearShape(1, 50257, 768, bias=False),
    LinearShape(3, 331, 8, "relu"),
    LinearShape(5, 1000, 1608, "gelu"),
    LinearShape(1, 4800, 1600, rms=True),
    LinearShape(4, 40, 4096),  # with this and the next, static and dynamic shared memory pass 48 KiB only together
    LinearShape(12, 40, 1600),
    LinearShape(2, 331, 8, "relu"),
    LinearShape(2, 40, 20000),  # with a norm cuBLAS's
    LinearShape(2, 140, 22528),  # steps that, rounded up, are fewer than they were to be
    LinearShape(2, 50257, 768, bias=False),
    LinearShape(16, 6400, 1600, "gelu_tanh"),
    LinearShape(64, 515, 1600, "gelu_tanh"),
    LinearShape(4, 40, 16384),
    LinearShape(4, 40, 12288),  # as many channels of a norm as a kernel takes
    *(LinearShape(T, 40, C) for T, C in ((1, 20488), (2, 10248), (3, 6832))),  # in registers without a norm
    *(LinearShape(T, 96, 3072) for T in (2, 4)),  # on two multiprocessors, and the next on all, blocks of many weights
    *(LinearShape(T, 4800, 4096, "gelu_tanh") for T in (1, 3)),
    LinearShape(9, 2048, 8192),
    # In tiles: many of a block, whose ring goes round; outputs and inputs that end within one, and more of those.
    *(LinearShape(T, N, C, "gelu_tanh") for T, N, C in ((20, 34_000, 72), (64, 17_001, 328), (33, 8500, 136))),
    *(LinearShape(T, N, C) for T, N, C in ((25, 331, 4104), (48, 1600, 6408), (64, 1000, 2056), (9, 8, 8008))),
    # cuBLAS with a bias, with neither it nor an activation of its own, and with outputs that fill no vector.
    *(LinearShape(T, N, 64, act) for T, N, act in ((97, 40, None), (82, 96, "gelu"), (94, 331, "relu"))),
    *(LinearShape(T, N, 64, "gelu_tanh", bias=bias) for T, N, bias in ((83, 40, False), (85, 331, True))),
    # One to eight chunks of inputs for a warp, steps that are equal and that are not.
    *(LinearShape(T, 40, C) for T, C in ((3, 512), (4, 768), (3, 1000), (4, 1280), (3, 1536), (4, 2056), (3, 6408))),
    # The same for more tokens, whose activations lie in registers: with a norm up to 1792 inputs, else in any number.
    *(LinearShape(T, 40, C) for T, C in ((8, 8), (5, 256), (6, 512), (7, 1000), (8, 1280), (5, 1536), (8, 2040))),
    *(LinearShape(T, 40, C) for T, C in ((7, 2056), (6, 3208), (8, 6408))),
    *(LinearShape(T, 1057, C) for T, C in ((5, 64), (6, 2560))),  # a tile more where a block has an output more
    # Rings that go round, tiles of less than eight outputs, blocks of up to 64; and beyond that other kernels again.
    *(LinearShape(T, N, C) for T, N, C in ((8, 512, 1000), (6, 480, 1536), (8, 6400, 1600), (8, 8448, 1600))),
    *(LinearShape(T, 8584, 64) for T in (4, 8)),
    LinearShape(6, 96, 1600, rms=True),
    LinearShape(20, 40, 16384, rms=True),
    *(LinearShape(T, 96, 1600, outlier=300) for T in (1, 5, 8, 16)),
    *(LinearShape(T, 96, C, mean=100, rms=rms) for T, C, rms in ((5, 1600, False), (8, 1600, True), (8, 8, False))),
)
XL_NORM_LINEARS = tuple(
    LinearShape(T, N, 1600, act) for T in (1, 8, 16) for N, act in ((4800, None), (6400, "gelu_tanh"), (50257, None))
)
XL_LINEAR_RESIDUALS = tuple(LinearShape(T, 1600, C, residual=True) for T in (1, 8, 16) for C in (1600, 6400))
HEADS = (*((4, 4, D) for D in (8, 32, 40, 64, 80, 96, 128, 256)), (8, 2, 64), (32, 2, 128), (12, 1, 64))


def _linears(residual: bool) -> tuple[LinearShape, ...]:
    return tuple(replace(shape, residual=residual, act=None if residual else shape.act) for shape in LINEARS)


def _decode(masked: bool) -> Case:
    """One new token a row."""
    decode = partial(AttentionShape, decode=True, masked=masked)
    shapes = [decode(RAGGED, *heads) for heads in HEADS]
    shapes += [decode((1,), *XL), decode((1000,), *XL), decode(tuple(range(1, 65)), 12, 12, 64)]
    shapes += [decode(RAGGED, 8, 2, 64, slack=126), decode((1000, 3, 500), 4, 4, 64), decode((600, 1), 8, 2, 128)]
    shapes += [decode(RAGGED, *heads, page=16) for heads in HEADS[3:]]
    shapes += [decode((1000, 3, 500), 4, 4, 64, slack=100, page=32), decode((600, 1), 8, 2, 128, page=128)]
    # Streams: little to read, two stages and a bit, rows that end where a stage does, more heads than a block serves;
    # and so many rows that each has one block, whose ring goes round.
    shapes += [decode((257, 1, 1), 1, 1, 64), decode((384, 257, 256, 5), 2, 2, 64), decode((300, 5, 257), 12, 1, 64)]
    shapes += [decode((320, 1, 64), 2, 1, 128)]
    shapes += [decode(RAGGED, *heads, rope=True) for heads in ((8, 2, 64), (4, 4, 80), (4, 2, 96), (2, 1, 256))]
    shapes += [decode(RAGGED, 16, 8, 128, rope=True, normed=True), decode((300, 1), 4, 2, 128, rope=True, page=16)]
    shapes += [decode((420, *(1,) * 66), 1, 1, 64, page=page) for page in (0, 16)]
    shapes += [decode((257, *(1,) * 66), 1, 1, 128, page=page) for page in (0, 64)]
    shapes += [decode(RAGGED, 4, 4, D, scale=0.3) for D in (40, 64)]
    shapes += [decode(RAGGED, 8, 2, 64, window=window) for window in (1, 33, 64)]
    bench = [decode((128,), 12, 12, 64), decode((256,), *XL), decode((512,) * 8, *XL)]
    bench += [decode((1024,), *XL), decode((4096,), *XL), decode((1024,), 32, 8, 128)]
    bench += [decode((1024,) * 16, *XL), decode((4096,) * 32, 32, 8, 128)]
    if masked:
        return Case("decode_masked_attention", "masked_attention", tuple(shapes), tuple(bench))
    shapes += [decode(RAGGED, *heads, window=40) for heads in HEADS] + [decode((300, 5), 4, 4, 128, scale=0.3)]
    shapes += [decode((300, 5, 257), 4, 4, D, scale=1.0) for D in (64, 128)]  # a warp's first keys are hidden
    shapes += [decode(RAGGED, 8, 2, 64, window=40, slack=126), decode(RAGGED, 4, 4, 80, window=33, page=16)]
    shapes += [decode(RAGGED, 16, 8, 128, window=33, rope=True, normed=True), decode((9, 20), 4, 2, 96, window=40)]
    for page in (0, 16, 64):  # streams, whose stages a window cuts, or begins with
        shapes += [decode((1000, 3, 500), 4, 4, 64, window=300, page=page, slack=100)]
        shapes += [decode((700, 1, 333), 12, 1, 64, window=257, page=page)]
        shapes += [decode((600, 290, 1), 8, 2, 128, window=288, page=page, rope=True)]
    # Rows that share blocks: one is long among short ones, in the first shapes on small GPUs alone.
    for longest, D in ((2100, 64), (4200, 128)):
        shapes += [decode((*range(1, 30, 3), longest), 4, 1, D, rope=True, page=16)]
        shapes += [decode((longest, *range(1, 150, 9)), 16, 8, D, rope=True, page=page) for page in (0, 64)]
    return Case("decode_attention", "attention", tuple(shapes), tuple(bench))


def _prefill(masked: bool) -> Case:
    """Whole prompts."""
    prefill = partial(AttentionShape, masked=masked)
    shapes = [prefill(RAGGED, *heads) for heads in HEADS]
    shapes += [prefill((2,), *XL), prefill((1, 3), *XL), prefill((128, 127, 129), 12, 12, 64)]
    shapes += [prefill(RAGGED, 8, 2, 64, slack=126), prefill(RAGGED, 8, 2, 128, page=16)]
    shapes += [prefill((128, 127, 129), 12, 12, 64, page=32)]
    shapes += [prefill((333, 5, 40), 8, 2, 64, rope=True), prefill(RAGGED, 4, 2, 128, rope=True, normed=True)]
    shapes += [prefill(RAGGED, 8, 2, 64, window=33)]
    shapes += [prefill(RAGGED, 4, 2, D, scale=0.3) for D in (32, 64)]
    bench = [prefill((2048,) * 8, 16, 16, 64), prefill((2048,) * 8, *XL), prefill((2048,) * 4, 32, 32, 128)]
    if masked:
        return Case("prefill_masked_attention", "masked_attention", tuple(shapes), tuple(bench), launches=2)
    shapes += [prefill(RAGGED, *heads, packed=True) for heads in HEADS[3:]]
    shapes += [prefill((333, 5, 40), 8, 2, 64, rope=True, packed=True), prefill((333,), 4, 2, 128, rope=True)]
    shapes += [prefill((300, 1, 129, 515), 4, 2, D, packed=True) for D in (64, 128, 256)]
    shapes += [prefill((333, 300), 2, 2, D, slack=5) for D in (96, 200)]
    shapes += [prefill(RAGGED, *heads, window=33) for heads in HEADS]
    shapes += [prefill(RAGGED, 4, 2, 64, packed=True, window=33), prefill((300, 1, 129), 4, 2, 128, page=16, window=65)]
    for window in (1, 63, 200):  # tiles that all queries skip, that some do, and one key alone
        shapes += [prefill((300, 1, 129, 515), 4, 2, D, window=window) for D in (32, 40, 64, 96, 128, 256)]
        shapes += [prefill((333, 600), 2, 2, 64, slack=5, window=window, page=page) for page in (0, 32)]
        shapes += [prefill((333, 600), 2, 1, 128, rope=True, packed=True, window=window)]
    shapes += [prefill((300, 1, 129, 515), 4, 2, D, packed=True, page=16) for D in (40, 64, 256)]
    ragged = tuple(64 + 1984 * i // 7 for i in range(8))
    bench += [prefill(ragged, *XL, packed=True)]
    return Case("prefill_attention", "attention", tuple(shapes), tuple(bench))


CASES = (
    Case(
        "norm_linear",
        "norm_linear",
        (*_linears(residual=False), *GATED, LinearShape(1, 16384, 2048, "swiglu", bias=False, rms=True)),
        XL_NORM_LINEARS,
    ),
    Case(
        "linear_residual",
        "linear_residual",
        (
            *_linears(residual=True),
            *(LinearShape(T, 64, 6400, residual=True) for T in (1, 2, 8, 16)),
            *(LinearShape(T, N, C, residual=True) for T, N, C in ((7, 331, 7184), (6, 2112, 8208))),  # halves of inputs
            LinearShape(3, 8456, 6856, residual=True),  # too many outputs of a block for registers
        ),
        XL_LINEAR_RESIDUALS,
    ),
    _decode(masked=False),
    _decode(masked=True),
    _prefill(masked=False),
    _prefill(masked=True),
)
