"""The sizes of a case, and the inputs of those sizes that its op takes.

T tokens, B rows, K columns of the KV cache, C channels, N outputs, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from eet_lab.naming import TEXT, Form
from eet_lab.ops import reference
from eet_lab.ops.types import Extras, Linear, Norm, Span, Spec, Step, fresh


class Shape(Protocol):
    """The sizes of one test; `str` names it in results."""

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What the op takes, the same numbers for the same seed on every device."""

    def read_bytes(self, itemsize: int) -> int:
        """Bytes that have to be moved, each once."""

    def held_bytes(self, itemsize: int) -> int:
        """Of the inputs, where a call reads a part of them, and of what it writes."""
        return self.read_bytes(itemsize)


class NamedShape(Shape):
    """A shape whose name is read again, so that an op can be timed at any size."""

    form: ClassVar[Form]

    def named(self) -> Mapping[str, Any]:
        """The values of the form's fields and flags; None where a name does without."""
        return vars(self)

    def __str__(self) -> str:
        return self.form.write(self.named())


@dataclass(frozen=True)
class LinearShape(NamedShape):
    """A linear layer of T tokens, after a norm or before a residual."""

    form = Form("t<T tokens>/n<N outputs>/c<C channels>[/<act activation>]{/outlier<outlier>}{/mean<mean>}", act=TEXT)

    T: int
    N: int
    C: int
    act: str | None = None
    bias: bool = True
    rms: bool = False
    residual: bool = False
    outlier: int = 0  # what a row's first number is beside the others, which are about 1
    mean: int = 1  # of all, which a norm has to take away

    def named(self) -> Mapping[str, Any]:
        """The mean is named where it is another."""
        return {**vars(self), "mean": None if self.mean == 1 else self.mean}

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What norm_linear or linear_residual takes."""
        normal = Normal(device, dtype, seed)
        x = normal(self.T, self.C) + self.mean
        x[:, 0] += self.outlier
        w = Linear(normal(self.N, self.C, scale=self.C**-0.5), normal(self.N) if self.bias else None)
        if self.residual:
            return x, w, normal(self.T, self.N)
        return x, Norm(normal(self.C) + 1, None if self.rms else normal(self.C), 1e-5), w, self.act

    def read_bytes(self, itemsize: int) -> int:
        """Weights and activations, each once."""
        outputs = self.N // 2 if self.act in reference.GATED else self.N
        return itemsize * (self.N * self.C + self.T * self.C + self.T * outputs * (1 + self.residual))


@dataclass(frozen=True)
class AttentionShape(NamedShape):
    """A batch whose rows have `lengths` real tokens, right-aligned; the cache may be longer than it has to be."""

    form = Form(
        "b<B rows>/<cache><low tokens a row>[-<high tokens a row>]/h<H heads>[g<G KV heads>]/d<D head dim>"
        "[/packed]{/slack}{/page<page>}{/rope}{/normed}",
        cache="kv|s",  # of a decode step, and of a prefill
    )

    lengths: tuple[int, ...]
    H: int
    G: int
    D: int
    decode: bool = False  # the newest token alone is new
    packed: bool = False  # no pads among the T tokens
    masked: bool = False
    slack: int = 0  # columns of the extent that no query may see
    page: int = 0  # columns of a page of the cache; 0: it is not in pages
    rope: bool = False
    normed: bool = False  # the heads of queries and keys

    def named(self) -> Mapping[str, Any]:
        """Of the lengths the shortest and the longest; KV heads where they are fewer than heads."""
        low, high = min(self.lengths), max(self.lengths)
        own = {"B": len(self.lengths), "low": low, "high": high if high > low else None}
        return {**vars(self), **own, "cache": "kv" if self.decode else "s", "G": self.G if self.G < self.H else None}

    @property
    def spec(self) -> Spec:
        return Spec(self.H, self.G, self.D, rope=self.rope, rope_factor=1.2 if self.rope else 1.0)

    def step(self, device: str) -> Step:
        """Where the tokens sit; as the engine's layouts place them."""
        B, longest = len(self.lengths), max(self.lengths)
        num_pad = torch.tensor([longest - length for length in self.lengths])
        begin = longest - 1 if self.decode else 0
        rows = torch.arange(B).repeat_interleave(longest - begin)
        columns = torch.arange(begin, longest).repeat(B)
        if self.packed:
            real = columns >= num_pad[rows]
            rows, columns = rows[real], columns[real]
        is_first = columns == torch.clamp(num_pad, min=begin)[rows]
        first = is_first.nonzero()[:, 0]
        count = longest - columns[first]
        if self.decode:
            columns = torch.tensor([longest - 1]).expand(B)  # as the engine has it: one number for all rows
        spans = tuple(Span(*span) for span in zip(first.tolist(), count.tolist(), num_pad.tolist(), strict=True))
        positions = torch.clamp(columns - num_pad[rows], min=0)
        positions = positions.to(device)
        return Step(
            ids=positions,
            positions=positions,
            rows=rows.to(device),
            columns=columns.to(device),
            last=(first + count - 1).to(device),
            num_pad=num_pad.to(device),
            first=first.to(device),
            count=count.to(device),
            spans=spans,
            extent=longest + self.slack,
            exact=self.slack == 0,
        )

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What attention takes, and with a mask what masked_attention takes besides."""
        normal, step = Normal(device, dtype, seed), self.step(device)
        B, K, T = len(self.lengths), step.extent, len(step.rows)
        num_columns = -(-K // self.page) * self.page if self.page else K + 3
        keys, values = (normal(B, self.G, num_columns, self.D) for _ in range(2))
        kv = Columns(keys, values, self.G, self.D)
        if self.page:
            kv = kv.in_pages(self.page, seed)
        qkv = normal(T, (self.H + 2 * self.G) * self.D)
        q_norm, k_norm = (Norm(normal(self.D) + 1, None, 1e-6) if self.normed else None for _ in range(2))
        inv_freq = 1e4 ** -(torch.arange(0, self.D, 2, device=device) / self.D) if self.rope else None
        extras = (Extras(q_norm, k_norm, inv_freq),) if self.rope or self.normed else ()
        if not self.masked:
            return qkv, kv, step, self.spec, *extras
        return qkv, kv, step, self.spec, *extras, reference.dense_mask(step, self.spec, qkv, empty=fresh)

    def read_bytes(self, itemsize: int) -> int:
        """Keys, values and activations, each once."""
        tokens = len(self.lengths) if self.decode else sum(self.lengths)
        return itemsize * self.D * (2 * self.G * sum(self.lengths) + 2 * (self.H + self.G) * tokens)


class Columns(NamedTuple):
    """One layer's keys and values, with a few columns more than a step asks for, or in pages."""

    keys: Tensor
    values: Tensor
    num_heads: int
    head_dim: int
    block_table: Tensor | None = None

    def room(self, step: Step) -> tuple[Tensor, Tensor]:
        if self.block_table is not None:
            return self.keys, self.values
        return self.keys[:, :, : step.extent], self.values[:, :, : step.extent]

    @property
    def num_columns(self) -> int:
        """Of a row."""
        num_blocks = 1 if self.block_table is None else self.block_table.shape[1]
        return num_blocks * self.keys.shape[2]

    def place(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Where columns of rows lie: the first and the third index of keys and of values."""
        if self.block_table is None:
            return rows, columns
        page = self.keys.shape[2]
        return self.block_table[rows, columns // page].long(), columns % page

    def in_pages(self, page: int, seed: int) -> Columns:
        """The same columns in pages, shuffled, among one that no row has."""
        B, G, num_columns, D = self.keys.shape
        blocks = num_columns // page
        order = torch.randperm(B * blocks + 1, generator=torch.Generator().manual_seed(seed))
        table = order[1:].view(B, blocks).to(self.keys.device)

        def shuffled(part: Tensor) -> Tensor:
            pool = part.new_zeros(B * blocks + 1, G, page, D)
            pool[table] = part.unflatten(2, (blocks, page)).transpose(1, 2)
            return pool

        return Columns(shuffled(self.keys), shuffled(self.values), G, D, table.int())


class Normal:
    """Seeded normal numbers of one type, the same on every device."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype, self.source = device, dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1) -> Tensor:
        return (torch.randn(*shape, generator=self.source) * scale).to(self.device, self.dtype)


def copied(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """The same inputs in memory of their own, floating-point numbers perhaps in another type."""
    if isinstance(tree, Tensor):
        return tree.to(dtype, copy=True) if dtype and tree.is_floating_point() else tree.clone()
    if isinstance(tree, tuple):
        parts = [copied(part, dtype) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree
