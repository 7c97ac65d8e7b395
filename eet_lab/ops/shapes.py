"""The sizes of a case, and the inputs of those sizes that its op takes.

T tokens, B rows, K columns of the KV cache, C channels, N outputs, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from eet_lab.memory.lifetimes import aligned
from eet_lab.naming import TEXT, Form
from eet_lab.ops import reference
from eet_lab.ops.types import KV, Batch, Extras, Keys, Linear, Norm, Spec, fresh


class Shape(Protocol):
    """The sizes of one test; `str` names it in results."""

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What the op takes, the same numbers for the same seed on every device."""

    def read_bytes(self, itemsize: int) -> int:
        """Bytes that have to be moved, each once."""

    def held_bytes(self, itemsize: int) -> int:
        """Bytes of all inputs, of which a call may read a part, and of what it writes."""
        return self.read_bytes(itemsize)

    def num_flops(self) -> float:
        """Floating-point operations, where they and not the bytes may be the bound; else 0."""
        return 0.0


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
        "[/packed]{/slack}{/page<page>}{/rope}{/normed}{/window<window>}{/scale<scale>}",
        cache="kv|s",  # of a decode step, and of a prefill
        scale=r"[0-9.e-]+",
    )

    lengths: tuple[int, ...]
    H: int
    G: int
    D: int
    decode: bool = False  # the newest token alone is new
    packed: bool = False  # no pads among the T tokens
    masked: bool = False
    slack: int = 0  # columns below `max_kv` that no query may see
    page: int = 0  # columns of a page of the cache; 0: it is not in pages
    rope: bool = False
    normed: bool = False  # the heads of queries and keys
    window: int | None = None  # a query sees so many columns, its own among them
    scale: float | None = None  # of scores

    def named(self) -> Mapping[str, Any]:
        """The values in the name: the shortest and the longest length, and KV heads where they are fewer than heads."""
        low, high = min(self.lengths), max(self.lengths)
        own = {"B": len(self.lengths), "low": low, "high": high if high > low else None}
        return {**vars(self), **own, "cache": "kv" if self.decode else "s", "G": self.G if self.G < self.H else None}

    @property
    def spec(self) -> Spec:
        factor = 1.2 if self.rope else 1.0
        return Spec(self.H, self.G, self.D, True, self.window, self.scale, self.rope, factor)

    def batch(self, device: str) -> Batch:
        """Where the tokens sit: right-aligned in a rectangle of columns, as left padding places them."""
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
            columns = torch.tensor([longest - 1]).expand(B)  # one number for all rows
        spans = tuple(zip(first.tolist(), count.tolist(), strict=True))
        seen = tuple((pad, longest) for pad in num_pad.tolist())
        positions = torch.clamp(columns - num_pad[rows], min=0).to(device)
        return Batch(
            ids=positions,
            positions=positions,
            rows=rows.to(device),
            columns=columns.to(device),
            last=(first + count - 1).to(device),
            first=first.to(device),
            count=count.to(device),
            keys=Keys(num_pad.to(device), None, seen, padded=len(set(self.lengths)) > 1),
            max_q=int(count.max()),
            max_kv=longest + self.slack,
            spans=spans,
        )

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What attention takes, and with a mask what masked_attention takes besides."""
        normal, batch = Normal(device, dtype, seed), self.batch(device)
        B, K, T = len(self.lengths), batch.max_kv, len(batch.rows)
        num_columns = aligned(K, self.page) if self.page else K + 3
        keys, values = (normal(B, self.G, num_columns, self.D) for _ in range(2))
        kv: KV = (keys[:, :, :K], values[:, :, :K])
        if self.page:
            keys, values, table = in_pages(keys, values, self.page, seed)
            kv, batch = (keys, values), batch._replace(keys=batch.keys._replace(table=table))
        qkv = normal(T, (self.H + 2 * self.G) * self.D)
        q_norm, k_norm = (Norm(normal(self.D) + 1, None, 1e-6) if self.normed else None for _ in range(2))
        inv_freq = 1e4 ** -(torch.arange(0, self.D, 2, device=device) / self.D) if self.rope else None
        extras = (Extras(q_norm, k_norm, inv_freq),) if self.rope or self.normed else ()
        if not self.masked:
            return qkv, kv, batch, self.spec, *extras
        return qkv, kv, batch, self.spec, *extras, reference.dense_mask(batch, self.spec, qkv, empty=fresh)

    def read_bytes(self, itemsize: int) -> int:
        """Keys, values and activations, each once; keys of a decode step from the window on."""
        tokens = len(self.lengths) if self.decode else sum(self.lengths)
        most = self.window if self.window and self.decode else max(self.lengths, default=0)
        seen = sum(min(length, most) for length in self.lengths)
        return itemsize * self.D * (2 * self.G * seen + 2 * (self.H + self.G) * tokens)


def num_columns(kv: KV, keys: Keys) -> int:
    """How many columns of a row a cache has."""
    return kv[0].shape[2] * (1 if keys.table is None else keys.table.shape[1])


def place(kv: KV, keys: Keys, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Where columns of rows lie: the first and the third index of keys and of values."""
    if keys.table is None:
        return rows, columns
    page = kv[0].shape[2]
    return keys.table[rows, columns // page].long(), columns % page


def in_pages(keys: Tensor, values: Tensor, page: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same columns in pages, shuffled, among one that no row has, and the block table."""
    B, G, num_columns, D = keys.shape
    blocks = num_columns // page
    order = torch.randperm(B * blocks + 1, generator=torch.Generator().manual_seed(seed))
    table = order[1:].view(B, blocks).to(keys.device)

    def shuffled(part: Tensor) -> Tensor:
        pool = part.new_zeros(B * blocks + 1, G, page, D)
        pool[table] = part.unflatten(2, (blocks, page)).transpose(1, 2)
        return pool

    return shuffled(keys), shuffled(values), table.int()


class Normal:
    """Seeded normal numbers of one type, the same on every device."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype, self.source = device, dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1) -> Tensor:
        return (torch.randn(*shape, generator=self.source) * scale).to(self.device, self.dtype)


def copied(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """The same inputs in memory of their own, floating-point numbers perhaps in another type."""
    if isinstance(tree, Tensor):  # with all that its memory holds, so that views of it lie as they lay
        whole = tree.as_strided((tree.untyped_storage().nbytes() // tree.itemsize,), (1,), 0)
        mine = whole.to(dtype, copy=True) if dtype and tree.is_floating_point() else whole.clone()
        return mine.as_strided(tree.shape, tree.stride(), tree.storage_offset())
    if isinstance(tree, tuple):
        parts = [copied(part, dtype) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree
