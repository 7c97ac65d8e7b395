"""The timeline of a decode step: what is read of a trace, what is kept of it, drawn and written for Perfetto."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
from gpu_traces import eager, graphed, of_kind

from eet_lab.bench.launches import Call, counting
from eet_lab.bench.profiler_trace import ProfiledStep, read_steps
from eet_lab.bench.timeline import (
    Timeline,
    Timelines,
    covered_us,
    decode,
    encode,
    read_timelines,
    with_bytes,
    write_trace,
)
from eet_lab.bench.timeline_steps import NEW_TOKENS, SAMPLES, Probe, earliest, step_timeline, timelines
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import Cancelled, MonitorError, PromptError, ResultError
from eet_lab.figures.timeline import busy_shares, caption, headline, short_caption, timeline_figure
from eet_lab.parts import Parts
from eet_lab.parts.launch import GraphLaunch
from eet_lab.words import ms_words

ROWS = [[5], [7, 8, 9, 10], [3, 1, 4, 1, 5, 9, 2]]


@pytest.fixture(scope="module")
def taken(tiny) -> Timelines:
    return timelines(tiny, ROWS, "all")


def on_gpu(step: ProfiledStep, recipe: str, unprofiled_us: float, **more) -> Timeline:
    about = {"source": "torch.profiler, NVIDIA H200", "origin": "NVIDIA H200, driver 580.1", "device_kind": "cuda"}
    about |= {"num_rows": 8, "num_columns": 190, "num_left_out": 0, "remark": "", "unprofiled_us": unprofiled_us}
    seen = {name: getattr(step, name) for name in ("spans", "step_us", "num_launches", "device_busy_us")}
    return Timeline(recipe=recipe, **about | seen | more)


@pytest.fixture(scope="module")
def recorded() -> Timelines:
    """As large as a step of GPT-2 XL: 48 layers of a baseline and one graph."""
    baseline, graph = (read_steps(trace.content())[1] for trace in (eager(94), graphed(96)))
    return Timelines(on_gpu(baseline, "baseline", 10_200), on_gpu(graph, "pre_padding,cuda_graphs", 1_480))


# Taken on the CPU.


def test_a_cpus_step_is_its_ops_and_their_calls(taken):
    for timeline in taken:
        assert (timeline.device_kind, timeline.source) == ("cpu", "torch.profiler, CPU")
        assert timeline.device_busy_us is timeline.busy_share is None
        assert {span.lane for span in timeline.spans} == {"host"}
        assert "no device" in timeline.remark
        assert timeline.unprofiled_us > 0
        assert max(span.end_us for span in timeline.spans) <= timeline.step_us + 0.01
        ops = of_kind(timeline, "op")
        assert [op.name for op in ops[:2]] == ["embed", "norm_linear"]
        assert ops[-1].name == "advance"
        assert all(op.num_bytes for op in ops)
        for op, following in pairwise(ops):
            assert op.end_us <= following.start_us + 0.01
        width = max(map(len, ROWS)) + NEW_TOKENS
        assert width - SAMPLES <= timeline.num_columns < width
    assert taken.baseline.recipe == "baseline" != taken.selection.recipe


def test_calls_are_those_that_pytorchs_dispatcher_counts(tiny, taken):
    """Counted where the timeline is taken, in a step of an engine's own."""
    counts = []

    def launch(decode, longest, pool):
        def counted(max_kv):
            with counting("cpu") as counter:
                counter.start()
                decode(max_kv)
                counts.append(counter.stop().launches)

        return counted

    Engine(tiny.decoder, replace(Parts(), launch=launch)).generate(ROWS, Settings(max_new_tokens=NEW_TOKENS))
    assert taken.baseline.num_launches == len(of_kind(taken.baseline, "call")) == counts[-1]


def test_the_tokens_are_those_of_an_engine_that_nobody_watches(tiny):
    probe, how = Probe("cpu"), Settings(max_new_tokens=NEW_TOKENS)
    probe.armed = True
    watched = Engine(tiny.decoder, probe.within(Parts())).generate(ROWS, how)
    assert watched.tokens == Engine(tiny.decoder).generate(ROWS, how).tokens
    assert len(probe.plain_us) == SAMPLES


def test_a_watched_step_is_captured_where_the_recipe_captures_it():
    """Else it would show its ops the numbers of one batch, and a graph would keep them."""
    for parts in (Parts(), replace(Parts(), launch=GraphLaunch())):
        assert Probe("cpu").within(parts).is_captured is parts.is_captured


def test_stop_ends_it(tiny):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        timelines(tiny, ROWS, cancel=stop)


def test_a_stop_in_mid_step_leaves_no_profiler_behind(tiny):
    class Late:
        """Set once the profiler watches."""

        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > most

    most = 10_000
    counter = Late()
    step_timeline(tiny, ROWS, "", cancel=counter)
    most = counter.asked - 1
    with pytest.raises(Cancelled):
        step_timeline(tiny, ROWS, "", cancel=Late())
    step_timeline(tiny, ROWS, "")


def test_prompts_that_leave_no_room_are_refused(tiny):
    with pytest.raises(PromptError, match="context of 128 tokens"):
        step_timeline(tiny, [[1] * 125])


def test_another_profiler_is_named(tiny):
    from torch.profiler import ProfilerActivity, profile

    other = profile(activities=[ProfilerActivity.CPU])
    with other, pytest.raises(MonitorError, match="End the other profile"):
        step_timeline(tiny, ROWS, "")
    assert other.events(), "it goes on"


# Read from a GPU's trace.


def test_bytes_go_to_ops_and_to_kernels_that_are_alone():
    spans = read_steps(eager(1).content())[0].spans
    ops = [span.op for span in spans if span.kind == "op"]
    calls = [Call("torch", None, 0), *(Call(op, None, 100 + place) for place, op in enumerate(ops))]
    found = with_bytes(spans, calls)
    assert [span.num_bytes for span in found if span.kind == "op"] == [100, 101, 102, 103]
    assert {span.num_bytes for span in found if span.kind in ("gemm", "torch kernel")} == {None}, "several to an op"
    assert [span.num_bytes for span in found if span.kind == "own kernel"] == [103]
    assert with_bytes(spans, calls[:-1]) == spans, "other ops than were foreseen: nothing is known"


def test_a_graphs_kernels_are_told_apart_by_their_order():
    spans = read_steps(graphed(1).content())[0].spans
    calls = (Call("norm_linear", 1, 700), Call("attention", 2, 900))
    kernels = [span for span in with_bytes(spans, calls) if span.lane == "device"]
    assert [(k.op, k.num_bytes) for k in kernels] == [("norm_linear", 700), ("attention", None), ("attention", None)]
    assert with_bytes(spans, calls[:1]) == spans
    assert with_bytes(spans, (Call("torch", None, 0), *calls)) == spans


def test_too_many_spans_lose_their_last():
    spans = read_steps(eager(2).content())[0].spans
    kept, num_left_out = earliest(spans, 20)
    assert (len(kept), num_left_out) == (20, len(spans) - 20)
    assert max(span.start_us for span in kept) <= sorted(span.start_us for span in spans)[20]
    launched = [(kept[span.launch].start_us, span.start_us) for span in kept if span.launch is not None]
    assert launched == [(spans[s.launch].start_us, s.start_us) for s in spans if s.launch is not None][: len(launched)]
    assert launched
    assert earliest(spans, 10_000) == (spans, 0)


# Kept in a file.


def test_a_file_gives_back_what_was_kept(taken, recorded):
    for each in (taken, recorded):
        text = json.dumps(encode(each))
        again = decode(json.loads(text))
        assert encode(again) == encode(each)
        for one, other in zip(again, each, strict=True):
            assert one.recipe == other.recipe and len(one.spans) == len(other.spans)
            for a, b in zip(one.spans, other.spans, strict=True):
                assert (a.name, a.launch, a.num_bytes, a.op) == (b.name, b.launch, b.num_bytes, b.op)
                assert a.start_us == pytest.approx(b.start_us, abs=0.06)


def test_a_step_of_gpt2_xl_takes_little_room(recorded):
    assert recorded.baseline.num_launches > 1100
    assert len(json.dumps(encode(recorded), separators=(",", ":"))) < 100_000
    assert len(timeline_figure(recorded, 258).to_json()) < 150_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("baseline"), "baseline and selection"),
        (lambda d: d["selection"].update(name=[99] * len(d["selection"]["name"])), "name.0. is 99"),
        (lambda d: d["selection"]["start"].pop(), "start has"),
        (lambda d: d["selection"]["dur"].__setitem__(0, -1), "dur.0. is -1"),
        (lambda d: d["selection"]["start"].__setitem__(0, 10**15), "leads to"),
        (lambda d: d["selection"]["launch"].__setitem__(1, 5), "launch.1. is 5"),
        (lambda d: d["baseline"]["launch"].__setitem__(-1, 1), "which is no launch"),
        (lambda d: d["selection"].update(step_us=-1.0), "step_us is -1"),
        (lambda d: d["selection"].update(unprofiled_us=0.0), "unprofiled_us is 0"),
        (lambda d: d["selection"].update(num_launches=-3), "num_launches is -3"),
        (lambda d: d["selection"].update(device_kind="tpu"), "device_kind"),
        (lambda d: d["selection"]["names"][0].update(lane="<b>"), "lane is '<b>'"),
        (lambda d: d["selection"]["names"][0].update(kind="x"), "kind is 'x', but it must be one of phase, op"),
        (lambda d: d["selection"]["names"][0].update(full="x" * 5000), "full is 'x+\\.\\.\\., but it must be str of"),
        (lambda d: d["selection"]["names"][0].update(num_bytes=-1), "num_bytes is -1"),
        (lambda d: d["selection"].update(remark="x" * 5000), "remark is 'x+\\.\\.\\., but"),
        (lambda d: d["selection"].update(dur=[0] * 5001), "dur is .*, but it must be array of length <= 5000"),
        (lambda d: d["selection"].update(recipe=7), "recipe"),
        (lambda d: d.update(selection=[]), "selection"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_with_the_place(recorded, change, words):
    data = json.loads(json.dumps(encode(recorded)))
    change(data)
    with pytest.raises(ResultError, match=words):
        decode(data)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.write_text('{"timeline": "\\ud800"}'), "half of a surrogate pair"),
        (lambda path: path.write_text("{}"), "not a result of EET Lab"),
    ],
    ids=["a pipe that nobody writes into", "text that cannot be encoded", "no result"],
)
def test_timelines_are_read_as_carefully_as_results(tmp_path, make, words):
    path = tmp_path / "result.json"
    make(path)
    with pytest.raises(ResultError, match=words):
        read_timelines(path)


# For Perfetto.


def test_a_trace_file_is_in_chromes_format(recorded, tmp_path):
    content = json.loads(write_trace(tmp_path / "trace.json", recorded).read_text())
    events = content["traceEvents"]
    assert content["displayTimeUnit"] == "ms"
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert [named["process_name", pid, 0]["name"] for pid in (1, 2)] == ["baseline", "pre_padding,cuda_graphs"]
    assert [named["thread_name", 1, tid]["name"] for tid in (1, 2)] == ["host", "device"]
    threads = {(pid, tid) for name, pid, tid in named if name == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(len(timeline.spans) for timeline in recorded)
    for e in spans:
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} == set(e)
        assert e["ts"] >= 0 and e["dur"] >= 0 and (e["pid"], e["tid"]) in threads
    places = {(e["pid"], e["tid"], e["ts"]) for e in spans}
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys() and len(starts) == recorded.baseline.num_launches + 1
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"] and ends[number]["bp"] == "e"
        for arrow in (start, ends[number]):
            assert (arrow["pid"], arrow["tid"], arrow["ts"]) in places
    assert {e["ph"] for e in events} == {"M", "X", "s", "f"}


def test_a_trace_that_cannot_be_written_says_so(taken, tmp_path):
    with pytest.raises(ResultError, match="cannot be written"):
        write_trace(tmp_path / "none" / "trace.json", taken)


# Drawn.


def test_the_headline_says_the_point(recorded, taken):
    baseline, selection = map(headline, recorded)
    busy = 100 * recorded.baseline.device_busy_us / 10_200
    assert baseline == f"<b>baseline</b>: 1,130 launches, device busy {busy:.0f} % of 10.2 ms"
    assert "1 launch, device busy 97 % of 1.48 ms" in selection
    assert f"{taken.baseline.num_launches} calls of PyTorch in" in headline(taken.baseline)


def test_both_are_on_one_clock_or_each_has_its_width_and_lanes_do_not_zoom(recorded):
    fig, own = timeline_figure(recorded, 258), timeline_figure(recorded, 258, own_width=True)
    longest, ends = max(each.step_us for each in recorded) / 1e3, [each.step_us / 1e3 for each in recorded]
    assert fig.layout.xaxis.range == fig.layout.xaxis2.range and fig.layout.xaxis2.matches == "x"
    assert fig.layout.xaxis.range[1] == pytest.approx(longest)
    assert [axis.range[1] for axis in (own.layout.xaxis, own.layout.xaxis2)] == pytest.approx(ends)
    assert own.layout.xaxis2.matches is None and "whole width" in own.layout.xaxis2.title.text
    assert "under the profiler" in fig.layout.xaxis2.title.text, "which took longer than the milliseconds above it"
    assert fig.layout.yaxis.fixedrange and fig.layout.yaxis2.fixedrange
    assert list(fig.layout.yaxis.ticktext) == ["host", "device", "busy"]
    bars = [trace for trace in fig.data if trace.type == "bar" and trace.hoverinfo != "skip"]
    assert sum(len(bar.x) for bar in bars) == sum(len(each.spans) for each in recorded)
    assert len(fig.data) < 60
    legend = [trace.name for trace in fig.data if trace.showlegend]
    assert len(legend) == len(set(legend)) and {"launch", "our kernel", "cuBLAS kernel"} <= set(legend)


def test_a_title_and_its_axis_are_of_one_time_in_a_unit_that_reads_well(recorded):
    """A headline of 10.2 ms above an axis to 13,000 µs is two times, unless it says so."""
    slow = timeline_figure(recorded, 258)
    assert slow.layout.xaxis2.title.text.startswith("ms under the profiler")
    heads = [note.text.partition("<br>")[2] for note in slow.layout.annotations]
    assert heads == [f"drawn as it ran under the profiler, in {ms_words(each.step_us / 1e3)}" for each in recorded]
    even = Timelines(*(replace(each, unprofiled_us=each.step_us) for each in recorded))
    assert not any("<br>" in note.text for note in timeline_figure(even, 258).layout.annotations)
    short = timeline_figure(Timelines(recorded.selection, recorded.selection), 258)
    assert short.layout.xaxis2.title.text.startswith("µs") and short.layout.xaxis.range[1] == 1453
    for fig, scale in ((slow, 1e3), (short, 1)):
        spans = [bar for bar in fig.data if bar.type == "bar" and bar.hoverinfo != "skip"]
        took = [(us, scale * x) for bar in spans for us, x in zip(bar.customdata, bar.x, strict=True)]
        assert all(us == pytest.approx(drawn) for us, drawn in took), "a hover is in microseconds"


def test_without_a_device_there_is_a_lane_for_the_host_alone(taken):
    assert list(timeline_figure(taken, 258).layout.yaxis.ticktext) == ["host"]
    assert "CPU" in short_caption(taken)
    assert "no device" in caption(taken)


def test_the_caption_says_where_it_was_taken_and_what_could_not_be_seen(recorded):
    baseline, selection = recorded
    said = caption(Timelines(replace(baseline, origin="<b>here", remark="2 kernels"), selection))
    assert f"While watched: {ms_words(baseline.step_us / 1e3)} and {ms_words(selection.step_us / 1e3)}." in said
    assert "in Latency. Taken on <b>here. 2 kernels" in said and "One step of each, and no measure of the" in said
    assert said.endswith(f"Taken on {selection.origin}. {selection.remark}".strip())
    unslowed = Timelines(*(replace(each, unprofiled_us=each.step_us) for each in recorded))
    assert "watched" not in short_caption(unslowed)


def test_names_from_a_file_are_text(recorded):
    evil = replace(recorded.baseline.spans[-1], name="<b>x</b>%{x}", full='<a href="javascript:1">', op="<i>")
    timeline = replace(recorded.baseline, spans=(*recorded.baseline.spans[:-1], evil), recipe="<u>", source="<s>")
    text = timeline_figure(Timelines(timeline, timeline), 258).to_json()
    for tag in ("<b>x", "<a href", "<i>", "<u>", "<s>", "%{x}"):
        assert tag not in text and json.dumps(tag)[1:-1].replace("<", "\\u003c") not in text


def test_busy_shares_count_overlaps_once(recorded):
    selection = recorded.selection
    shares = busy_shares(selection, 50)
    assert max(shares) <= 1
    assert sum(shares) * selection.step_us / 50 == pytest.approx(selection.device_busy_us)
    assert covered_us(span for span in selection.spans if span.lane == "device") == selection.device_busy_us
