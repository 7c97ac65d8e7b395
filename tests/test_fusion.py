"""The fusion map and the timeline of a training step: what its phases launch, move and take, and how that is drawn."""

from __future__ import annotations

import json
from ctypes import c_int, c_void_p
from dataclasses import replace
from types import SimpleNamespace

import families
import pytest
import torch
from gpu_traces import Trace

import eet_lab
from eet_lab.bench import fusion
from eet_lab.bench.fusion import FusionMap, FusionRung, Gain, PhaseWork, fusion_map
from eet_lab.bench.measured import Spread
from eet_lab.bench.paired import Change
from eet_lab.bench.profiler_trace import PHASE, read_steps
from eet_lab.bench.timeline import Timelines, decode, encode, write_trace
from eet_lab.bench.timeline_steps import PHASES, timelines, training_timeline
from eet_lab.bench.training import train_all
from eet_lab.errors import Cancelled, ModelError, PromptError
from eet_lab.figures import fusion as drawn
from eet_lab.figures.timeline import short_caption
from eet_lab.ops import native
from eet_lab.ops.native import launchers

BATCH = "train:any/b3/s4-9"


@pytest.fixture(scope="module")
def mapped() -> FusionMap:
    return fusion_map(families.ours("gpt2"), BATCH, "pre_padding,mask_removal,packed_prefill,flat_optimizer", repeats=1)


@pytest.fixture(scope="module")
def taken() -> Timelines:
    return eet_lab.training_timelines(families.ours("gpt2"), BATCH, "flat_optimizer")


def test_each_technique_changes_the_phases_that_it_is_for(mapped):
    baseline, *_, packed, flat = mapped.rungs
    assert [baseline.name, packed.name, flat.name] == ["", "packed_prefill", "flat_optimizer"]
    assert all(work.launches and work.num_bytes and work.ms > 0 for rung in mapped.rungs for work in rung.work.values())
    for phase in ("forward", "backward"):
        assert packed.work[phase].launches < baseline.work[phase].launches, "one pass instead of three"
        assert flat.work[phase][1:2] == packed.work[phase][1:2]
    assert flat.work["update"].launches < packed.work["update"].launches / 4
    frame = mapped.to_frame()
    assert frame.loc[("flat_optimizer", "update"), "launches"] == flat.work["update"].launches


def test_steps_are_timed_until_enough_is_known():
    found = fusion_map(families.ours("gpt2"), BATCH, "pre_padding", budget_s=0)
    assert "<th>backward</th>" in found._repr_html_()
    _, padded = found.rungs
    assert {*padded.changes} == {*PHASES, "step"} and {each.num_pairs for each in padded.changes.values()} <= {6, 8}
    with pytest.raises(PromptError, match="budget_s is -1"):
        fusion_map(families.ours("gpt2"), BATCH, budget_s=-1)


def test_bytes_of_a_product_are_its_inputs_and_its_output():
    left, right = torch.ones(3, 4), torch.ones(4, 5)
    with fusion._Moved() as counter:
        counter.begin("forward")
        left @ right
        left.view(4, 3)
    assert counter.calls == {"forward": 1} and counter.num_bytes == {"forward": 4 * (12 + 20 + 15)}


def test_bytes_of_kernels_are_those_at_their_addresses(monkeypatch):
    launched, x, flat = [], torch.ones(6, 4), torch.ones(100)
    counter = fusion._Moved([flat])
    parameters = [launchers.Parameter(name, c_void_p) for name in ("out", "x", "bias", "stream")]
    launcher = SimpleNamespace(name="eet_fake", launch=lambda **given: launched.append(given))
    launcher.parameters = [*parameters, launchers.Parameter("T", c_int)]
    library = SimpleNamespace(launchers={"eet_fake": launcher}, eet_fake=launcher.launch)
    monkeypatch.setitem(launchers._current, "fake", library)
    with counter, native.observed(counter.launched):
        counter.begin("backward")
        half, out = x[3:], torch.empty(3, 4)
        library.eet_fake(out=out.data_ptr(), x=half.data_ptr(), bias=None, stream=7, T=3)
        of_part = {"out": half.data_ptr(), "x": flat[:8].data_ptr(), "bias": None, "stream": 7, "T": 3}
        library.eet_fake(**of_part)
        counter.begin("update")
        library.eet_fake(**of_part)
    told = {"backward": 4 * (12 + 12 + 12 + 8), "update": 4 * (12 + 100)}
    assert counter.num_bytes == told and len(launched) == 3, "an update reads a buffer whole"
    library.eet_fake(T=3)
    assert counter.num_bytes == told and len(launched) == 4, "nobody is told any more"


def test_a_gain_of_a_phase_is_bounded_by_its_share():
    spread = Spread(10.0, 10.0, 10.0)
    work = {phase: PhaseWork(9, 9, ms) for phase, ms in zip(PHASES, (3.0, 5.0, 2.0), strict=True)}
    before = FusionRung("", "baseline", "baseline", work, spread, {})
    changes = {phase: Change.of([5.0] * 8, [5.0] * 8) for phase in PHASES}
    changes |= {"update": Change.of([2.0] * 8, [0.5] * 8), "step": Change.of([10.0] * 8, [8.5] * 8)}
    after = FusionRung("x", "X", "x", {**work, "update": PhaseWork(1, 9, 0.5)}, Spread(8.5, 8.5, 8.5), changes)
    gain = after.gain(before)
    assert gain == Gain("update", changes["update"], changes["step"], 0.2) and gain.most == 1.25
    assert drawn._words(gain) == "update 4 ×, step 1.2 ×"
    unsure = replace(after, changes=changes | {"step": changes["forward"]}).gain(before)
    assert drawn._words(unsure) == "update 4 ×, step ?" and "cannot tell apart" in drawn._bound(unsure)
    captured = replace(after, changes=dict.fromkeys(changes, changes["forward"]) | {"step": changes["step"]}).gain(
        before
    )
    assert captured == Gain(None, None, changes["step"], 0.0) and drawn._words(captured) == "step 1.2 ×"
    assert "launched one by one" in drawn._bound(captured), "phases cannot tell what a captured step gains"
    noise = replace(after, changes=dict.fromkeys(changes, changes["forward"]))
    assert noise.gain(before) is None and drawn._words(None) == "no gain to tell", "noise is no effect"


def test_the_map_is_drawn_before_and_after_each_technique(mapped):
    figure = eet_lab.plot(mapped, "fusion")
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert len(bars) == 3 * 3 * 2 * len(mapped.pairs) and {bar.name for bar in bars} == set(PHASES)
    [words] = [trace for trace in figure.data if trace.type == "scatter"]
    assert set(words.text) == {"  no gain to tell"}, "of one round nothing is told"
    assert figure.layout.xaxis.title.text == "calls of PyTorch"
    assert list(figure.layout.yaxis.ticktext) == [after.title for _, after in mapped.pairs]


def test_a_timeline_has_each_pass_forward_and_backward_and_an_update(taken, tmp_path):
    for timeline in taken:
        phases = [span for span in timeline.spans if span.kind == "phase"]
        assert [span.name for span in phases] == [*PHASES] * 3, "a text each"
        assert phases[-1].end_us <= timeline.step_us + 0.01
        for span in timeline.spans:
            inside = next(p.name for p in reversed(phases) if p.start_us <= span.start_us)
            assert inside == "forward" or span.kind != "op"
        assert (timeline.stage, timeline.num_rows, timeline.num_columns) == ("train", 3, 4 + 6 + 9)
        names = {span.name for span in timeline.spans if span.kind == "call"}
        assert "mm" in names and not [name for name in names if "Backward0" in name]
    assert decode(encode(taken)).selection.stage == "train"
    assert short_caption(taken).startswith("One training step: 3 rows, 19 tokens")
    events = json.loads(write_trace(tmp_path / "t.json", taken).read_text())["traceEvents"]
    assert {"forward", "backward", "update"} <= {event["name"] for event in events if event.get("cat") == "phase"}
    assert {"phase of the step", "call of PyTorch"} <= {trace.name for trace in eet_lab.plot(taken).data}


def test_phases_on_a_gpu_are_those_of_their_launches():
    trace = Trace()

    def begins(phase):
        return lambda: trace.host("user_annotation", PHASE + phase, trace.now, trace.now)

    trace.step(
        begins("forward"), lambda: trace.call("aten::mm", ("nvjet_a", 50.0)),
        begins("backward"), lambda: trace.call("autograd::engine::evaluate_function: Mm", ("nvjet_b", 70.0)),
        begins("update"), lambda: trace.call("aten::add_", ("nvjet_c", 9.0)),
    )  # fmt: skip
    [step] = read_steps(trace.content())
    device = [span for span in step.spans if span.kind == "phase" and span.lane == "device"]
    assert [(span.name, round(span.dur_us)) for span in device] == [("forward", 50), ("backward", 70), ("update", 9)]
    assert [phase for phase, _ in fusion._of_phases(step)] == [*PHASES]


def test_a_name_is_no_model():
    for work in (fusion_map, eet_lab.training_timelines, training_timeline, train_all, timelines):
        with pytest.raises(ModelError, match=r"it must be a loaded model: eet_lab.load\('demo'\)"):
            work("demo", BATCH)


def test_a_stop_ends_both():
    stop = SimpleNamespace(is_set=lambda: True)
    with pytest.raises(Cancelled):
        fusion_map(families.ours("gpt2"), BATCH, "", cancel=stop)
    with pytest.raises(Cancelled):
        eet_lab.training_timelines(families.ours("gpt2"), BATCH, "", cancel=stop)
