"""A thread that reads a source several times a second into a ring buffer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from eet_lab.monitor.sources import Sample, Source

MOST_SAMPLES = 36_000
"""An hour at the usual rate: older ones go."""


class Sampler:
    """Reads `source` and `probes` at `hz` until it is closed. It only ever writes to its own buffer.

    `probes` are extra metrics of the caller's, such as torch's allocator; one that raises is turned off and
    its reason kept in `missing`. The newest `MOST_SAMPLES` stay. The thread is a daemon named
    "eet-sampler". The sampler owns the source and closes it. `cost_s` is the time spent reading so far.
    """

    def __init__(self, source: Source, hz: float = 10, probes: Mapping[str, Callable[[], float]] | None = None) -> None:
        if not 0 < hz <= 1000:
            raise ValueError(f"hz is {hz}; it must be above 0 and at most 1000. The usual rate is 10.")
        self.source = source
        self.cost_s = 0.0
        self._period_s = 1 / hz
        self._probes = dict(probes or {})
        self._failed: dict[str, str] = {}
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._num_taken = 0
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._resumed = threading.Event()
        self._resumed.set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eet-sampler", daemon=True)
        self._thread.start()

    @property
    def missing(self) -> dict[str, str]:
        """Why a metric is not there, by name."""
        return {**self.source.missing, **self._failed}

    def since(self, index: int = 0) -> tuple[list[Sample], int]:
        """Samples from number `index` on, and the index to ask with next time. Lost ones are skipped."""
        with self._lock:
            first = self._num_taken - len(self._samples)
            return list(self._samples)[max(index - first, 0) :], self._num_taken

    def sample_now(self) -> Sample:
        """Take one sample at once, on the caller's thread, also while paused or after closing."""
        with self._reading:
            start = time.perf_counter()
            sample = Sample(start, {**self.source.read(), **self._read_probes()})
            with self._lock:
                self._samples.append(sample)
                self._num_taken += 1
            self.cost_s += time.perf_counter() - start
            return sample

    def pause(self) -> None:
        """Stop reading, to leave the device alone. Samples stay."""
        self._resumed.clear()

    def resume(self) -> None:
        """Go on reading."""
        self._resumed.set()

    def close(self) -> None:
        """End the thread and wait for it; may be called twice."""
        self._closing.set()
        self._resumed.set()
        self._thread.join()
        self.source.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        due = time.perf_counter()
        while not self._closing.is_set():
            self._resumed.wait()
            if self._closing.is_set():
                return
            self.sample_now()
            # Ticks that were missed, while paused or in a slow call, are skipped and not made up for.
            due = max(due + self._period_s, time.perf_counter())
            self._closing.wait(due - time.perf_counter())

    def _read_probes(self) -> dict[str, float]:
        values = {}
        for name, probe in tuple(self._probes.items()):
            try:
                values[name] = float(probe())
            except Exception as error:  # noqa: BLE001  a caller's probe may raise anything; sampling goes on
                del self._probes[name]
                self._failed[name] = f"{type(error).__name__}: {error}"
        return values
