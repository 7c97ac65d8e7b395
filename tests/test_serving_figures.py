"""Figures of serving: boxes are the passes that were made, curves the percentiles, the surface the table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost_tables import TOY_DECODER, TURBO_2060

from eet_lab.errors import Cancelled
from eet_lab.figures.serving import (
    MOST_BOXES,
    PROMPTS,
    WASTE,
    batches,
    cost_of_one,
    cost_surface,
    highest_loads,
    in_words,
    latency_against_load,
    parts,
    told_table,
)
from eet_lab.scheduling.agreement import Compared
from eet_lab.scheduling.choices import by_title, fitting_policies, one_by_one_rate
from eet_lab.scheduling.policies import ContinuousBatching, DynamicProgram, NaivePadding, NoBatching, TokenBudget
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.sweep import BEYOND, RISEN, STEP, LoadPoint, rates_past_capacity, sweep
from eet_lab.scheduling.traffic import Gamma, Traffic, Uniform, make_traffic


def texts(num: int = 200, rate: float = 100.0) -> Traffic:
    return make_traffic(num, Gamma(rate), Uniform(5, 100))


def padded_and_not(traffic: Traffic) -> dict[str, Served]:
    policies = (NoBatching(), NaivePadding(max_rows=4))
    return {policy.title: simulate_traffic(traffic, policy, TURBO_2060) for policy in policies}


def test_a_box_is_a_pass_with_its_pads_on_top() -> None:
    runs = padded_and_not(texts())
    fig = batches(runs)
    naive = runs["Naive padding"].passes
    boxes = {trace.name: trace for trace in fig.data if trace.type == "bar" and trace.yaxis == "y2"}
    assert set(boxes) == {PROMPTS, WASTE}, "nothing that is nowhere"
    padded = naive.pads > 0
    assert np.array_equal(boxes[PROMPTS].y, naive.prompt_tokens) and not boxes[PROMPTS].base.any()
    assert np.array_equal(boxes[WASTE].y, naive.pads[padded]) and 0 < padded.sum() < len(naive)
    assert np.array_equal(boxes[WASTE].base, naive.prompt_tokens[padded])
    seen = np.stack([boxes[PROMPTS].x - boxes[PROMPTS].width / 2, boxes[PROMPTS].x + boxes[PROMPTS].width / 2])
    np.testing.assert_allclose(seen, np.stack([naive.begin_ms, naive.end_ms]), atol=1e-3)
    assert boxes[PROMPTS].customdata[5].tolist()[:2] == [6, naive.rows[5]]
    told = [note.text for note in fig.layout.annotations]
    assert told[1] == f"Naive padding: {in_words(runs['Naive padding'])}" and "no pads" in told[0]
    assert fig.layout.yaxis.range == fig.layout.yaxis2.range, "one scale"
    [legend] = [{trace.name for trace in fig.data if trace.showlegend is not False and trace.type == "bar"}]
    assert legend == {PROMPTS, WASTE}


def test_all_runs_are_on_one_clock_with_their_queues() -> None:
    runs = padded_and_not(texts())
    fig = batches(runs, span_ms=(100.0, 400.0))
    assert {axis.range for axis in fig.select_xaxes()} == {(100.0, 400.0)}
    assert fig.layout.annotations[-1].text == "waiting requests"
    lines = {trace.name: trace for trace in fig.data if trace.type == "scatter"}
    for name, served in runs.items():
        line = lines[f"queue: {name}"]
        assert np.array_equal(line.y, served.queued(np.linspace(100, 400, len(line.x))))
    long = batches({"one": simulate_traffic(texts(MOST_BOXES + 100), NoBatching(), TURBO_2060)})
    assert len(long.data[0].x) <= MOST_BOXES + 1 and "time, " in long.layout.xaxis2.title.text


def test_words_of_a_figure_stand_clear_of_each_other() -> None:
    """A panel's name is above it, below the figure's title; what an axis counts would lie on the panel before it."""
    fig = batches(padded_and_not(texts(20)), title="t")
    title_foot, name_px = fig.layout.title.pad.t + 1.3 * fig.layout.title.font.size, 1.4 * 12
    assert fig.layout.margin.t - name_px - title_foot > 4
    panel = [Compared("Packed", "texts/s", 1.0, 2.0)]
    fig = highest_loads({"short": panel, "long": panel})
    assert (fig.layout.yaxis.title.text, fig.layout.yaxis2.title.text) == ("texts/s", None)


def test_rows_are_as_high_as_requests() -> None:
    served = simulate_traffic(
        make_traffic(40, Gamma(50.0), Uniform(5, 30), Uniform(2, 10)), ContinuousBatching(max_rows=4), TOY_DECODER
    )
    decodes, prompts, waste = parts(served.passes, "rows")
    np.testing.assert_allclose(decodes + prompts + waste, served.passes.rows)
    assert np.array_equal(decodes, served.passes.decoded) and decodes.any() and prompts.any()
    assert batches({"joining": served}, height="rows", queue=False).layout.yaxis.title.text == "rows"
    naive = padded_and_not(texts())["Naive padding"].passes
    np.testing.assert_allclose(sum(parts(naive, "rows")), naive.rows)


def test_a_sweep_is_a_simulation_for_each_load() -> None:
    policies = by_title([NoBatching(), DynamicProgram(max_rows=4)])
    found = sweep(lambda rate: texts(300, rate), policies, TURBO_2060, [900.0, 50.0])
    assert list(found) == ["No batching", "Dynamic program"]
    for name, points in found.items():
        again = simulate_traffic(texts(300, 50.0), policies[name], TURBO_2060)
        assert points[0] == LoadPoint.of(again) and points[0].rate < points[1].rate
        assert points[1].is_full and not points[0].is_full
    fig = latency_against_load(found)
    solid = {trace.name: trace for trace in fig.data if trace.line.dash == "solid"}
    assert list(solid["No batching"].y) == pytest.approx(
        [point.times["e2e_ms"]["p99"] for point in found["No batching"]], rel=1e-3
    )
    assert list(solid["No batching"].marker.symbol) == ["circle", "circle-open"]
    assert fig.layout.yaxis.type == "log" and fig.layout.yaxis.title.text == "end-to-end latency, ms, log scale"
    assert fig.layout.xaxis.type == "log" and fig.layout.xaxis.title.text == "arrival rate (requests/s), log scale"
    close = sweep(lambda rate: texts(300, rate), policies, TURBO_2060, [100.0, 50.0])
    assert latency_against_load(close).layout.xaxis.title.text == "arrival rate (requests/s)"


@pytest.mark.parametrize("rate", [1.0, 60.0, 1e5])
def test_rates_reach_from_what_all_can_serve_to_what_none_can(rate: float) -> None:
    policies = by_title([NoBatching(), DynamicProgram(max_rows=4)])
    rates = rates_past_capacity(lambda each: texts(200, each), [*policies.values()], TURBO_2060, rate, 10)
    assert len(rates) == 10 and rates == sorted(rates)
    for points in sweep(lambda each: texts(200, each), policies, TURBO_2060, rates).values():
        p99 = [point.times["e2e_ms"]["p99"] for point in points]
        assert not points[0].is_full and points[-1].is_full and p99[-1] >= RISEN * p99[0]


def test_rates_end_where_too_few_come_to_wait_for_long() -> None:
    alone = [NaivePadding(max_rows=TURBO_2060.most_rows)]
    rates = rates_past_capacity(lambda each: texts(2, each), alone, TURBO_2060, 5.0, 4)
    served = LoadPoint.of(simulate_traffic(texts(2, 1e6), alone[0], TURBO_2060)).requests_per_s
    assert served * BEYOND <= rates[-1] <= STEP * served * BEYOND


def test_policies_that_were_chosen_stand_out() -> None:
    points = sweep(lambda rate: texts(50, rate), by_title([NoBatching(), NaivePadding()]), TURBO_2060, [5.0, 50.0])
    fig = latency_against_load(points, chosen=["Naive padding"])
    drawn = {(trace.name, trace.line.dash): trace for trace in fig.data if trace.line.dash}
    assert {*drawn} == {("No batching", "solid"), ("Naive padding", "solid"), ("Naive padding", "dot")}
    pale, plain = drawn["No batching", "solid"], drawn["Naive padding", "solid"]
    assert pale.opacity < plain.opacity and pale.line.width < plain.line.width
    assert fig.layout.xaxis.type == "log" and fig.layout.xaxis.title.text == "arrival rate (requests/s), log scale"


def test_what_was_measured_stands_beside_what_was_simulated() -> None:
    points = sweep(lambda rate: texts(50, rate), by_title([NoBatching()]), TURBO_2060, [50.0])
    fig = latency_against_load(points, measured=points)
    diamonds = [trace for trace in fig.data if trace.name == "No batching, measured"]
    assert [list(trace.marker.symbol) for trace in diamonds] == [["diamond"]]
    assert diamonds[0].y == fig.data[0].y and diamonds[0].marker.color == fig.data[0].line.color


def test_what_came_all_at_once_has_no_place_among_loads() -> None:
    """It is named, and neither axis reaches for it."""
    policies = by_title([NoBatching(), NaivePadding()])
    points = sweep(lambda rate: texts(50, rate), policies, TURBO_2060, [50.0])
    together = replace(texts(900), arrival_ms=np.zeros(900))
    once = {name: [LoadPoint.of(simulate_traffic(together, each, TURBO_2060))] for name, each in policies.items()}
    once["No batching"] += points["No batching"]
    fig = latency_against_load(points, measured=once)
    alone = latency_against_load(points, measured={"No batching": points["No batching"]})
    assert all(np.isfinite(x) for trace in fig.data for x in trace.x if x is not None)
    assert fig.layout.yaxis == alone.layout.yaxis
    named = [trace.name for trace in fig.data if "at once" in trace.name]
    assert named == ["No batching, measured all at once: no load", "Naive padding, measured all at once: no load"]
    assert all(trace.showlegend for trace in fig.data if trace.name in named)
    assert [len(trace.x) for trace in fig.data if trace.name == "No batching, measured"] == [1]
    assert latency_against_load({}, measured={"Naive padding": once["Naive padding"]}).data, "nothing has a place"


def test_a_policy_ends_where_the_table_does() -> None:
    def lengths(rate: float) -> Traffic:
        return make_traffic(50, Gamma(rate), Uniform(TURBO_2060.most_length, TURBO_2060.most_length))

    wide = NaivePadding(max_rows=TURBO_2060.most_rows + 1)
    found = sweep(lengths, {"wide": wide}, TURBO_2060, [0.01, 1e4])
    assert len(found["wide"]) == 1
    assert latency_against_load(found).data

    class Pressed:
        def is_set(self) -> bool:
            return True

    with pytest.raises(Cancelled):
        sweep(lambda rate: texts(2000, rate), {"none": NoBatching()}, TURBO_2060, [50.0], cancel=Pressed())


def test_names_are_titles_unless_two_are_the_same() -> None:
    twice = by_title([DynamicProgram(max_rows=4), DynamicProgram(trigger="lazy"), TokenBudget()])
    assert list(twice) == ["dynamic_program:max_rows=4", "dynamic_program:trigger=lazy", "Packed, token budget"]


def test_what_fits_stays_within_the_table() -> None:
    traffic = texts()
    for policy in fitting_policies(None, traffic, TURBO_2060):
        simulate_traffic(traffic, policy, TURBO_2060)
    rate = one_by_one_rate(Uniform(5, 100), Uniform(1, 1), TURBO_2060)
    served = simulate_traffic(texts(200, 1e6), NoBatching(), TURBO_2060)
    assert rate == pytest.approx(served.requests_per_s)


def test_the_surface_is_the_table() -> None:
    fig = cost_surface(TURBO_2060)
    surface = fig.data[0]
    assert list(surface.x) == list(TURBO_2060.batches) and list(surface.y) == list(TURBO_2060.lengths)
    row, column = len(surface.y) // 2, len(surface.x) - 1
    there = TURBO_2060.at(TURBO_2060.lengths[row], TURBO_2060.batches[column])
    assert surface.z[row][column] == pytest.approx(there, rel=1e-3)
    decoder = cost_surface(TOY_DECODER).data[0]
    extra, rows = TOY_DECODER.extras[-1], TOY_DECODER.rows[0]
    assert decoder.z[-1][0] == pytest.approx(TOY_DECODER.at(extra + rows, rows, 0), rel=1e-3)
    [*curves] = cost_of_one(TURBO_2060).data
    last = TURBO_2060.batches[-1]
    assert curves[0].y[-1] == pytest.approx(TURBO_2060.at(TURBO_2060.lengths[0], last) / last, rel=1e-3)
    assert str(TOY_DECODER.most_rows) in told_table(TOY_DECODER) and "texts of" in told_table(TURBO_2060)
