"""What a run really asked for, beside what was foreseen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.memory import Lifetime
from eet_lab.parts.launch import eager
from eet_lab.parts.memory import FreshMemory
from eet_lab.parts.trace import Trace


def recorded_lifetimes(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: Settings | None = None
) -> dict[str, tuple[Lifetime, ...]]:
    """What `engine.lifetimes` foresees, from a real run: of the prefill and, from the second token on, the last step.

    The engine's model and parts run once more, with fresh tensors that are watched; the engine itself holds what it
    held. Errors: those of `generate`.
    """
    memory = RecordedMemory()
    parts = replace(engine.parts, weights=(), memory=lambda: memory, launch=eager)  # a replay asks for nothing
    with closing(Engine(engine.model, parts)) as watched:
        watched.generate(prompts, replace(settings or Settings(), stop=()))
        return memory.recorded()


class RecordedMemory(FreshMemory):
    """Fresh memory that notes who was born and died when in passes that really run."""

    def __init__(self) -> None:
        super().__init__()
        self._trace, self._pass = Trace(), ""
        self._recorded: dict[str, tuple[Lifetime, ...]] = {}

    def enter(self, name: str) -> None:
        self.recorded()
        self._trace, self._pass = Trace(), name

    def empty(
        self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None, *, op: str = ""
    ) -> Tensor:
        return self._trace.empty(name, shape, like, dtype, op=op)

    def recorded(self) -> dict[str, tuple[Lifetime, ...]]:
        """The lifetimes of the last run of each pass."""
        if self._pass:
            self._recorded[self._pass] = self._trace.finish()
            self._pass = ""
        return dict(self._recorded)
