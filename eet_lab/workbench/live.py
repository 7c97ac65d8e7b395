"""What is seen while it runs: latency of each step, memory, utilization and power, and the text of every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ipywidgets as W

from eet_lab.figures import theme
from eet_lab.figures.live import Point, StripChart, TokenStream
from eet_lab.figures.memory_bar import bar_state, held_now
from eet_lab.figures.script import BaseScript
from eet_lab.monitor import Sample

MiB = 2**20
WINDOW_S = 60.0

Line = tuple[str, str, str, float]
"""(metric, name, unit, factor from the metric's unit)"""

NAMES = ("baseline", "selection")
"""The two runs that are drawn, in the order of their series, as files name them."""

PLAN: Line = ("engine_bytes", "plan: weights + KV + arena", "MiB", 1 / MiB)

GPU_MEMORY: list[Line] = [
    PLAN,
    ("torch_allocated_bytes", "allocated (torch)", "MiB", 1 / MiB),
    ("torch_reserved_bytes", "reserved (torch)", "MiB", 1 / MiB),
    ("memory_used_bytes", "used (NVML)", "MiB", 1 / MiB),
]
CPU_MEMORY: list[Line] = [PLAN, ("process_rss_bytes", "process RSS", "MiB", 1 / MiB)]
GPU_LOAD: list[Line] = [("utilization_percent", "utilization", "%", 1), ("power_w", "power", "W", 1)]
CPU_LOAD: list[Line] = [("process_cpu_percent", "this process's CPU", "%", 1)]
UNWATCHED = "A Ladder is timed, not watched."
LATER = " What it generates, and what each technique saves, is here once it is done."
LATENCY = "Latency per step"


class Charts:
    """Three strip charts, of what goes on or of what went on elsewhere. Only the ui thread calls it.

    `base` is the script that all charts of a page share.
    """

    def __init__(self, base: BaseScript) -> None:
        self.latency = StripChart(base, title=LATENCY, unit="ms", scale="log")
        self.name(NAMES)
        self.memory = StripChart(base, unit="MiB", scale="log", window=WINDOW_S)
        self.load = StripChart(base, unit="%", window=WINDOW_S)
        self._lines: dict[int, list[Line]] = {}
        self.charts = (self.latency, self.memory, self.load)
        self.box = W.Box(list(self.charts)).add_class("eet-live")

    def watch(self, gpu: bool, where: str, counters: bool = True) -> None:
        """Say what the charts show: of a GPU, or of this process; `where` it is, if it is not here.

        `counters`: the GPU's own (NVML) can be read.
        """
        self.latency.title = _titled(LATENCY, where)
        if gpu:
            self._set(self.memory, _titled("GPU memory", where), GPU_MEMORY)
        else:
            self._set(self.memory, _titled("CPU memory (no GPU)", where), CPU_MEMORY)
        if gpu and counters:
            self._set(self.load, _titled("GPU load", where), GPU_LOAD)
        else:
            self._set(self.load, _titled("CPU load (no GPU counters)", where), CPU_LOAD)

    def name(self, runs: Sequence[str]) -> None:
        """What the two runs are called whose steps are drawn."""
        colors = theme.BASELINE, theme.SELECTION
        self.latency.series = [{"name": name, "color": color} for name, color in zip(runs, colors, strict=True)]

    def explain(self, missing: dict[str, str]) -> None:
        """Say why a line has stopped, or was never there."""
        for chart in (self.memory, self.load):
            lines = self._lines.get(id(chart), [])
            gone = {missing[metric]: name for metric, name, _, _ in lines if metric in missing}
            chart.note = "; ".join(f"{name}: {reason}" for reason, name in gone.items())

    def push_steps(self, steps: Sequence[tuple[int, float, float]]) -> None:
        """(series, seconds since the run began, ms) of every new step."""
        self.latency.push(steps)

    def push_samples(self, samples: Sequence[Sample], start: float) -> None:
        """What was sampled; `start` is the moment that the charts call 0."""
        whole = [replace(sample, values=_with_plan(sample.values)) for sample in samples]
        for chart in (self.memory, self.load):
            chart.push(self._points(chart, whole, start))

    def snapshot(self) -> None:
        """Send all charts to a page that is reloaded, or opened a second time."""
        for chart in self.charts:
            chart.snapshot_now()

    def _points(self, chart: StripChart, samples: Sequence[Sample], start: float) -> list[Point]:
        lines = list(enumerate(self._lines.get(id(chart), [])))
        return [
            (index, sample.t - start, sample.values[metric] * factor)
            for sample in samples
            for index, (metric, _, _, factor) in lines
            if metric in sample.values
        ]

    def _set(self, chart: StripChart, title: str, lines: list[Line]) -> None:
        self._lines[id(chart)] = lines
        chart.clear()
        chart.title, chart.note = title, ""
        chart.series = [
            {"name": name, "color": theme.SERIES[i], "unit": unit, **({"dash": [5, 3]} if metric == PLAN[0] else {})}
            for i, (metric, name, unit, _) in enumerate(lines)
        ]


class Live(Charts):
    """The charts of what goes on here, what is held by now, and the streamed text, which stands elsewhere."""

    def __init__(self, base: BaseScript) -> None:
        super().__init__(base)
        self.stream = TokenStream()
        self._values: dict[str, float] = {}
        self._in_run: dict[str, float] = {}
        self._before: tuple[list[Point], list[dict[str, Any]], str] = [], self.latency.series, ""

    def watch(self, gpu: bool, where: str, counters: bool = True) -> None:
        self._values, self._in_run = {}, {}
        super().watch(gpu, where, counters)

    def begin(self, prompts: Sequence[str], decode: Any, watched: bool = True) -> None:
        """A new run, or the first of several: everything of the last one goes."""
        self._before = self.latency.points, self.latency.series, self.latency.note
        self.latency.clear()
        self.latency.note = "" if watched else UNWATCHED
        self._in_run = {}
        self.stream.begin(prompts if watched else (), decode, "" if watched else UNWATCHED + LATER)

    def put_back(self) -> None:
        """Show the steps that stood here before this run, whose result stays."""
        points, self.latency.series, self.latency.note = self._before
        self.latency.clear()
        self.latency.push(points)

    def push_samples(self, samples: Sequence[Sample], start: float) -> None:
        super().push_samples(samples, start)
        for sample in samples:
            self._values |= sample.values
            if sample.values.get("planned_bytes"):
                self._in_run = dict(self._values)

    def snapshot(self) -> None:
        super().snapshot()
        self.stream.snapshot_now()

    def held(self) -> list[dict[str, Any]]:
        """What the device holds by parts: now, and in the last run if that has given it back since."""
        if not self._values:
            return []
        held = [{"title": "Held now", **bar_state(held_now(self._values))}]
        if self._in_run and not self._values.get("planned_bytes"):
            held.insert(0, {"title": "Held in the last run", **bar_state(held_now(self._in_run))})
        return held


def _with_plan(values: dict[str, float]) -> dict[str, float]:
    """With `engine_bytes`, all that an engine holds: the weights, and what is planned beside them."""
    planned = [values[name] for name in ("weights_bytes", "planned_bytes") if name in values]
    return {**values, PLAN[0]: sum(planned)} if planned else values


def _titled(title: str, where: str) -> str:
    return f"{title} · {where}" if where else title
