"""The engine thread: it does jobs one after the other and tells what happens through a queue. It touches no widget."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from eet_lab.bench import Comparison, Ladder
from eet_lab.bench.run_memory import RunMemory
from eet_lab.engine.engine import Engine
from eet_lab.engine.generation import StepEvent
from eet_lab.errors import Cancelled
from eet_lab.threads import num_cpu_threads
from eet_lab.workbench.threads import drained

THREAD_NAME = "eet-engine"
PATIENCE_S = 10.0
"""A download cannot be stopped: its thread is left to end by itself. All else looks at `cancel` far sooner."""


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


@dataclass(frozen=True)
class Finished:
    """The job is over. `error` is what ended it, if anything; `seconds` how long it took."""

    name: str
    value: Any
    error: BaseException | None
    seconds: float


Event: TypeAlias = Progress | Named | Phase | StepEvent | Kept | Comparison | Ladder | Finished
"""A step is one that the engine has finished; a comparison or a ladder is what is measured so far."""


class Feed:
    """What a job tells: it only appends to a queue."""

    def __init__(self, events: SimpleQueue[Event]) -> None:
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


class EngineThread:
    """One thread, one job at a time. `events` is where the ui thread reads."""

    def __init__(self) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.feed = Feed(self.events)
        self.cancel = threading.Event()
        self._jobs: SimpleQueue[tuple[str, Work] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def submit(self, name: str, work: Work) -> None:
        """Do `work(feed, cancel)` when what came before is done; its end is told as Finished."""
        self.cancel.clear()
        self._jobs.put((name, work))

    def stop(self) -> None:
        """Ask the present job to end."""
        self.cancel.set()

    def take(self) -> list[Event]:
        """All events since the last call."""
        return drained(self.events)

    def close(self) -> None:
        """End the present job and the thread, and wait for it a while."""
        self._jobs.put(None)
        self.cancel.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        # torch's setting is per thread: one made elsewhere does not hold here. A core is left to the page and the ui.
        torch.set_num_threads(num_cpu_threads())
        # Of pandas, plotly uses whatever another thread has imported so far, and fails on half of it. A job may import
        # it, with PyTorch's compiler.
        import pandas  # noqa: F401

        while (job := self._jobs.get()) is not None:
            name, work = job
            start = time.perf_counter()
            value, error = None, None
            try:
                value = work(self.feed, self.cancel)
            except Cancelled:
                pass  # what the user asked for; the job ends without a result
            except BaseException as caught:  # noqa: BLE001  told to the user by the ui thread; this one must live on
                error = caught
            self.feed.engine(None)
            self.events.put(Finished(name, value, error, time.perf_counter() - start))
            del value, error, work, job  # nothing of a run stays alive because of this frame
