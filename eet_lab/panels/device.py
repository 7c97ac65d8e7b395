"""The device as the charts show it: a sampler on the device of the moment, and how far its samples have been shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from eet_lab.monitor import Sampler, open_source, record
from eet_lab.panels.live import Live

HZ = 10
IDLE_LOOKS = 5
"""While nothing runs, one look in so many shows anything."""


class Device:
    """Owns the sampler thread; only the ui thread calls it. `probes` must be safe on any thread."""

    def __init__(self, live: Live, probes: Mapping[str, Callable[[], float]]) -> None:
        self._live, self._probes = live, probes
        self._sampler: Sampler | None = None
        self._kind = "cpu"
        self._seen, self._looks, self._start = 0, 0, 0.0
        self._showing = True

    def watch(self, kind: str) -> None:
        """Sample "cpu" or "cuda" from now on, in empty charts."""
        self.close()
        self._kind = kind
        probes = dict(self._probes)
        if kind == "cuda":
            probes["torch_allocated_bytes"] = lambda: float(torch.cuda.memory_allocated())
            probes["torch_reserved_bytes"] = lambda: float(torch.cuda.memory_reserved())
        self._sampler = Sampler(open_source(kind), HZ, probes)
        self.show()

    def show(self) -> None:
        """(Again) show this device, from now on."""
        if self._sampler is not None:
            source = self._sampler.source
            counters = source.name == "nvml"
            self._live.watch(self._kind == "cuda", source.label if counters else "", counters)
            self._seen, self._start, self._showing = self.mark(), time.perf_counter(), True

    def pause_showing(self) -> None:
        """The charts show something recorded; sampling may go on."""
        self._showing = False

    @property
    def showing(self) -> bool:
        return self._showing

    def look(self, all_of_it: bool) -> None:
        """Show what was sampled since the last look: everything, or now and then the newest."""
        self._looks += 1
        if self._sampler is None or not self._showing or not (all_of_it or self._looks % IDLE_LOOKS == 0):
            return
        samples, self._seen = self._sampler.since(self._seen)
        self._live.push_samples(samples if all_of_it else samples[-1:], self._start)
        self._live.explain(self._sampler.missing)

    def rest(self, resting: bool) -> None:
        """Leave the device alone, or go on."""
        if self._sampler is not None:
            (self._sampler.pause if resting else self._sampler.resume)()

    def mark(self) -> int:
        """Now, as `recording` wants it."""
        return self._sampler.since()[1] if self._sampler is not None else 0

    def recording(self, since: int) -> dict[str, Any]:
        """What was sampled since a mark, as it can be saved and replayed."""
        if self._sampler is None:
            return {}
        return record(self._sampler.source, self._sampler.since(since)[0])

    def close(self) -> None:
        """End the sampler's thread."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
