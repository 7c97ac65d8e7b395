"""Activations at planned addresses: a pool says where, and each of its chunks is one tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from eet_lab.memory import POOLS, Chunk, DriverCalls, Lifetime, Plan, Pool, one_after_the_other
from eet_lab.memory.lifetimes import aligned
from eet_lab.parts.memory import FreshMemory
from eet_lab.parts.trace import TracedPass, covers


class Slot:
    """Where one request of a pass lies, and the tensor that it got last, which is given again for the same shape."""

    __slots__ = ("chunk_id", "life", "memory", "numbers", "tensor")

    def __init__(self, life: Lifetime, chunk_id: int, memory: Tensor) -> None:
        self.life, self.chunk_id, self.memory = life, chunk_id, memory
        self.numbers = memory  # the same bytes as numbers of the type that was asked for last
        self.tensor: Tensor | None = None

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num = prod(shape)
        num_bytes = num * dtype.itemsize
        if self.life.name != name or aligned(num_bytes) > self.life.num_bytes:
            raise RuntimeError(
                f"request {self.life.first} of this pass is {name} with {num_bytes} bytes, but it was traced as "
                f"{self.life.name} with {self.life.num_bytes}: an op's requests must not depend on values, only on "
                "shapes"
            )
        if self.numbers.dtype != dtype:
            self.numbers = self.memory.view(dtype)
        self.tensor = self.numbers[:num].view(shape)
        return self.tensor


class Arena(FreshMemory):
    """A pool's chunks, in which every pass runs at the offsets of a plan.

    A request, its passes one after the other, is traced once for its shape, and placed where another shape was
    before it; the same shape again needs nothing. After `reserve` no smaller request needs a place of its own, and so
    no memory either.
    """

    has_arena = True

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self._chunks: dict[int, Tensor] = {}
        self._repeated: set[int] = set()  # ids of chunks in which passes lie that may have been captured
        self._request: tuple = ()
        self._plans: dict[str, Plan] = {}
        self._slots: dict[str, list[Slot]] = {}
        self._largest: dict[str, tuple[Lifetime, ...]] = {}  # outlines of the passes that memory is reserved for
        self._reserved: tuple[tuple, dict[str, tuple[Lifetime, ...]]] = ((), {})
        self._current: list[Slot] = []
        self._cursor = 0

    def plan(self, passes: Mapping[str, TracedPass], like: Tensor) -> bool:
        before, request = self._num_traced, tuple(traced_pass.key for traced_pass in passes.values())
        repeated = tuple(name for name, traced_pass in passes.items() if traced_pass.repeated)
        if self._largest and all(self._is_covered(name, traced_pass) for name, traced_pass in passes.items()):
            request, traces = self._reserved
        elif request != self._request:
            traces = {name: self.traced(traced_pass) for name, traced_pass in passes.items()}
        if request != self._request:
            self._place(request, traces, repeated, like)
        return self._num_traced > before

    def reserve(self, passes: Mapping[str, TracedPass], like: Tensor) -> bool:
        self._largest = {}
        had_to = self.plan(passes, like)
        self._reserved = self._request, {name: plan.lifetimes for name, plan in self._plans.items()}
        self._largest = {name: self.outlined(traced_pass) for name, traced_pass in passes.items()}
        return had_to

    def enter(self, name: str) -> None:
        self._current, self._cursor = self._slots[name], 0

    def empty(
        self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None, *, op: str = ""
    ) -> Tensor:
        if self._cursor == len(self._current):
            raise RuntimeError(f"{name} is request {self._cursor} of this pass, which was traced with fewer")
        slot = self._current[self._cursor]
        self._cursor += 1
        dtype, known = dtype or like.dtype, slot.tensor
        if known is not None and known.shape == shape and known.dtype == dtype and slot.life.name == name:
            return known
        return slot.view(name, shape, dtype)

    def plans(self) -> dict[str, Plan]:
        """What each pass asked for, or may ask for, and where it lies in what is held."""
        return dict(self._plans)

    @property
    def calls(self) -> DriverCalls:
        return self._pool.calls

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.numel() for chunk in [*self._chunks.values()])  # a list: another thread may watch

    @property
    def held_bytes(self) -> int:
        return self.num_bytes

    def _is_covered(self, name: str, traced_pass: TracedPass) -> bool:
        outline = self.outlined(traced_pass)
        return name in self._largest and covers(self._largest[name], outline)

    def _place(
        self, request: tuple, traces: dict[str, tuple[Lifetime, ...]], repeated: Sequence[str], like: Tensor
    ) -> None:
        """One plan for all passes, one after the other, cut into a plan for each."""
        begins = [0, *accumulate(map(len, traces.values()))]
        self._request, self._slots, self._current = (), {}, []  # they hold chunks that may have to go
        plan = self._pool.place(one_after_the_other(traces.values()))
        self._hold(plan.chunks, like)
        self._plans = {
            name: Plan(trace, plan.offsets[begin : begin + len(trace)], plan.chunks)
            for begin, (name, trace) in zip(begins, traces.items(), strict=False)
        }
        self._slots = {name: self._placed(plan) for name, plan in self._plans.items()}
        self._repeated |= {slot.chunk_id for name in repeated for slot in self._slots[name]}
        self._request = request

    def _hold(self, chunks: Sequence[Chunk], like: Tensor) -> None:
        """Let go of chunks that left the pool, then allocate the new ones: all at once might not fit."""
        held = {chunk.id for chunk in chunks}
        gone = self._chunks.keys() - held
        if gone & self._repeated or not self._chunks:
            self.generation += 1
        for gone_id in gone:
            del self._chunks[gone_id]
        self._repeated &= held
        for chunk in chunks:
            if chunk.id not in self._chunks:
                self._chunks[chunk.id] = like.new_empty(chunk.num_bytes, dtype=torch.uint8)

    def _placed(self, plan: Plan) -> list[Slot]:
        starts = [chunk.start for chunk in plan.chunks]
        slots = []
        for life, offset in zip(plan.lifetimes, plan.offsets, strict=True):
            chunk = plan.chunks[bisect_right(starts, offset) - 1]
            at = offset - chunk.start
            slots.append(Slot(life, chunk.id, self._chunks[chunk.id][at : at + life.num_bytes]))
        return slots


@dataclass(frozen=True)
class PlannedMemory:
    """A memory part: an arena over a pool of that name (`memory.POOLS`), which gives chunks back as `release` says."""

    planner: str = "greedy_by_size"
    release: str = "immediate"

    def __call__(self) -> Arena:
        return Arena(POOLS[self.planner](self.release))
