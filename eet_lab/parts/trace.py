"""Lifetimes of the tensors of a pass, traced while it runs: on meta tensors, which needs no GPU, or for real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from eet_lab.memory import Lifetime, live_bytes
from eet_lab.memory.lifetimes import aligned


class Trace:
    """Gives out new tensors, and watches when each dies."""

    def __init__(self) -> None:
        self._lifetimes: list[Lifetime | None] = []
        self._alive: list[tuple[StorageWeakRef, str, int, int, str]] = []  # a storage, and what it is for and from when

    def empty(
        self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None, *, op: str = ""
    ) -> Tensor:
        self._bury()
        # `new_empty` takes ten times as long to make a meta tensor.
        dtype = dtype or like.dtype
        out = torch.empty(shape, dtype=dtype, device=like.device)
        num_bytes, storage = aligned(prod(shape) * dtype.itemsize), StorageWeakRef(out.untyped_storage())
        self._alive.append((storage, name, num_bytes, len(self._lifetimes), op))
        self._lifetimes.append(None)
        return out

    def finish(self) -> tuple[Lifetime, ...]:
        """All lifetimes in order of first use; what is still alive lives to the end."""
        self._bury(even_alive=True)
        return tuple(life for life in self._lifetimes if life is not None)

    def adopt(self, lifetimes: Sequence[Lifetime]) -> None:
        """Take these for what was asked for."""
        self._lifetimes = [*lifetimes]

    def _bury(self, even_alive: bool = False) -> None:
        last, alive = len(self._lifetimes) - 1, []
        for entry in self._alive:
            storage, name, num_bytes, first, op = entry
            if even_alive or storage.expired():
                self._lifetimes[first] = Lifetime(name, num_bytes, first, last, op)
            else:
                alive.append(entry)
        self._alive = alive


class TracedPass(NamedTuple):
    """A pass that can be run on meta tensors, with a trace as the source of all memory.

    Equal keys make equal requests. `outline` is the same pass with as few layers as tell what each of the others does.
    `repeated` passes may be captured into a graph, which holds on to their addresses.
    """

    key: tuple
    run: Callable[[Trace], None]
    outline: Callable[[Trace], None] | None = None
    repeated: bool = False

    def lifetimes(self) -> tuple[Lifetime, ...]:
        """What the pass asks for."""
        return _traced(self.run)

    def outlines(self) -> TracedPass:
        """The outline as a pass of its own."""
        return TracedPass(("outline", *self.key), self.outline or self.run, repeated=self.repeated)

    def outlined(self) -> tuple[Lifetime, ...]:
        """The lifetimes of the outline. At their peak they hold as many bytes as those of the whole pass."""
        return _traced(self.outline or self.run)


def covers(larger: Sequence[Lifetime], smaller: Sequence[Lifetime]) -> bool:
    """Whether offsets made for `larger` serve `smaller` as well: the same requests, none of them larger."""
    return len(larger) == len(smaller) and all(
        a.num_bytes >= b.num_bytes and (a.name, a.op, a.first, a.last) == (b.name, b.op, b.first, b.last)
        for a, b in zip(larger, smaller, strict=True)
    )


def bounding(passes: Sequence[TracedPass]) -> TracedPass:
    """One pass whose offsets serve all of these passes: what they ask for, each buffer as large as the largest.

    Its outline is that of the pass that needs the most at once.
    """

    def run(trace: Trace) -> None:
        each = [traced_pass.lifetimes() for traced_pass in passes]
        sizes = (max(life.num_bytes for life in same) for same in zip(*each, strict=True))
        trace.adopt([replace(life, num_bytes=size) for life, size in zip(each[0], sizes, strict=True)])

    def outline(trace: Trace) -> None:
        each = (traced_pass.outlined() for traced_pass in passes)
        trace.adopt(max(each, key=lambda lifetimes: max(live_bytes(lifetimes), default=0)))

    return TracedPass(tuple(traced_pass.key for traced_pass in passes), run, outline)


def _traced(run: Callable[[Trace], None]) -> tuple[Lifetime, ...]:
    trace = Trace()
    run(trace)
    return trace.finish()
