"""What the charts and the bar of memory show, and what becomes of a counter that goes away."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from eet_lab.figures.live import SCRIPT, StripChart
from eet_lab.figures.memory_bar import bar, held_now
from eet_lab.monitor import Sample
from eet_lab.technique import Recipe
from eet_lab.workbench import Workbench
from eet_lab.workbench.engine_thread import Phase
from workbench.driving import ask, do, shown, turn, turn_until


def test_the_bar_is_made_of_what_lies_between_the_lines() -> None:
    values = {"weights_bytes": 10.0, "planned_bytes": 5.0, "torch_allocated_bytes": 18.0}
    values |= {"torch_reserved_bytes": 32.0, "memory_used_bytes": 100.0}
    parts = held_now(values)
    assert [part.num_bytes for part in parts] == [10, 5, 3, 14, 68]
    assert sum(part.num_bytes for part in parts) == values["memory_used_bytes"]
    assert "context" in parts[-1].name and "cache" in parts[3].name
    html = bar(parts)
    assert "width:68.000%" in html and html.count("eet-stack-bar") == 1


def test_counters_that_are_missing_or_late_leave_no_hole() -> None:
    parts = held_now({"weights_bytes": 10.0, "planned_bytes": 50.0, "process_rss_bytes": 40.0})
    assert [part.num_bytes for part in parts] == [10, 50, 0]
    assert "Python" not in bar(parts)


def test_the_live_bar_shows_the_weights_of_what_is_loaded(bench: Workbench) -> None:
    assert bench.model is not None
    live = bench.controller.page.live
    turn_until(bench, lambda: "weights" in str(live.held()))
    assert bench.controller.engine.feed.weights_bytes() == bench.model.decoder.weight_bytes
    turn_until(bench, lambda: shown(bench, "inputs")["fits"]["held"])
    [now] = shown(bench, "inputs")["fits"]["held"]
    assert "rest of this process" in now["parts"][-1]["name"]


def test_after_a_run_the_bar_shows_it_beside_what_is_held_now(bench: Workbench) -> None:
    samples = [
        Sample(t, {"weights_bytes": 10.0, "planned_bytes": p, "process_rss_bytes": 50.0})
        for t, p in ((0.0, 0.0), (0.1, 7.0), (0.2, 0.0))
    ]
    live = bench.controller.page.live
    for count, there in ((1, False), (2, False), (3, True)):
        live.push_samples(samples[count - 1 : count], 0.0)
        assert (live.held()[0]["title"] == "Held in the last run") == there
    last, now = live.held()
    assert "KV cache and activations" in str(last)
    assert "KV cache and activations" not in str(now)


def test_a_metric_that_dies_in_mid_run_is_explained(bench: Workbench) -> None:
    bench.controller.device._sampler.source.missing = {"process_rss_bytes": "the driver <went> away"}
    turn(bench, 5)
    assert bench.controller.page.live.memory.note == "process RSS: the driver <went> away"


def test_charts_leave_a_gap_where_nothing_is_sampled(bench: Workbench) -> None:
    live, watching = bench.controller.page.live, bench.controller.watching
    turn_until(bench, lambda: live.load.points)
    watching.enter(Phase("measured", 0, watched=False))
    watching.enter(Phase("watched", 0))
    turn_until(bench, lambda: not math.isnan(live.load.points[-1][2]))
    for chart, lines in ((live.memory, {0, 1}), (live.load, {0})):
        assert {series for series, _, y in chart.points if math.isnan(y)} == lines
        assert sum(math.isnan(y) for *_, y in chart.points) == len(lines), "one gap in each line"


DRAWN = """async ([script, buffer, scale]) => {
  const { default: chart } = await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  const el = document.body.appendChild(document.createElement("div")), calls = [];
  const pen = CanvasRenderingContext2D.prototype, { moveTo, lineTo } = pen;
  pen.moveTo = function (x, y) { if (this.lineWidth > 1) calls.push("move"); moveTo.call(this, x, y); };
  pen.lineTo = function (x, y) { if (this.lineWidth > 1) calls.push("line"); lineTo.call(this, x, y); };
  el.style.cssText = "width:400px;height:200px;display:flex;flex-direction:column";
  const traits = { title: "", unit: "%", x_unit: "s", window: 0, note: "", scale,
    series: [{ name: "a", color: "red", value_of: "last step" }],
    snapshot: new DataView(new Float32Array(buffer).buffer) };
  const model = { get: (name) => traits[name], on() {}, off() {} }, end = chart.render({ model, el });
  while (!el.dataset.draws) await new Promise(requestAnimationFrame);
  Object.assign(pen, { moveTo, lineTo });
  end(); el.remove();
  return [calls.join(" "), el.querySelector(".eet-strip-legend").textContent];
}"""
"""What a chart with these points draws of its line, and its legend."""


@pytest.mark.browser
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_gap_is_not_drawn_over(window: Any, scale: str) -> None:
    chart = StripChart(series=[{"name": "a", "color": "red"}])
    chart.push([(0, 0.0, 5.0), (0, 0.1, 6.0)])
    chart.break_lines()
    chart.break_lines()
    before = window.evaluate(DRAWN, [SCRIPT, np.ravel(chart.points).tolist(), scale])
    assert before == ["move line", "a last step 6 %"], "the newest value is told until there is another one"
    chart.push([(0, 0.3, 7.0), (0, 0.4, 8.0)])
    drawn = window.evaluate(DRAWN, [SCRIPT, np.ravel(chart.points).tolist(), scale])
    assert drawn == ["move line move line", "a last step 8 %"]


LABELS = """async ([script, buffer, height]) => {
  const { default: chart } = await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  const el = document.body.appendChild(document.createElement("div")), labels = [];
  const pen = CanvasRenderingContext2D.prototype, { fillText } = pen;
  pen.fillText = function (text, x, y) { if (this.textAlign === "right") labels.push([text, y]); };
  el.style.cssText = `width:300px;height:${height}px;display:flex;flex-direction:column`;
  const traits = { title: "loss", unit: "", x_unit: "", window: 0, note: "", scale: "log",
    series: [{ name: "a", color: "red" }], snapshot: new DataView(new Float32Array(buffer).buffer) };
  const model = { get: (name) => traits[name], on() {}, off() {} }, end = chart.render({ model, el });
  while (!el.dataset.draws) await new Promise(requestAnimationFrame);
  pen.fillText = fillText;
  end(); el.remove();
  return labels;
}"""
"""The labels of a logarithmic axis, and how far down they are."""


@pytest.mark.browser
@pytest.mark.parametrize(
    ("low", "high"),
    [(4.27, 4.35), (3.9, 4.4), (0.8, 1.4), (1.2, 1.9), (2.1, 9.0), (0.0009, 0.0011), (1.9, 170), (1e-9, 5.0)],
)
def test_a_logarithmic_axis_has_three_labels_or_more(window: Any, low: float, high: float) -> None:
    points = np.ravel([(0, 0, high), (0, 1, low)]).tolist()
    labels = window.evaluate(LABELS, [SCRIPT, points, 190])
    assert 3 <= len({text for text, _ in labels}) == len(labels) <= 10, labels
    heights = [y for _, y in labels]
    assert all(below - above >= 11 for below, above in pairwise(heights)), labels


@pytest.mark.browser
@pytest.mark.timeout(60)
def test_what_is_infinite_is_left_out_of_an_axis(window: Any) -> None:
    """A gradient norm that overflowed: ticks up to it would never end."""
    finite = np.ravel([(0, 0, 9.0), (0, 1, 2.1)]).tolist()
    assert window.evaluate(LABELS, [SCRIPT, [*finite, 0, 2, math.inf], 190]) == window.evaluate(
        LABELS, [SCRIPT, finite, 190]
    )


def test_the_latency_chart_says_that_its_value_is_the_last_steps(bench: Workbench) -> None:
    for charts in (bench.controller.page.live, bench.controller.page.kept):
        assert {each["value_of"] for each in charts.latency.series} == {"last step"}


class FakeGpu:
    """What NVML would say, until it goes away."""

    name, label = "nvml", "Imaginary GPU (NVML)"

    def __init__(self) -> None:
        self.metrics: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def read(self) -> dict[str, float]:
        return {} if self.missing else {"memory_used_bytes": 2.0**31, "utilization_percent": 40.0, "power_w": 300.0}

    def condition(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


def test_on_a_gpu_memory_is_three_kinds_of_lines_that_may_stop(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr("eet_lab.workbench.live.open_source", lambda kind: gpu)
    bench.controller.device.watch("cuda")
    live = bench.controller.page.live
    assert [s["name"] for s in live.memory.series] == [
        "plan: weights + KV + arena",
        "allocated (torch)",
        "reserved (torch)",
        "used (NVML)",
    ]
    turn_until(bench, lambda: live.memory.points)
    assert {(series, y) for series, _, y in live.load.points} == {(0, 40.0), (1, 300.0)}
    assert {series for series, _, _ in live.memory.points} == {0, 1, 2, 3}
    gpu.missing = {"memory_used_bytes": "NVML: GPU is lost", "power_w": "NVML: GPU is lost"}
    turn_until(bench, lambda: live.memory.note)
    assert live.memory.note == "used (NVML): NVML: GPU is lost"
    assert live.load.note == "power: NVML: GPU is lost"


def test_a_page_that_is_reloaded_while_recipes_are_timed_has_the_texts_so_far(bench: Workbench) -> None:
    watching, stream = bench.controller.watching, bench.controller.page.live.stream
    watching.begin(["a prompt"], str)
    stream.push([(0, 5), (0, 6)])
    watching.enter(Phase("baseline", watched=False, series=0))
    assert json.loads(stream.snapshot)["counts"] == [2], "nothing is sent until the timing is over"
    watching.leave(in_vain=False)


def test_a_kept_run_of_the_baseline_has_its_samples_and_its_name(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eet_lab.workbench.live.HZ", 500)  # a fast machine is done before the usual rate's first sample
    bench.controller.device.watch("cpu")
    bench.controller.state.choose(Recipe())
    do(bench, ask.setting("max_new_tokens", 60), ask.run())
    [kept] = [each["id"] for each in shown(bench, "runs")["rows"] if each["writable"]]
    do(bench, ask.run(), ask.open_run(kept))
    charts = bench.controller.page.kept
    assert [each["name"] for each in charts.latency.series] == ["baseline", "selection"]
    assert {line for line, *_ in charts.latency.points} == {0}
    assert charts.memory.points and charts.memory.note == ""
