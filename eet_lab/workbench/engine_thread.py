"""The engine thread: it does jobs one after the other and tells what happens through a queue. It touches no widget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from eet_lab.bench import Comparison, Ladder
from eet_lab.bench.run_memory import RunMemory
from eet_lab.engine.engine import Engine
from eet_lab.engine.generation import StepEvent
from eet_lab.threads import num_cpu_threads
from eet_lab.workbench.threads import Background, Receiver


@dataclass(frozen=True)
class Progress:
    """`done` of `total` steps of the present phase; `text` says what it is doing."""

    done: int
    total: int
    text: str


@dataclass(frozen=True)
class Named:
    """What the series of the runs to come are called, the baseline's first."""

    names: Sequence[str]


@dataclass(frozen=True)
class Phase:
    """A run begins, drawn as `series` (0 baseline, 1 selection). `watched` False: it must not be disturbed."""

    text: str
    series: int = 1
    watched: bool = True


@dataclass(frozen=True)
class Kept:
    """What the run of `series` did with memory."""

    series: int
    memory: RunMemory


Event: TypeAlias = Progress | Named | Phase | StepEvent | Kept | Comparison | Ladder
"""A step is one that the engine has finished; a comparison or a ladder is what is measured so far."""


class Feed:
    """What a job tells: it only appends to a queue."""

    def __init__(self, events: SimpleQueue[Any]) -> None:
        self._events = events
        self._engine: Engine | None = None
        self._weights_bytes = self.loaded_bytes = 0

    def tell(self, event: Event) -> None:
        self._events.put(event)

    def progress(self, done: int, total: int, text: str = "") -> None:
        self.tell(Progress(done, total, text))

    def engine(self, engine: Engine | None) -> None:
        """The engine that runs now; None after it has been closed."""
        self._engine, self._weights_bytes = engine, engine.model.weight_bytes if engine else 0

    @property
    def probes(self) -> dict[str, Callable[[], float]]:
        """What is planned of the memory that the sampler sees."""
        return {"planned_bytes": self.planned_bytes, "weights_bytes": self.weights_bytes}

    def weights_bytes(self) -> float:
        """Bytes of the engine's weights; between runs those of the model that is loaded."""
        return float(self._weights_bytes or self.loaded_bytes)

    def planned_bytes(self) -> float:
        """Bytes of the arena and the KV cache of the engine that runs now, weights not counted.

        Cheap, and safe on any thread. A memory part without an arena has no plan: then only the KV cache counts.
        """
        engine = self._engine
        if engine is None:
            return 0.0
        arena = engine.activation_bytes if engine.memory.has_arena else 0
        return float(arena + engine.kv_bytes)


Work = Callable[[Feed, threading.Event], Any]


class EngineThread(Background):
    """One thread, one job at a time, which tells events before its answer. The ui thread calls it."""

    PATIENCE_S = 10.0
    """A download cannot be stopped: its thread is left to end by itself. All else looks at `cancel` far sooner."""

    def __init__(self) -> None:
        super().__init__("eet-engine")
        self.feed = Feed(self._answers)
        self.cancel = threading.Event()

    def submit(self, to: Receiver, name: str, work: Work, cancel: threading.Event) -> None:
        """Do `work(feed, cancel)`; the answer for `to` has the `name` as its key."""
        self.cancel = cancel
        self.ask(to, name, partial(self._do, work))

    def stop(self) -> None:
        """Ask the present job to end."""
        self.cancel.set()

    def close(self) -> None:
        self.stop()
        super().close()

    def _do(self, work: Work) -> Any:
        # torch's setting is per thread: one made elsewhere does not hold here. A core is left to the page and the ui.
        torch.set_num_threads(num_cpu_threads())
        # Of pandas, plotly uses whatever another thread has imported so far, and fails on half of it. A job may import
        # it, with PyTorch's compiler.
        import pandas  # noqa: F401

        try:
            return work(self.feed, self.cancel)
        finally:
            self.feed.engine(None)
