"""What stands above the answer: the live charts, those of a recording that is open, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from eet_lab.bench import Comparison, Measurement, Run
from eet_lab.figures.results import pair_names
from eet_lab.monitor import Sample
from eet_lab.workbench.live import NAMES, Charts
from eet_lab.workbench.opened import Opened
from eet_lab.workbench.rows import Result

GAP_S = 0.2
"""The time between the samples of two runs."""


class TopRow:
    """Charts of this machine say nothing of what another one recorded: then its own samples stand there, or nothing.

    Only the ui thread calls it.
    """

    def __init__(self, live: Charts, recorded: Charts) -> None:
        self._live, self._recorded = live, recorded
        self._of: Opened | None = None
        self._put_up("live")

    def show(self, recording: Opened | None) -> None:
        """Show what was sampled of this recording; None: none is open."""
        if recording is self._of:
            return
        self._of = recording
        self._put_up("live" if recording is None else "recorded" if self._fill(recording) else "")

    def _put_up(self, name: str) -> None:
        for each, live in (("live", self._live), ("recorded", self._recorded)):
            live.box.layout.display = None if each == name else "none"

    def _fill(self, recording: Opened) -> bool:
        """Draw all that was sampled; whether there was anything."""
        if recording.result is None or not any(each["samples"] for each in recording.monitor.values()):
            return False
        where, charts, begun = recording.result.environment, self._recorded, 0.0
        charts.watch(where.device_kind == "cuda", "recorded")
        charts.latency.clear()
        named = dict(zip(NAMES, _called(recording.result), strict=True))
        charts.name([*named.values()])
        untold = list[str]()
        for name, m in _watched(recording.result).items():
            series = NAMES.index(name)
            ends = accumulate(ms / 1e3 for ms in m.step_ms)
            charts.push_steps([(series, t, ms) for t, ms in zip(ends, m.step_ms, strict=True)])
            samples = _samples(recording.monitor.get(name, {}), m, begun)
            charts.push_samples(samples, 0.0)
            begun = samples[-1].t + GAP_S if samples else begun
            untold += [] if samples else [named[name]]
        for chart in (charts.memory, charts.load):
            chart.note = f"{' and '.join(untold)}: over before anything was sampled" if untold else ""
        charts.snapshot()
        return True


def _called(result: Result) -> Sequence[str]:
    """What the runs are called; of a single one the baseline's line stays empty."""
    if isinstance(result, Comparison):
        recipes = [result.baseline.recipe, result.selection.recipe]
    else:
        recipes = ["", result.recipe]
    return pair_names(recipes, result.environment.device_kind)


def _watched(result: Result) -> dict[str, Measurement]:
    """What was measured of the runs that were watched, under the names that their samples have."""
    if isinstance(result, Run):
        return {NAMES[-1]: result.measurement}
    pair = (result.baseline, result.selection) if isinstance(result, Comparison) else ()
    return dict(zip(NAMES, pair, strict=False))


def _samples(recorded: Mapping[str, Any], m: Measurement, begun: float) -> list[Sample]:
    weights = {"weights_bytes": float(m.memory["weights"])}
    return [
        Sample(begun + each["t"], weights | each["values"], recorded["label"]) for each in recorded.get("samples", ())
    ]
