"""The small parts: charts, streams, clocks, state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import unescape
from typing import Any

import anywidget
import ipywidgets as W
import numpy as np
import pytest

from eet_lab.bench.timing import Tally
from eet_lab.errors import PromptError, TrainingError, as_called
from eet_lab.figures import theme
from eet_lab.figures.batch_steps import NEW, PAD, READ, UNUSED, token_matrix
from eet_lab.figures.live import StripChart, TokenStream
from eet_lab.figures.script import all_widgets
from eet_lab.models.transcript import Transcript
from eet_lab.progress import Clock
from eet_lab.technique import Recipe
from eet_lab.workbench import Workbench
from eet_lab.workbench.choices import Choices, State
from eet_lab.workbench.page import Page
from eet_lab.workbench.views.chosen import techniques_state

PACKED = "pre_padding,mask_removal,packed_prefill"


def of_bytes(ids: Any) -> str:
    return bytes(ids).decode(errors="replace")


def test_text_waits_for_the_whole_character() -> None:
    transcript = Transcript(of_bytes)
    assert [transcript.add([each]) for each in "aé<".encode()] == ["a", "", "é", "<"]


def test_a_long_batch_that_ends_inside_a_character_breaks_nothing() -> None:
    text = "12345678 é €uro 😀"
    for size in range(1, 12):
        transcript, ids = Transcript(of_bytes), list(text.encode())
        pieces = [transcript.add(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join(pieces) == text
    assert Transcript(of_bytes).add("12345678é".encode()[:-1]) == "12345678", "only the character waits"


def test_a_space_between_two_pieces_is_kept() -> None:
    """Llama 2's tokenizer drops the space in front of the first word that it decodes."""
    words = ["\u2581a", "\u2581b", "c", "\u2581\u2581d"]
    transcript = Transcript(lambda ids: "".join(words[i] for i in ids).replace("\u2581", " ").removeprefix(" "))
    assert [transcript.add([each]) for each in range(4)] == ["a", " b", "c", "  d"]


def test_bytes_that_never_become_a_character_are_shown_in_the_end() -> None:
    transcript = Transcript(of_bytes)
    shown = [transcript.add([0xC3]) for _ in range(9)]
    assert "".join(shown) == "\ufffd" * 6
    assert transcript.finish() == "\ufffd" * 3
    assert transcript.finish() == ""


def test_the_stream_sends_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, sent = TokenStream(), []
    monkeypatch.setattr(stream, "send", lambda content, buffers=None: sent.append(content))
    stream.begin(["p", "q"], lambda ids: "".join(f"[{i}]" for i in ids), by="all")
    stream.push([(0, 1), (1, 2), (0, 3)])
    stream.push([])
    assert sent[1:] == [{"kind": "append", "news": [[0, "[1][3]", 2], [1, "[2]", 1]]}]
    stream.snapshot_now()
    assert json.loads(stream.snapshot)["texts"] == ["[1][3]", "[2]"]
    assert sent[0]["by"] == json.loads(stream.snapshot)["by"] == "all"


def test_a_chart_sends_only_new_points_and_keeps_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    chart, sent = StripChart(series=[{"name": "a", "color": "red"}]), []
    monkeypatch.setattr(chart, "send", lambda content, buffers=None: sent.append(len(buffers[0]) if buffers else 0))
    chart.push([(0, 0.0, 1.0), (0, 1.0, 2.0)])
    chart.push([])
    chart.push([(0, 2.0, 3.0)])
    assert sent == [24, 12]
    assert chart.snapshot == b""
    chart.snapshot_now()
    assert np.frombuffer(chart.snapshot, "<f4").reshape(-1, 3)[:, 2].tolist() == [1, 2, 3]


def test_a_chart_keeps_a_whole_window_of_every_series() -> None:
    chart = StripChart(window=60.0)
    chart.series = [{"name": name, "color": "red"} for name in "abcd"]
    chart.push([(index, tick / 10, 1.0) for tick in range(700) for index in range(4)])
    for index in range(4):
        ticks = [x for series, x, _ in chart.points if series == index]
        assert (ticks[0], ticks[-1]) == (pytest.approx(10.0), pytest.approx(69.9))
        assert ticks == sorted(ticks)


def test_the_clock_counts_phases_and_steps_and_says_what_is_left() -> None:
    now = [0.0]
    clock = Clock(lambda: now[0])
    clock.progress(0, 4)
    assert clock.left() == ""
    now[0] = 10.0
    clock.progress(1, 4)
    assert clock.share == 0.25
    assert clock.left() == "about 30 s left"
    now[0] = 14.0
    assert clock.left() == "about 26 s left", "it falls while nothing is told"
    now[0] = 35.0
    assert clock.left() == "about 20 s left", "a unit that is overdue does not eat into the others"
    clock.step(32, 64)
    assert clock.share == 0.375


def test_building_kernels_is_a_count_of_its_own() -> None:
    now = [0.0]
    clock = Clock(lambda: now[0])
    tally = Tally(12, lambda done, total, text: clock.progress(done, total))
    tally.say("warming up")
    tally.building(0, 9, "one.cu")
    now[0] = 90.0
    tally.building(9, 9, "nine.cu")
    tally.finish(2)
    tally.say("timing")
    assert clock.share == pytest.approx(2 / 12)
    assert clock.left() == ""
    now[0] = 91.0
    tally.finish()
    tally.say("timing")
    assert clock.left() == "about 9 s left", "what the build took is no unit's pace"


def test_a_tally_leaves_the_time_left_to_whoever_shows_it() -> None:
    said: list[str] = []
    tally = Tally(3, lambda done, total, text: said.append(text))
    for _ in range(3):
        tally.say("timing")
        tally.finish()
    assert said == ["timing"] * 3


def test_state_explains_conflicts_and_requirements() -> None:
    state = State(device="cpu")
    state.choose(Recipe.parse("memory_reuse"))
    assert state.blocked("mask_removal") is None
    state.turn("memory_reuse", "planner", "first_fit")
    state.turn("memory_reuse", "planner", "wurst")
    assert str(state.recipe()) == "memory_reuse:planner=first_fit"
    assert (problem := Choices(state).problem(None)) and "No model" in problem.text


def test_a_knob_switches_off_what_it_leaves_no_room_for() -> None:
    state = State(device="cpu")
    state.choose(Recipe.parse(PACKED))
    state.turn("pre_padding", "read", "shortest")
    assert state.recipe().names == ("pre_padding", "mask_removal")
    assert "Choose read=whole" in state.blocked("packed_prefill")


def test_a_packed_token_matrix_has_no_pads() -> None:
    padded, packed = (token_matrix([[1, 2, 3], [4]], words, num_new=1) for words in ("pre_padding", PACKED))
    assert padded.kinds == [[READ, READ, READ, NEW], [PAD, PAD, READ, NEW]]
    assert packed.kinds == [[READ, READ, READ, NEW], [READ, NEW, UNUSED, UNUSED]]
    assert (padded.ends, packed.ends) == ([3, 3], [3, 1])


def test_errors_made_for_users_are_shown_without_a_traceback() -> None:
    card = theme.error_card(PromptError("temperature is <nan>, but it must be 0."))
    assert "Prompt error" in card
    assert "&lt;nan&gt;" in card
    assert "Traceback" not in card


def test_a_page_that_was_opening_is_told_once_more(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = [1000.0], []
    monkeypatch.setattr("eet_lab.workbench.controller.time.monotonic", lambda: now[0])
    monkeypatch.setattr(bench.controller.page, "send_again", lambda: sent.append(now[0]))
    bench.controller._send_again(changed=True)
    assert sent == []
    now[0] = 1010.0
    bench.controller.busy = True
    bench.controller._send_again(changed=False)
    assert sent == [], "runs are left alone"
    bench.controller.busy = False
    for _ in range(2):
        bench.controller._send_again(changed=False)
    assert sent == [1010.0], "once"


def test_callbacks_only_fill_the_inbox(bench: Workbench) -> None:
    """They run on whatever thread there is: with nobody turning the controller, nothing moves."""
    controller = bench.controller
    before, prompts = dict(controller.page.bar.state), controller.state.prompts
    messages: list[dict[str, Any]] = [
        {"command": "run"},
        {"command": "add_prompts", "lines": [""]},
        {"command": "toggle", "name": "pre_padding", "on": False},
        {"command": "setting", "name": "stop_at_eos", "value": True},
    ]
    for message in messages:
        controller.page.bar._handle_custom_msg(message, [])
    assert not controller.busy
    assert controller.page.bar.state == before
    assert controller.state.prompts == prompts
    assert controller.state.is_on("pre_padding")
    assert not controller.state.stop_at_eos
    assert controller._inbox.qsize() == len(messages)


@pytest.fixture
def made() -> Iterator[list[W.Widget]]:
    """Every widget that is made in the test."""
    widgets: list[W.Widget] = []
    W.Widget.on_widget_constructed(widgets.append)
    yield widgets
    W.Widget.on_widget_constructed(None)


def test_a_pages_state_holds_every_script_once_and_all_of_it_is_closed(made: list[W.Widget]) -> None:
    page = Page(lambda command: None)
    drawn = [widget for widget in made if isinstance(widget, anywidget.AnyWidget)]
    states = [widget.get_state() for widget in drawn]
    scripts = [str(state[key]) for state in states for key in ("_esm", "source") if len(state.get(key, "")) > 1200]
    assert len(drawn) > 10 and len(scripts) == len(set(scripts)) > 5
    for widget in all_widgets(page.box):
        widget.close()
    assert [widget for widget in drawn if widget.comm is not None] == []


def test_the_label_all_says_what_it_leaves_out_and_needs_name_the_nearest() -> None:
    state = State(device="cpu")
    shown = techniques_state(state, "pre_padding", {}, "", "all - mask removal", read_only=False)
    assert "but not: Continuous batching, Prefix caching, Int8 weights" in shown["recipe_tip"]
    needs = {row["name"]: row["needs"] for row in shown["list"]}
    assert needs["continuous_batching"] == "needs Memory reuse, Packed prefill"
    lacks = [row["name"] for row in shown["list"] if row["lacks"]]
    assert lacks == ["packed_prefill", "continuous_batching", "prefix_caching"], "that could have it on this device"
    assert techniques_state(state, "", {}, "", "pre-padding", read_only=False)["recipe_tip"] == "pre-padding"


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("cuda", 0)])
def test_a_kept_run_tells_the_reasons_of_its_own_device(
    device: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "CUDA kernels need an NVIDIA GPU."
    monkeypatch.setattr(
        "eet_lab.workbench.choices.obstacle", lambda technique, *_: technique.name == "cuda_graphs" and why
    )
    shown = techniques_state(State(device=device), "cuda_graphs", {}, "", "", read_only=True)
    told = [row["name"] for row in shown["list"] if row["blocked"]]
    assert told == ["cuda_graphs"] * count, "what it needs of other techniques is no matter of the device"
    assert shown["card"]["why"] == (why if count else None)


def test_a_reason_is_told_in_short_and_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "it needs compute capability 9.0 (Hopper) or newer; this GPU has 8.0."
    monkeypatch.setattr(State, "blocked", lambda state, name: why)
    row, *_ = techniques_state(State(device="cpu"), "", {}, "", "", read_only=False)["list"]
    assert row["blocked"] == why and row["blocked_short"] == "it needs compute capability 9.0 (Hopper) or newer"
    why = "CUDA kernels need an NVIDIA GPU; the device is 'cpu'."
    row, *_ = techniques_state(State(device="cpu"), "", {}, "", "", read_only=False)["list"]
    assert row["blocked"] == why and row["blocked_short"] == "needs an NVIDIA GPU", "in one line"


def test_an_error_calls_fields_as_the_page_does() -> None:
    names = {"lr": "learning rate", "max_steps": "steps"}
    for said, shown in [
        ("lr is -1, or 1 to 4 (max_steps).", "learning rate is -1, or 1 to 4 (steps)."),
        (
            "Use a smaller lr or max_grad_norm, or a lower lr.",
            "Use a smaller learning rate or max_grad_norm, or a lower",
        ),
        (
            "There is no file /a/lr, './lr' or lr.txt: give --lr.",
            "There is no file /a/lr, './lr' or lr.txt: give --lr.",
        ),
    ]:
        assert shown in unescape(theme.error_card(TrainingError(said), names))
    assert as_called("lr is -1: a smaller lr.", names) == "learning rate is -1: a smaller lr."
    assert as_called("lr is -1", {}) == "lr is -1"
