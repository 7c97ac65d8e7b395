"""Where activations live. A memory part answers `empty`, after `plan` has shown it the passes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eet_lab.engine.trace import Rehearsal, Trace
from eet_lab.memory import PLANNERS, Lifetime, Plan, Planner
from eet_lab.memory.lifetimes import aligned


class FreshMemory:
    """The baseline: a new tensor for whoever asks; the reference count frees it.

    Passes are rehearsed all the same, so that their memory can be told and drawn; plans are kept by shape.
    """

    generation = 0

    def __init__(self, planner: Planner = PLANNERS["greedy_by_size"]) -> None:
        self._planner = planner
        self._trace: Trace | None = None
        self._by_key: dict[tuple, Plan] = {}
        self._plans: dict[str, Plan] = {}

    def empty(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for one activation; not initialized."""
        if self._trace is not None:
            return self._trace.empty(name, shape, like, dtype)
        return like.new_empty(shape, dtype=dtype)

    def plan(self, rehearsals: Mapping[str, Rehearsal], like: Tensor) -> None:
        """Before a run: its passes, each at its largest. `like` tells the device."""
        for name, rehearsal in rehearsals.items():
            if rehearsal.key not in self._by_key:
                self._by_key[rehearsal.key] = self._planner(self._traced(rehearsal))
            self._plans[name] = self._by_key[rehearsal.key]

    def enter(self, name: str) -> None:
        """The next calls of `empty` belong to this pass."""

    def plans(self) -> dict[str, Plan]:
        """What each pass of the last run asked for, and where an arena would put it."""
        return dict(self._plans)

    @property
    def num_bytes(self) -> int:
        """The most bytes of activations that are alive at once."""
        return max((plan.lower_bound_bytes for plan in self.plans().values()), default=0)

    @property
    def held_bytes(self) -> int:
        """Bytes that stay allocated between passes."""
        return 0

    def _traced(self, rehearsal: Rehearsal) -> tuple[Lifetime, ...]:
        self._trace = Trace()
        try:
            rehearsal.run()
            return self._trace.finish()
        finally:
            self._trace = None


class Arena(FreshMemory):
    """One allocation: each pass is rehearsed once, planned, and then runs at planned offsets.

    A plan for larger shapes may need a larger arena; `generation` counts its moves, since whatever holds
    addresses (a captured graph) is void after one.
    """

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner)
        self._arena: Tensor | None = None
        self._current: Plan | None = None
        self._cursor = 0

    def plan(self, rehearsals: Mapping[str, Rehearsal], like: Tensor) -> None:
        super().plan(rehearsals, like)
        needed = max(plan.footprint_bytes for plan in self._plans.values())
        if self._arena is None or self._arena.numel() < needed:
            self._arena = None  # free first: the old and the new together might not fit
            self._arena = like.new_empty(needed, dtype=torch.uint8)
            self.generation += 1

    def enter(self, name: str) -> None:
        self._current, self._cursor = self._plans[name], 0

    def empty(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self._trace is not None:
            return self._trace.empty(name, shape, like, dtype)
        assert self._current is not None and self._arena is not None
        dtype = dtype or like.dtype
        numel = torch.Size(shape).numel()
        num_bytes = numel * dtype.itemsize
        life, offset = self._current.lifetimes[self._cursor], self._current.offsets[self._cursor]
        if life.name != name or aligned(num_bytes) > life.num_bytes:
            raise RuntimeError(
                f"request {self._cursor} of this pass is {name} with {num_bytes} bytes, but it was rehearsed as "
                f"{life.name} with {life.num_bytes}: an op's requests must not depend on values, only on shapes"
            )
        self._cursor += 1
        return self._arena[offset : offset + num_bytes].view(dtype).view(shape)

    @property
    def num_bytes(self) -> int:
        """The arena's size."""
        arena = self._arena  # once: another thread may watch while it is replaced
        return 0 if arena is None else arena.numel()

    @property
    def held_bytes(self) -> int:
        return self.num_bytes


@dataclass(frozen=True)
class PlannedMemory:
    """A memory part: arenas whose offsets are chosen by the planner of that name."""

    planner: str = "greedy_by_size"

    def __call__(self) -> Arena:
        return Arena(PLANNERS[self.planner])
