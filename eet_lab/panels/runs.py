"""From the engine's events to the live view: which run is on, whether it may be disturbed, what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eet_lab.engine.generation import StepEvent
from eet_lab.models.transcript import Decode
from eet_lab.monitor import Sample
from eet_lab.panels.device import Device
from eet_lab.panels.jobs import NAMES
from eet_lab.panels.live import Live
from eet_lab.panels.recordings import Result
from eet_lab.panels.run_memory import RunMemory
from eet_lab.panels.worker import Kept, Phase, Sampled

NO_SAMPLES = "this recording holds no samples of memory and power: see the results"


class Runs:
    """Feeds the live view, and keeps it still while something is measured. Only the ui thread calls it."""

    def __init__(self, live: Live, device: Device) -> None:
        self._live, self._device = live, device
        self.monitor: dict[str, Any] = {}
        self.memory: dict[str, RunMemory] = {}
        self.resting = False
        self._prompts: Sequence[str] = ()
        self._decode: Decode = str
        self._series = 1
        self._since: int | None = None
        self._steps: list[tuple[int, float, float]] = []
        self._tokens: list[tuple[int, int]] = []

    def begin(self, prompts: Sequence[str], decode: Decode) -> None:
        """A job with one or more runs begins."""
        if not self._device.showing:
            self._device.show()
        self._prompts, self._decode = list(prompts), decode
        self.monitor, self.memory = {}, {}
        self._live.begin(prompts, decode)
        self._live.remark("")

    def begin_recorded(self, result: Result, has_samples: bool, prompts: Sequence[str], decode: Decode) -> None:
        """The replay of a result begins: the charts show the device that it was taken on."""
        self.begin(prompts, decode)
        self._device.pause_showing()
        where = result.environment
        self._live.watch(where.device_kind == "cuda", f"recorded on {where.device}")
        self._live.no_samples("" if has_samples else NO_SAMPLES)

    def enter(self, phase: Phase) -> None:
        """The next run begins."""
        self.flush()
        self._keep_samples()
        self._rest(not phase.watched)
        self._series = phase.series
        if phase.watched:
            self._since = self._device.mark()
            self._live.stream.begin(self._prompts, self._decode)

    def leave(self) -> None:
        """The job is over."""
        self.flush()
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
        self.memory[NAMES[event.series]] = event.memory

    def flush(self) -> None:
        """Show what has come since the last time."""
        steps, tokens, self._steps, self._tokens = self._steps, self._tokens, [], []
        self._live.push_steps(steps)
        self._live.stream.push(tokens)

    def replayed(self, event: Sampled) -> None:
        """A sample of a recorded run."""
        self._live.push_samples([Sample(event.t, event.values, "replay")], 0.0)

    def _rest(self, resting: bool) -> None:
        """While resting, nothing is sampled and no chart moves: measured runs are left alone."""
        if resting != self.resting:
            self._device.rest(resting)
        self.resting = resting

    def _keep_samples(self) -> None:
        """The samples of the run that ends now, to be saved with the result."""
        if self._since is not None and self._device.showing:
            self.monitor[NAMES[self._series]] = self._device.recording(self._since)
        self._since = None
