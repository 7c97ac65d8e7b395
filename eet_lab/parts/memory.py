"""Where activations live. A memory part answers `empty`, after `plan` has shown it the passes of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from eet_lab.memory import PLANNERS, DriverCalls, Lifetime, Plan, live_bytes
from eet_lab.parts.trace import TracedPass

REMEMBERED = 128
"""Shapes whose lifetimes are kept, so that passes seen lately need no second trace."""


class FreshMemory:
    """The baseline: a new tensor for whoever asks; the reference count frees it.

    Passes are traced all the same, so that their memory can be told and drawn.
    """

    has_arena = False
    """Whether activations lie at planned addresses, in memory that is held."""

    generation = 0
    """Grows when an address is void that a captured graph may hold."""

    def __init__(self) -> None:
        self._passes: Mapping[str, TracedPass] = {}
        self._known: dict[tuple, tuple[Lifetime, ...]] = {}
        self._num_traced = 0
        self._live_bytes = 0

    def empty(
        self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None, *, op: str = ""
    ) -> Tensor:
        """Memory for one activation; not initialized. `op` is the op that asks."""
        return like.new_empty(shape, dtype=dtype)

    def plan(self, passes: Mapping[str, TracedPass], like: Tensor) -> bool:
        """Prepare for the passes of a request, each at its largest. `like` tells the device.

        Returns whether a pass had to be traced, or memory placed: False if all was known from earlier requests.
        """
        before, self._passes = self._num_traced, dict(passes)
        outlines = map(self.outlined, passes.values())
        self._live_bytes = max(max(live_bytes(outline), default=0) for outline in outlines)
        return self._num_traced > before

    def reserve(self, passes: Mapping[str, TracedPass], like: Tensor) -> bool:
        """Hold what these passes need, so that no smaller request allocates; nothing, where tensors are fresh.

        Returns what `plan` does.
        """
        return self.plan(passes, like)

    def enter(self, name: str) -> None:
        """The next calls of `empty` belong to this pass."""

    def traced(self, traced_pass: TracedPass) -> tuple[Lifetime, ...]:
        """What a pass asks for; traced where it is not remembered."""
        return self._remember(traced_pass.key, traced_pass.lifetimes)

    def outlined(self, traced_pass: TracedPass) -> tuple[Lifetime, ...]:
        """What its outline asks for; traced where it is not remembered."""
        return self._remember(("outline", *traced_pass.key), traced_pass.outlined)

    def plans(self) -> dict[str, Plan]:
        """What each pass of the last request asked for, and where an arena would put it."""
        planner = PLANNERS["greedy_by_size"]
        return {name: planner(self.traced(traced_pass)) for name, traced_pass in self._passes.items()}

    @property
    def calls(self) -> DriverCalls:
        """What the driver was asked for on behalf of a plan."""
        return DriverCalls()

    @property
    def num_bytes(self) -> int:
        """The most bytes of activations that are alive at once."""
        return self._live_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that stay allocated between passes."""
        return 0

    def _remember(self, key: tuple, trace: Callable[[], tuple[Lifetime, ...]]) -> tuple[Lifetime, ...]:
        known = self._known.pop(key, None)
        self._num_traced += known is None
        self._known[key] = trace() if known is None else known  # the newest last
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        return self._known[key]
