"""Lesson 4: what it counts, computes and shows from recorded rows is right, and its exercise says what is wrong."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from eet_lab.bench import Spread, Workload
from eet_lab.bench.cost import LaunchCost, step_ms, step_weight_bytes
from eet_lab.bench.launches import StepLaunches, counted, decode_calls, num_kernels, num_launches
from eet_lab.figures import theme
from eet_lab.lessons import Prediction, decode_speed, decode_step, recorded, roofline
from eet_lab.lessons import batching_exercises as exercises
from eet_lab.lessons.decode_step import LAYER, Timed, timed
from eet_lab.models import weights
from eet_lab.models.config import PRESETS, Config
from eet_lab.parts import Parts
from eet_lab.paths import benchmarks_dir
from eet_lab.technique import Recipe, known, names_in_all
from eet_lab.words import brief, percent

SMALL = Config(3, 64, 2, 256, 504, 128)
ALL = ",".join(names_in_all())


def parts(words: str) -> Parts:
    return Recipe.parse(words, "cuda").parts


def answered(value: float) -> Prediction:
    guess = Prediction("?", number=(0, 1000), unit="ms")
    guess.value = value
    return guess


@pytest.fixture(scope="module")
def verdict() -> tuple:
    """What is shown beside a prediction of 2.5 ms."""
    return decode_speed.verdict(answered(2.5)).things


@pytest.fixture(scope="module")
def account() -> tuple:
    """What is shown of the rest of a step."""
    return decode_speed.left_over(answered(2.5)).things


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?", text))


# --- counting calls


def test_our_kernels_count_what_the_step_declares():
    found = counted(parts(ALL), [7, 9], 12)
    assert found.total == num_launches(decode_calls(PRESETS["gpt2"], parts(ALL), 2, 256))
    assert [count for _, count in found.layer] == [1] * 5


def test_plain_calls_are_those_that_the_profiler_saw_on_the_gpu():
    """Some calls of PyTorch are two kernels there: the count is a little lower, and never higher."""
    ours = [row for row in recorded.steps_of() if row.provider == recorded.OURS and row.launches_per_token]
    rows = {row.recipe: row for row in ours}
    for recipe in ("baseline", "pre_padding,mask_removal,memory_reuse"):
        row = rows[recipe]
        load = Workload.parse(row.workload)
        words = recipe.removeprefix("baseline")
        counts = counted(parts(words), load.lengths, recorded.CONFIG.num_layers)
        assert 0.85 * row.launches_per_token < counts.total <= row.launches_per_token


def test_one_row_makes_the_same_steps_with_pre_padding():
    """What the lesson says of its live ladder: a difference between these two rungs is an error."""
    assert counted(Parts(), [8], 12) == counted(parts("pre_padding"), [8], 12)


def test_every_row_with_other_pads_is_a_call_of_its_own():
    plain = parts("pre_padding,mask_removal")
    alike, two, eight = (counted(plain, lengths, 1).total for lengths in ([5] * 8, [5] * 7 + [6], range(1, 9)))
    assert alike < two == eight


def test_a_layer_is_counted_in_order():
    found = counted(Parts(), [4], 1)
    assert tuple(op for op, _ in found.layer) == LAYER
    assert found._replace(layers=3).total - found.total == 2 * sum(count for _, count in found.layer)


def test_a_step_is_timed_op_by_op(tiny):
    ops = timed(tiny, Parts(), [1, 2, 3], new_tokens=8)
    assert [op.op for op in ops] == ["embed", *LAYER * tiny.config.num_layers, "next_token", "advance"]
    ends = [op.start_us + op.took_us for op in ops]
    assert all(end <= op.start_us for end, op in zip(ends, ops[1:], strict=False))
    assert ops[1].num_bytes > 3 * tiny.config.hidden_size**2 * tiny.decoder.dtype.itemsize


# --- roofline and rungs


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, tied_head=False)])
def test_weights_of_a_step_are_the_cost_models(config):
    if not config.tied_head:  # one number more for each word and channel, none of them read
        assert roofline.step_weights(config) == roofline.step_weights(replace(config, tied_head=True))
        return
    model = weights.random_decoder(config, 0, torch.device("cpu"), torch.float32)
    assert 4 * roofline.step_weights(config) == step_weight_bytes(model)


def test_a_point_at_best_lies_on_the_roof():
    roof = roofline.Roof(4000, 1000)
    assert roof.ridge == 250
    for batch in (1, 8, 64):
        work = roofline.decode_work(PRESETS["gpt2-xl"], batch, 100, 2)
        point = roofline.Point(roofline.DECODE, "", work, roof.ms(work))
        assert point.tflops == pytest.approx(roof.at(work.intensity))
    prefill = roofline.prefill_work(PRESETS["gpt2-xl"], 8, 1024, 2)
    assert prefill.intensity > roof.ridge and roof.at(prefill.intensity) == 1000


def test_the_legend_of_a_roof_stands_clear_of_its_axis():
    """At the figure's foot: a place relative to the plot moves into the axis title where the plot gets lower."""
    points = roofline.recorded_points()
    legend = roofline.figure("", roofline.Roof(4000, 1000), points[:1], points[1:]).layout.legend
    assert (legend.yref, legend.y, legend.yanchor) == ("container", 0, "bottom")


def test_recorded_steps_lie_below_the_roof():
    roof = roofline.Roof(recorded.ceiling_gb_per_s(), roofline.H200_TFLOPS)
    points = roofline.recorded_points()
    assert {point.kind for point in points} == {roofline.PLAIN, roofline.FUSED, roofline.PEERS}
    assert all(point.tflops < roof.at(point.work.intensity) for point in points)
    assert len({point.name for point in points}) == len(points), "who hovers over two can tell them apart"
    int8 = [point.work for point in points if "int8" in point.name]
    [half] = [point.work for point in points if point.name == f"all, {recorded.ONE_ROW}"]
    reads_half = (1.9 < work.intensity / half.intensity < 2 and work.flops == half.flops for work in int8)
    assert int8 and all(reads_half)


def test_floors_agree_with_the_recorded_ones():
    best = recorded.fastest()
    load = Workload.parse(best.workload)
    work = roofline.decode_work(recorded.CONFIG, load.batch, recorded.context(load), 2)
    roof = roofline.Roof(best.ceiling_gb_per_s, roofline.H200_TFLOPS)
    assert roof.ms(work) == pytest.approx(best.floor_ms, rel=0.01)


@pytest.mark.parametrize(("tflops", "unit", "scale"), [(0.045, "GFLOP/s", 1e3), (989.0, "TFLOP/s", 1.0)])
def test_a_roof_is_told_in_a_unit_that_fits_with_labels_along_both_axes(tflops, unit, scale):
    limits = roofline.Roof(12.0 if tflops < 1 else 4400.0, tflops)
    works = [roofline.decode_work(PRESETS["gpt2"], batch, 40, 4) for batch in roofline.BATCHES]
    bounds = [roofline.Point(roofline.DECODE, "", work, limits.ms(work)) for work in works]
    measured = [roofline.Point(roofline.PLAIN, "", works[0], 2 * limits.ms(works[0]))]
    fig = roofline.figure("", limits, bounds, measured)
    assert fig.layout.yaxis.title.text == f"{unit}, log scale"
    assert all(unit in trace.hovertemplate for trace in fig.data[1:])
    assert max(fig.data[0].y) == pytest.approx(tflops * scale)
    assert fig.data[-1].y == pytest.approx([measured[0].tflops * scale], rel=1e-3)
    for axis, values in ((fig.layout.xaxis, "x"), (fig.layout.yaxis, "y")):
        low, high = (10**end for end in axis.range)
        assert sum(low < tick < high for tick in axis.tickvals) >= 3
        assert not any("e" in text for text in axis.ticktext)
        assert all(0.999 * low <= value <= 1.001 * high for trace in fig.data for value in trace[values]), "4 digits"


def test_a_rung_is_predicted_by_the_slower_of_device_and_host():
    result = recorded.ladder()
    found = decode_step.rises(result, recorded.CONFIG, LaunchCost(kernel_us=1.0, launch_us=10.0))
    assert len(found) == len(result.rungs)
    baseline, graphs = found[0], found[-1]
    assert baseline.predicted_ms == pytest.approx(baseline.launches / 100)
    assert graphs.launches == 1 and graphs.kernels < 300
    assert graphs.predicted_ms == pytest.approx(graphs.floor_ms + graphs.kernels / 1e3)
    assert all(rise.measured.p50 > rise.floor_ms for rise in found)
    recorded_counts = [rung.measurement.cost.launches_per_token for rung in result.rungs]
    assert [rise.launches for rise in found] == recorded_counts, "those of the code that was timed"


def test_a_rung_is_labelled_right_of_both_its_markers():
    found = [
        decode_step.Rise("Baseline", 9, 9, 0.4, 4.4, Spread(5.6, 5.6, 5.6)),
        decode_step.Rise("+ Fused kernels", 9, 9, 0.4, 1.72, Spread(1.58, 1.58, 1.58)),
    ]
    fig = decode_step.rungs_figure(found, "time per token")
    labels = fig.data[-1]
    assert (labels.x, labels.mode) == ((5.6, 1.72), "text")
    assert [text.strip() for text in labels.text] == ["5.6 ms", "1.58 ms"]
    left, right = fig.layout.xaxis.range
    assert right - math.log10(5.6) > 0.1 * (right - left), "room for the longest label"
    assert "log scale" in fig.layout.xaxis.title.text
    assert fig.layout.margin.t >= theme.figure("a title").layout.margin.t + 20, (
        "the floor's label stands below the title"
    )


def test_the_layers_lanes_add_up_to_the_step():
    """Five kernels a layer, each timed alone, are about the recorded step, or more where launches overlap."""
    alone = sum(decode_step.ours_us(rows) for _, rows in decode_step.layer_ops()) * recorded.CONFIG.num_layers / 1e3
    assert 0.85 < alone / recorded.fastest().tpot_ms.p50 < 2
    assert all(decode_step.floor_us(rows) < decode_step.ours_us(rows) for _, rows in decode_step.layer_ops())


def test_what_is_recorded_says_where_with_what_and_when():
    assert recorded.label(recorded.ladder()).endswith(recorded.ladder().environment.origin)
    row = recorded.fastest()
    own = [row.gpu, *(f"{name} {getattr(row, name)}" for name in ("driver", "torch", "transformers", "commit"))]
    assert all(words in recorded.label([row]) for words in (*own, row.date[:10]))
    early = replace(row, date="2026-11-20T01:00:00", commit="0123456789ab")
    assert recorded.label([row, early]).endswith(
        f", 2026-11-20 to {row.date[:10]}, commit 0123456789ab to {row.commit}"
    )


@pytest.mark.parametrize("show", [roofline.roof, decode_speed.layer, decode_speed.verdict, decode_speed.left_over])
def test_the_gpus_figures_wait_for_the_prediction(show):
    guess = Prediction("?", number=(0, 1000), unit="ms")
    [place] = show(guess).things
    assert "Predict first" in str(place.outputs) and "H200" not in str(place.outputs)
    assert "NVIDIA H200" in str(show(answered(1.0)).things[0].data)


def test_the_readers_prediction_stands_beside_what_was_measured(verdict):
    text = str(verdict[1].data)
    assert "2.5 ms" in text and "hf-static-compile" in text and "floor" in text


def test_what_is_on_already_is_that_of_the_account(account):
    """Marks and numbers are of one recipe: the one of five kernels a layer, which the first table names."""
    on = Recipe.parse(recorded.fastest(without="persistent_layers").recipe, "cuda").names
    assert "dependent_launch" in on
    text = str(account[2].data)
    for name in filter(None, (name for *_, name in decode_speed.ATTACKS)):
        title = known(name).title
        assert f"{title} (on already)" in text if name in on else f"{title}<" in text


def test_the_account_is_of_the_numbers_in_the_table(account):
    """The ops alone sum to clearly more, with early starts that can hide it: the words are for that case."""
    alone, whole = (float(number) for number in re.findall(r">([\d.]+) ms<", account[1].data)[-2:])
    told = re.search(r"sum to (\d+) % more than the whole step, so about ([\d.]+) ms", account[3])
    assert told and float(told[1]) / 100 == pytest.approx(alone / whole - 1, abs=0.01) and alone > 1.03 * whole
    assert float(told[2]) == pytest.approx(alone - whole, abs=0.011)
    assert "dependent_launch" in recorded.fastest(without="persistent_layers").recipe


@pytest.mark.parametrize(("num_rows", "kernels"), [(1, 101), (2, 101), (3, 244)])
def test_kernels_of_a_large_model_are_those_that_its_step_declares(num_rows, kernels):
    lengths = tuple(range(8, 8 + num_rows))
    declared = num_launches(decode_calls(recorded.CONFIG, parts(ALL), num_rows, 12))
    assert num_kernels(parts(ALL), lengths, recorded.CONFIG) == declared == kernels
    assert num_kernels(parts(ALL), lengths, PRESETS["gpt2"]) == 64, "a small one runs as before"
    plain = parts("pre_padding,mask_removal,memory_reuse")
    assert num_kernels(plain, lengths, recorded.CONFIG) == counted(plain, lengths, 48).total


def test_what_is_one_kernel_a_layer_stands_beside_five(account):
    """The account of five kernels a layer is of a recipe that has them; what has two is told with its own time."""
    best, apart = recorded.fastest(), recorded.fastest(without="persistent_layers")
    assert "persistent_layers" in best.recipe and "persistent_layers" not in apart.recipe
    assert apart.commit == best.commit, "else the words must say that one has newer kernels"
    assert f"{apart.tpot_ms.p50:.3g} ms" in str(account[1].data)
    assert {"97", "240", f"{best.tpot_ms.p50:.3g}"} <= numbers(account[4])


def test_the_verdict_says_what_the_prediction_does_not_know(verdict):
    """Dependent launch has the prediction of the rung before, and is faster."""
    before, after = recorded.ladder().rungs[-2:]
    assert after.technique == "dependent_launch"
    told = decode_step.early_start(recorded.ladder())
    assert told and told in verdict[-1]
    assert {f"{rung.measurement.tpot_ms.p50:.3g}" for rung in (before, after)} == numbers(told)
    assert decode_step.early_start(replace(recorded.ladder(), rungs=recorded.ladder().rungs[:-1])) == ""


def test_the_verdict_says_how_unsteady_the_host_was(verdict):
    """The baseline and pre-padding take the same steps of one row, and so do memory reuse and packed prefill."""
    found = decode_step.rises(recorded.ladder(), recorded.CONFIG, decode_step.H200)
    told = decode_step.unsteady(found, "the host")
    assert told and told in verdict[-1]
    apart = [(a, b) for a, b in pairwise(found) if a.kernels == b.kernels == a.launches == b.launches]
    assert [a.title for a, _ in apart] == ["Baseline", "+ Memory reuse"]
    most = max(apart, key=lambda pair: abs(math.log(pair[0].measured.p50 / pair[1].measured.p50)))
    times = sorted(rise.measured.p50 for rise in most)
    assert {*(f"{ms:.3g}" for ms in times), f"{times[1] / times[0]:.2f}"} == numbers(told)
    assert decode_step.unsteady(found[-2:], "it") == "", "what early launches bring is no error"


def test_prices_are_those_that_were_measured_on_such_a_gpu(verdict):
    machine = json.loads((benchmarks_dir() / "h200-machine.json").read_text(encoding="utf-8"))
    where = recorded.ladder().environment
    assert (machine["gpu"], machine["driver"]) == (where.device, where.driver)
    assert machine["launch_cost"] == pytest.approx(decode_step.H200._asdict(), rel=1e-3)
    assert {brief(price, 2) for price in decode_step.H200} <= numbers(verdict[-1])


def test_each_row_of_the_verdict_is_held_against_its_own_floor(verdict):
    int8 = next(row for row in recorded.one_row() if "int8_weights" in row.recipe)
    text = str(verdict[1].data)
    assert "its own floor / measured" in text and percent(int8.floor_ms / int8.tpot_ms.p50) in text


@pytest.mark.parametrize(("gb_per_s", "share"), [(1.0, "50 %"), (0.25, "100 %")])
def test_the_share_of_the_op_with_the_most_bytes_is_measured(monkeypatch, tiny, gb_per_s, share):
    """Its bytes at the streaming rate, of what it took; no more than all of it, where a cache is faster."""
    ops = [Timed("embed", 0, 1, 8), Timed("attention", 1, 5, 64), Timed("next_token", 7, 3, 1500)]
    monkeypatch.setattr(decode_speed, "PROMPT", [1, 2, 3])
    monkeypatch.setattr(decode_step, "timed", lambda *args: ops)
    monkeypatch.setattr(decode_speed, "streaming_gb_per_s", lambda device: gb_per_s)
    *_, text = decode_speed.step(tiny).things
    assert f"next_token, has the most bytes, and they account for {share}" in text
    assert "56 %" in text, "attention, of what the ops took"
    assert "10 %" in text, "between the ops"


# --- the exercises


def test_the_exercise_holds_a_model_that_never_leaves_the_slope():
    batches = [exercises.floor_and_batch(*case)[1] for case in exercises.CASES.values()]
    assert sum(map(math.isinf, batches)) == 1 and batches[0] == 225
    assert exercises.floor_and_batch(1e9, 2e9, 0, 4e12, 999e12) == (0.5, 250)


def test_no_case_turns_on_the_last_digit():
    """Another way to write the same sum may differ by a rounding, and must not be called wrong."""
    for case in exercises.CASES.values():
        nudged = (case[0] * (1 + 1e-9), *case[1:])
        assert exercises.floor_and_batch(*nudged)[1] == exercises.floor_and_batch(*case)[1]
        assert exercises.floor.check(lambda n, *rest: exercises.floor_and_batch(n * (1 + 1e-9), *rest)).ok


def test_the_launches_that_there_is_time_for():
    """As many as the host can make while the device works, by the model that predicts a step."""
    for floor_ms in (0.732, 3.42, 0.05):
        most = exercises.most_launches(floor_ms, *decode_step.H200)
        price = LaunchCost(*decode_step.H200)
        device_ms = floor_ms + most * price.kernel_us / 1e3
        assert step_ms(floor_ms, StepLaunches(most, most), price) == pytest.approx(device_ms)
        assert step_ms(floor_ms, StepLaunches(most + 1, most + 1), price) > device_ms + price.kernel_us / 1e3
