"""The phases of a training step, as its parts pass through them: forward, backward, and the update of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from eet_lab.bench.launches import around_each
from eet_lab.parts import Parts

PHASES = ("forward", "backward", "update")


class Phases:
    """Tells `begin` when a phase begins, by its name; a batch of several passes goes forward and backward in each.

    A pass goes forward with its first op, and backward once its loss is differentiated. What a loss differentiates
    itself, as one in chunks does, is forward. `around` surrounds each op. Calls may come from a thread of PyTorch's.
    """

    def __init__(
        self, begin: Callable[[str], None], around: Callable[[str], AbstractContextManager] | None = None
    ) -> None:
        self._begin, self._around = begin, around
        self._now = ""

    def within(self, parts: Parts) -> Parts:
        """The parts with ops and a loss that come by here."""

        @wraps(parts.loss)
        def loss(*args: Any, **keywords: Any) -> Tensor:
            total = parts.loss(*args, **keywords)
            if total.requires_grad:
                total.register_hook(self._goes_back)
            return total

        # Python is not there when a captured pass is replayed: passes are launched one by one.
        eager = {name: getattr(Parts(), name) for name in ("step_launch",) if hasattr(parts, name)}
        return replace(parts, train_ops=around_each(parts.train_ops, self._op), loss=loss, **eager)

    def start(self) -> None:
        """A step begins."""
        self._now = ""
        self._enter("forward")

    @contextmanager
    def _op(self, name: str) -> Iterator[None]:
        self._enter("forward")
        if self._around is None:
            yield
            return
        with self._around(name):
            yield

    def _goes_back(self, grad: Tensor) -> None:
        self._enter("backward")
        Variable._execution_engine.queue_callback(lambda: self._enter("update"))

    def _enter(self, phase: str) -> None:
        if phase != self._now:
            self._now = phase
            self._begin(phase)
