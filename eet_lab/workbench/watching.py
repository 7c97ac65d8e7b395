"""What the live view shows: samples of the device, and the steps of the run that is on, unless that is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from eet_lab.devices import kind_of
from eet_lab.engine.generation import StepEvent
from eet_lab.models.transcript import Decode
from eet_lab.monitor import Sampler, open_source, record
from eet_lab.workbench.engine_thread import Kept, Phase
from eet_lab.workbench.live import NAMES, Live
from eet_lab.workbench.run_memory import RunMemory

HZ = 10
IDLE_LOOKS = 5
"""While nothing runs, one look in so many shows anything."""


class Device:
    """Owns the sampler thread; only the ui thread calls it. `probes` must be safe on any thread."""

    def __init__(self, live: Live, probes: Mapping[str, Callable[[], float]]) -> None:
        self._live, self._probes = live, probes
        self._sampler: Sampler | None = None
        self._on_gpu = False
        self._seen, self._looks, self._start = 0, 0, 0.0

    def watch(self, device: str) -> None:
        """Sample "cpu", "cuda" or "cuda:1" from now on, in empty charts."""
        self.close()
        self._on_gpu = kind_of(device) == "cuda"
        probes = dict(self._probes)
        if self._on_gpu:
            probes["torch_allocated_bytes"] = lambda: float(torch.cuda.memory_allocated(device))
            probes["torch_reserved_bytes"] = lambda: float(torch.cuda.memory_reserved(device))
        self._sampler = Sampler(open_source(device), HZ, probes)
        self.show()

    def show(self) -> None:
        """Show this device, from now on."""
        if self._sampler is not None:
            source = self._sampler.source
            counters = source.name == "nvml"
            self._live.watch(self._on_gpu, source.label if counters else "", counters)
            self._seen, self._start = self.mark(), time.perf_counter()

    def look(self, all_of_it: bool) -> None:
        """Show what was sampled since the last look: everything, or now and then the newest."""
        self._looks += 1
        if self._sampler is None or not (all_of_it or self._looks % IDLE_LOOKS == 0):
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


class Watching:
    """Feeds the live view, and keeps it still while something is measured. Only the ui thread calls it."""

    def __init__(self, live: Live, device: Device) -> None:
        self._live, self._device = live, device
        self.monitor: dict[str, Any] = {}
        self.memory: dict[str, RunMemory] = {}
        self.resting = False
        self._prompts: Sequence[str] = ()
        self._decode: Decode = str
        self._series = 1
        self._names: Sequence[str] = NAMES
        self._since: int | None = None
        self._steps: list[tuple[int, float, float]] = []
        self._tokens: list[tuple[int, int]] = []

    def begin(self, prompts: Sequence[str], decode: Decode, watched: bool = True) -> None:
        """A job with one or more runs begins; `watched`: some of them can be."""
        self._prompts, self._decode = list(prompts), decode
        self.monitor, self.memory = {}, {}
        self._live.begin(prompts, decode, watched)

    def name(self, names: Sequence[str]) -> None:
        """What the runs of both series are called."""
        self._names = names
        self._live.name(names)

    def enter(self, phase: Phase) -> None:
        """The next run begins."""
        self.flush()
        self._keep_samples()
        self._rest(not phase.watched)
        self._series = phase.series
        if phase.watched:
            self._since = self._device.mark()
            self._live.stream.begin(self._prompts, self._decode)

    def leave(self, in_vain: bool) -> None:
        """The job is over; `in_vain`: the result before it stays, and so do that one's steps."""
        self.flush()
        if in_vain:
            self._live.put_back()
        self._live.stream.finish()
        self._keep_samples()
        self._rest(False)
        self._live.snapshot()

    def step(self, event: StepEvent) -> None:
        """One more step; shown with the next `flush`."""
        self._steps.append((self._series, event.t_ms / 1e3, event.step_ms))
        self._tokens += event.tokens

    def keep(self, event: Kept) -> None:
        """What a run did with memory."""
        self.memory[self._names[event.series]] = event.memory

    def flush(self) -> None:
        """Show what has come since the last time."""
        steps, tokens, self._steps, self._tokens = self._steps, self._tokens, [], []
        self._live.push_steps(steps)
        self._live.stream.push(tokens)

    def _rest(self, resting: bool) -> None:
        """While resting, nothing is sampled and no chart moves: measured runs are left alone."""
        if resting != self.resting:
            self._device.rest(resting)
        self.resting = resting

    def _keep_samples(self) -> None:
        """The samples of the run that ends now, to be saved with the result."""
        if self._since is not None:
            self.monitor[NAMES[self._series]] = self._device.recording(self._since)
        self._since = None
