"""What is seen while it runs: charts of the device and of each step, the text of every prompt, and what feeds them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import ipywidgets as W
import torch

from eet_lab.bench import Comparison, Measurement, Run
from eet_lab.bench.run_memory import RunMemory
from eet_lab.devices import kind_of
from eet_lab.engine.generation import StepEvent
from eet_lab.figures import theme
from eet_lab.figures.live import Point, StripChart, TokenStream
from eet_lab.figures.memory_bar import bar_state, held_now
from eet_lab.figures.results import pair_names
from eet_lab.figures.script import BaseScript
from eet_lab.models.transcript import Decode
from eet_lab.monitor import Sample, Sampler, open_source, record
from eet_lab.words import MiB
from eet_lab.workbench.engine_thread import Kept, Phase
from eet_lab.workbench.rows import Result

if TYPE_CHECKING:
    from eet_lab.workbench.opened import Opened

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
        self._lines: dict[StripChart, list[Line]] = {}
        self.charts = (self.latency, self.memory, self.load)
        self.box = W.Box(list(self.charts)).add_class("eet-live")

    def watch(self, gpu: bool, where: str, counters: bool = True) -> None:
        """Say what the charts show: of a GPU, or of this process; `where` it is, if it is not here.

        `counters`: the GPU's own (NVML) can be read.
        """
        self.latency.title = _titled(LATENCY, where)
        memory = ("GPU memory", GPU_MEMORY) if gpu else ("CPU memory (no GPU)", CPU_MEMORY)
        load = ("GPU load", GPU_LOAD) if gpu and counters else ("CPU load (no GPU counters)", CPU_LOAD)
        for chart, (title, lines) in ((self.memory, memory), (self.load, load)):
            self._lines[chart] = lines
            chart.clear()
            chart.title, chart.note = _titled(title, where), ""
            chart.series = [
                {"name": name, "color": color, "unit": unit, **({"dash": [5, 3]} if metric == PLAN[0] else {})}
                for (metric, name, unit, _), color in zip(lines, theme.SERIES, strict=False)
            ]

    def name(self, runs: Sequence[str]) -> None:
        """What the two runs are called whose steps are drawn."""
        colors = theme.BASELINE, theme.SELECTION
        self.latency.series = [
            {"name": name, "color": color, "value_of": "last step"} for name, color in zip(runs, colors, strict=True)
        ]

    def explain(self, missing: dict[str, str]) -> None:
        """Say why a line has stopped, or was never there."""
        for chart, lines in self._lines.items():
            gone = {missing[metric]: name for metric, name, _, _ in lines if metric in missing}
            chart.note = "; ".join(f"{name}: {reason}" for reason, name in gone.items())

    def push_samples(self, samples: Sequence[Sample], start: float) -> None:
        """What was sampled; `start` is the moment that the charts call 0."""
        whole = [replace(sample, values=_with_plan(sample.values)) for sample in samples]
        for chart, lines in self._lines.items():
            chart.push(
                [
                    (index, sample.t - start, sample.values[metric] * factor)
                    for sample in whole
                    for index, (metric, _, _, factor) in enumerate(lines)
                    if metric in sample.values
                ]
            )

    def break_lines(self) -> None:
        """Leave a gap where nothing is sampled."""
        for chart in self._lines:
            chart.break_lines()

    def snapshot(self) -> None:
        """Send all charts to a page that is reloaded, or opened a second time."""
        for chart in self.charts:
            chart.snapshot_now()


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
        self.name(NAMES)
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


GAP_S = 0.2
"""The time between the samples of two runs."""


class TopRow:
    """Live charts are of the newest run: where another one is open, its own samples stand there, or nothing.

    Only the ui thread calls it.
    """

    def __init__(self, live: Charts, kept: Charts) -> None:
        self._live, self._kept = live, kept
        self._of: Opened | None = None
        self._put_up("live")

    def show(self, opened: Opened | None) -> None:
        """Show what was sampled of this kept run; None: the live charts."""
        if opened is self._of:
            return
        self._of = opened
        self._put_up("live" if opened is None else "kept" if self._fill(opened) else "")

    def _put_up(self, name: str) -> None:
        for each, live in (("live", self._live), ("kept", self._kept)):
            live.box.layout.display = None if each == name else "none"

    def _fill(self, opened: Opened) -> bool:
        """Draw all that was sampled; whether there was anything."""
        if opened.result is None or not any(each["samples"] for each in opened.monitor.values()):
            return False
        where, charts, begun = opened.result.environment, self._kept, 0.0
        charts.watch(where.device_kind == "cuda", "recorded" if where.recorded else "kept")
        charts.latency.clear()
        named = dict(zip(NAMES, _called(opened.result), strict=True))
        charts.name([*named.values()])
        untold = list[str]()
        for name, m in _watched(opened.result).items():
            series = NAMES.index(name)
            ends = accumulate(ms / 1e3 for ms in m.step_ms)
            charts.latency.push([(series, t, ms) for t, ms in zip(ends, m.step_ms, strict=True)])
            samples = _samples(opened.monitor.get(name, {}), m, begun)
            charts.break_lines()
            charts.push_samples(samples, 0.0)
            begun = samples[-1].t + GAP_S if samples else begun
            untold += [] if samples else [named[name]]
        for chart in (charts.memory, charts.load):
            chart.note = f"{' and '.join(untold)}: over before anything was sampled" if untold else ""
        charts.snapshot()
        return True


def _called(result: Result) -> Sequence[str]:
    """What the runs are called; of a single one the other's line stays empty."""
    if isinstance(result, Comparison):
        recipes = [result.baseline.recipe, result.selection.recipe]
    elif result.recipe == NAMES[0]:
        return NAMES
    else:
        recipes = ["", result.recipe]
    return pair_names(recipes, result.environment.device_kind)


def _watched(result: Result) -> dict[str, Measurement]:
    """What was measured of the runs that were watched, under the names that their samples have."""
    if isinstance(result, Run):
        return {NAMES[result.recipe != NAMES[0]]: result.measurement}
    pair = (result.baseline, result.selection) if isinstance(result, Comparison) else ()
    return dict(zip(NAMES, pair, strict=False))


def _samples(recorded: Mapping[str, Any], m: Measurement, begun: float) -> list[Sample]:
    weights = {"weights_bytes": float(m.memory["weights"])}
    return [Sample(begun + each["t"], weights | each["values"]) for each in recorded.get("samples", ())]


HZ = 10
IDLE_LOOKS = 5
"""While nothing runs, one look in so many shows anything."""


class Device:
    """Owns the sampler thread; only the ui thread calls it. `probes` must be safe on any thread."""

    def __init__(self, live: Live, probes: Mapping[str, Callable[[], float]], device: str) -> None:
        self._live, self._probes, self._looks = live, probes, 0
        self._open(device)

    def watch(self, device: str) -> None:
        """Sample "cpu", "cuda" or "cuda:1" from now on, in empty charts."""
        self.close()
        self._open(device)

    def _open(self, device: str) -> None:
        on_gpu, probes = kind_of(device) == "cuda", dict(self._probes)
        if on_gpu:
            probes["torch_allocated_bytes"] = lambda: float(torch.cuda.memory_allocated(device))
            probes["torch_reserved_bytes"] = lambda: float(torch.cuda.memory_reserved(device))
        self._sampler = Sampler(open_source(device), HZ, probes)
        source, counters = self._sampler.source, self._sampler.source.name == "nvml"
        self._live.watch(on_gpu, source.label if counters else "", counters)
        self._seen, self._start = self.mark(), time.perf_counter()

    def look(self, all_of_it: bool) -> None:
        """Show what was sampled since the last look: everything, or now and then the newest."""
        self._looks += 1
        if not all_of_it and self._looks % IDLE_LOOKS:
            return
        samples, self._seen = self._sampler.since(self._seen)
        self._live.push_samples(samples if all_of_it else samples[-1:], self._start)
        self._live.explain(self._sampler.missing)

    def rest(self, resting: bool) -> None:
        """Leave the device alone, or go on."""
        if resting:
            self._sampler.pause()
            return
        self.look(all_of_it=True)  # what was sampled before
        self._live.break_lines()
        self._sampler.resume()

    def mark(self) -> int:
        """Now, as `recording` wants it."""
        return self._sampler.since()[1]

    def recording(self, since: int) -> dict[str, Any]:
        """What was sampled since a mark, as it can be saved and replayed."""
        return record(self._sampler.source, self._sampler.since(since)[0])

    def close(self) -> None:
        """End the sampler's thread."""
        self._sampler.close()


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
        self._steps: list[Point] = []  # series, seconds since the run began, ms
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
            self._live.stream.begin(self._prompts, self._decode, by=self._names[phase.series])

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
        self._live.latency.push(steps)
        self._live.stream.push(tokens)

    def _rest(self, resting: bool) -> None:
        """While resting, nothing is sampled and no chart moves: measured runs are left alone."""
        if resting != self.resting:
            self._device.rest(resting)
            self._live.snapshot()  # for a page that is reloaded meanwhile
        self.resting = resting

    def _keep_samples(self) -> None:
        """The samples of the run that ends now, to be saved with the result."""
        if self._since is not None:
            self.monitor[NAMES[self._series]] = self._device.recording(self._since)
        self._since = None
