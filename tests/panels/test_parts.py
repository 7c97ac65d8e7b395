"""The small parts: charts, streams, clocks, state."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from eet_lab.bench.progress import Clock, Tally
from eet_lab.errors import PromptError, RecipeError
from eet_lab.models.transcript import Transcript
from eet_lab.panels import Workbench, theme
from eet_lab.panels.pictures import token_matrix
from eet_lab.panels.prompts_editor import PromptsEditor
from eet_lab.panels.refresh import Refresh
from eet_lab.panels.state import State, problem
from eet_lab.panels.strip_chart import StripChart
from eet_lab.panels.token_stream import TokenStream
from eet_lab.technique import Recipe

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


def test_bytes_that_never_become_a_character_are_shown_in_the_end() -> None:
    transcript = Transcript(of_bytes)
    shown = [transcript.add([0xC3]) for _ in range(9)]
    assert "".join(shown) == "\ufffd" * 6
    assert transcript.finish() == "\ufffd" * 3
    assert transcript.finish() == ""


def test_the_stream_sends_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, sent = TokenStream(), []
    monkeypatch.setattr(stream, "send", lambda content, buffers=None: sent.append(content))
    stream.begin(["p", "q"], lambda ids: "".join(f"[{i}]" for i in ids))
    stream.push([(0, 1), (1, 2), (0, 3)])
    stream.push([])
    assert sent[1:] == [{"kind": "append", "news": [[0, "[1][3]", 2], [1, "[2]", 1]]}]
    stream.snapshot_now()
    assert json.loads(stream.snapshot)["texts"] == ["[1][3]", "[2]"]


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


def test_a_long_prompt_gets_more_lines() -> None:
    editor = PromptsEditor(lambda *command: None)
    prompts = ["", "short", "w " * 70, "one\ntwo\nthree\nfour"]
    editor.update(prompts, None, 8, None)
    assert [row.text.rows for row in editor.rows] == [1, 1, 2, 3]
    editor.update([*prompts[:1], "w " * 200, *prompts[2:]], None, 8, None)
    assert editor.rows[1].text.rows == 3


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
    with pytest.raises(RecipeError):
        state.turn("memory_reuse", "planner", "wurst")
    assert str(state.recipe()) == "memory_reuse:planner=first_fit"
    assert "No model" in problem(state, None, None)


def test_a_knob_switches_off_what_it_leaves_no_room_for() -> None:
    state = State(device="cpu")
    state.choose(Recipe.parse(PACKED))
    state.turn("pre_padding", "read", "shortest")
    assert state.recipe().names == ("pre_padding", "mask_removal")
    assert "choose read=whole" in state.blocked("packed_prefill")


def test_a_packed_token_matrix_has_no_pads() -> None:
    padded, packed = (token_matrix([[1, 2, 3], [4]], words, num_new=1) for words in ("pre_padding", PACKED))
    assert "2 pads" in padded.layout.title.text and "0 pads" in packed.layout.title.text
    assert [list(row) for row in padded.data[0].z] == [[2, 2, 2, 4], [1, 1, 2, 4]]
    assert [list(row) for row in packed.data[0].z] == [[2, 2, 2, 4], [0, 0, 2, 4]]


def test_errors_made_for_users_are_shown_without_a_traceback() -> None:
    card = theme.error_card(PromptError("temperature is <nan>, but it must be 0."))
    assert "Prompt error" in card
    assert "&lt;nan&gt;" in card
    assert "Traceback" not in card


def test_a_page_that_was_opening_is_told_once_more(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = [0.0], []
    refresh = Refresh(bench.desk.box, lambda: now[0])
    monkeypatch.setattr("ipywidgets.Widget.send_state", lambda self, key=None: sent.append((self, key)))
    refresh.turn(changed=True, busy=False)
    assert sent == []
    now[0] = 10.0
    refresh.turn(changed=False, busy=True)
    assert sent == [], "runs are left alone"
    refresh.turn(changed=False, busy=False)
    assert (bench.desk.actions.status, {"value"}) in sent
    assert any(widget is bench.desk.actions.compare and "disabled" in names for widget, names in sent)
    assert not any(widget is bench.desk.prompts.rows[0].text and "value" in names for widget, names in sent)
    sent.clear()
    refresh.turn(changed=False, busy=False)
    assert sent == [], "once"


def test_callbacks_only_fill_the_inbox(bench: Workbench) -> None:
    """They run on whatever thread there is: with nobody turning the desk, nothing moves."""
    before, prompts = bench.desk.actions.status.value, bench.desk.state.prompts
    for button in (bench.desk.actions.run, bench.desk.prompts.add, bench.desk.prompts.rows[0].remove):
        button.click()
    bench.desk.toggles["pre_padding"].switch.value = False
    bench.desk.generating.stop.value = True
    assert not bench.desk.busy
    assert bench.desk.actions.status.value == before
    assert bench.desk.state.prompts == prompts
    assert bench.desk.state.is_on("pre_padding")
    assert not bench.desk.state.stop_at_eos
    assert bench.desk._inbox.qsize() == 5
