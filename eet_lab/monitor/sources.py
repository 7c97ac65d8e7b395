"""What is measured while a model runs: a `Source` answers "what are the values now?".

Every metric is optional. One that cannot be read leaves the set and its reason stays in `missing`; the rest
goes on. Sources: `NvmlSource` (an NVIDIA GPU), `PsutilSource` (this process).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eet_lab.errors import MonitorError


@dataclass(frozen=True)
class Sample:
    """Values read at one moment; `t` is `time.perf_counter()`, the clock of the engine's own time stamps.

    A slow metric is not read every time, so look values up with `.get`.
    """

    t: float
    values: dict[str, float]


@dataclass
class Meter:
    """One call that yields one or more metrics, made at most every `period_s` seconds."""

    units: Mapping[str, str]
    call: Callable[[], tuple[float, ...]]
    period_s: float = 0.0
    due: float = field(default=float("-inf"), init=False)

    def read(self) -> dict[str, float]:
        """The metrics' values by name, in the order of `units`."""
        return dict(zip(self.units, map(float, self.call()), strict=True))


class Source:
    """Where samples come from: meters, of which one that raises one of `errors` is turned off and its reason kept.

    `metrics` has the unit, by name, of what can be read, and `missing` the reason, by name, of what cannot.
    """

    def __init__(
        self,
        name: str,
        label: str,
        meters: Iterable[Meter],
        errors: tuple[type[Exception], ...],
        missing: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.label = name, label
        self._meters, self._errors = list(meters), errors
        self.metrics = {metric: unit for meter in self._meters for metric, unit in meter.units.items()}
        self.missing = dict(missing or {})
        for meter in tuple(self._meters):
            self._try(meter)

    def read(self) -> dict[str, float]:
        """The metrics that are due now, by name. Never raises for a metric that went away."""
        now = time.perf_counter()
        values: dict[str, float] = {}
        for meter in tuple(self._meters):
            if now >= meter.due:
                meter.due = now + meter.period_s
                values |= self._try(meter)
        return values

    def condition(self) -> list[str]:
        """Why a timing taken now would be doubtful: a shared or throttled device. Empty when all is well."""
        return []

    def close(self) -> None:
        """Forget the meters; a later read yields nothing."""
        self._meters.clear()

    def _try(self, meter: Meter) -> dict[str, float]:
        try:
            return meter.read()
        except self._errors as error:
            self._meters.remove(meter)
            # New dictionaries, since another thread may be walking through the old ones.
            self.metrics = {name: unit for name, unit in self.metrics.items() if name not in meter.units}
            self.missing = {**self.missing, **dict.fromkeys(meter.units, self._reason(error))}
            return {}

    def _reason(self, error: Exception) -> str:
        return str(error) or type(error).__name__


class PsutilSource(Source):
    """This process as the operating system sees it, for machines without a GPU: resident memory, CPU time."""

    def __init__(self, why: str = "no NVIDIA GPU found", missing: Mapping[str, str] | None = None) -> None:
        import psutil

        process = psutil.Process()
        memory = Meter({"process_rss_bytes": "B"}, lambda: (process.memory_info().rss,))
        cpu = Meter({"process_cpu_percent": "%"}, lambda: (process.cpu_percent(),), period_s=0.2)
        super().__init__("psutil", f"CPU process (psutil; {why})", [memory, cpu], (psutil.Error,), missing)
        # The probe only starts the measurement, and time is told in ticks of 10 ms: of one just before, thousands of %.
        cpu.due = time.perf_counter() + cpu.period_s


def record(source: Source, samples: Sequence[Sample]) -> dict[str, Any]:
    """A recording that `json` can write; times start at the first sample."""
    start = samples[0].t if samples else 0.0
    return {
        "label": source.label,
        "metrics": dict(source.metrics),
        "missing": dict(source.missing),
        "samples": [{"t": round(sample.t - start, 6), "values": sample.values} for sample in samples],
    }


def open_source(device: str = "cpu") -> Source:
    """The best source for a torch device name such as "cpu", "cuda" or "cuda:1".

    Where NVML is missing the process is measured instead, and the label says so.
    """
    if not device.startswith("cuda"):
        return PsutilSource(why=f"running on {device}")
    import torch

    from eet_lab.monitor.nvml import NvmlSource

    if not torch.cuda.is_available():
        return PsutilSource()
    uuid = str(torch.cuda.get_device_properties(torch.device(device)).uuid)
    try:
        return NvmlSource(uuid)
    except MonitorError as error:
        return PsutilSource(why=str(error), missing={"memory_used_bytes": str(error)})
