"""Running and stopping: what the controller does with jobs, without a kernel."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from eet_lab.bench import Comparison, Ladder, Run
from eet_lab.bench.timeline_steps import timelines
from eet_lab.engine.settings import Settings
from eet_lab.errors import EETError
from eet_lab.figures.outputs import PLOTLY
from eet_lab.technique import Recipe
from eet_lab.workbench import Workbench, jobs
from eet_lab.workbench.engine_thread import Feed, Named, Progress
from eet_lab.workbench.sheet import Sheet, SheetContent
from workbench.driving import ask, do, enabled, errors, shown, status, turn, turn_until

ALL = "pre_padding,mask_removal,memory_reuse,packed_prefill"


def tabs(bench: Workbench) -> list[str]:
    return [tab["name"] for tab in shown(bench, "answer")["tabs"]]


def tiles(bench: Workbench) -> dict[str, dict[str, Any]]:
    return {tile["label"]: tile for tile in shown(bench, "answer")["tiles"]}


def drawn(bench: Workbench) -> list[Any]:
    """The figures that stand on the stage, as plotly's JSON."""
    return [output["data"][PLOTLY] for output in bench.controller.page.figure.outputs if PLOTLY in output["data"]]


def test_run_streams_text_and_latency(bench: Workbench) -> None:
    do(bench, ask.run())
    live = bench.controller.page.live
    assert live.stream.counts == [8, 8] and live.stream.by == live.latency.series[1]["name"] == "all"
    assert len(live.latency.points) == 8
    assert isinstance(bench.result, Run)
    assert bench.result.texts == tuple(text.strip() for text in live.stream.texts)
    assert status(bench).startswith("run done")
    assert len(tiles(bench)) == 4
    assert tiles(bench)["Time per token"]["change"]["text"] == "one run, no interval"


def test_a_text_ends_before_the_token_that_ends_it(bench: Workbench) -> None:
    """In the panes as in the result; the token itself is there."""
    model, prompts = bench.controller.model, list(bench.controller.state.prompts)

    def run(**settings: Any) -> Run:
        job = jobs.Job(model, prompts, Recipe(), Settings(max_new_tokens=8, **settings))
        return job.run(Feed(SimpleQueue()), threading.Event())

    end = run().measurement.tokens[0][-1]
    stopped = run(stop=(end,))
    tokens = stopped.measurement.tokens[0]
    assert tokens[-1] == end
    assert stopped.texts[0] == model.decode(tokens[:-1])
    assert jobs.decoder(model.tokenizer, (end,))(tokens) == jobs.decoder(model.tokenizer)(tokens[:-1])


@pytest.mark.usefixtures("few_rounds")
def test_compare_measures_with_the_view_at_rest(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[bool] = []
    device = bench.controller.device
    inner = device.rest
    monkeypatch.setattr(device, "rest", lambda resting: (rests.append(resting), inner(resting)))
    do(bench, ask.compare())
    assert errors(bench) == ""
    assert isinstance(bench.result, Comparison)
    assert rests[0] is True
    assert rests[-1] is False
    assert False in rests[1:-1], "the watched runs are not at rest"
    assert {series for series, _, _ in bench.controller.page.live.latency.points} == {0, 1}
    assert set(bench.controller.watching.monitor) == {"baseline", "selection"}


def test_the_answer_is_told_alike_everywhere(bench: Workbench) -> None:
    do(bench, ask.setting("repeats", 6), ask.compare())
    assert list(tiles(bench)) == ["Time to first token", "Time per token", "Peak memory", "Same output?"]
    change = bench.result.changes["ttft_ms"]
    assert tiles(bench)["Time to first token"]["change"]["text"] == change.words("ttft_ms")
    parts = [part["text"] for part in shown(bench, "bar")["headline"]["parts"]]
    assert parts[0].startswith("first token") and ("cannot tell apart" in parts[0]) == (
        change.verdict == "cannot tell apart"
    )
    assert "same" in parts[-1]
    do(bench, ask.tab("table"))
    [table] = shown(bench, "answer")["tables"]
    cells = {line[0]: line[-1] for line in table["rows"]}
    assert cells["time to first token"] == change.words("ttft_ms")
    assert tiles(bench)["Same output?"]["value"] == "16 / 16"


def test_what_was_measured_so_far_stands_while_more_is(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    inner = bench.controller.results.show

    def look(busy: bool, device: str) -> None:
        inner(busy, device)
        state = shown(bench, "answer")
        if state["mode"] == "running" and state["tiles"]:
            seen.append((state["mode"], len(state["tiles"])))

    monkeypatch.setattr(bench.controller.results, "show", look)
    do(bench, ask.setting("max_new_tokens", 20), ask.setting("repeats", 4), ask.compare())
    assert seen and set(seen) == {("running", 4)}
    assert shown(bench, "answer")["mode"] == "result"


def test_each_result_opens_on_its_own_tabs_which_all_show_something(bench: Workbench) -> None:
    def look_at_all() -> None:
        for name in tabs(bench):
            do(bench, ask.tab(name))
            state = shown(bench, "answer")
            assert errors(bench) == "", name
            assert drawn(bench) or state["tables"] or state["words"] or state["note"], name

    do(bench, ask.setting("repeats", 1), ask.compare())
    look_at_all()
    do(bench, ask.tab("tokens"))
    assert shown(bench, "answer")["tab"] == "tokens"
    do(bench, ask.ladder())
    assert errors(bench) == "" and isinstance(bench.result, Ladder)
    assert shown(bench, "answer")["tab"] == "waterfall" and len(drawn(bench)) == 1
    techniques = shown(bench, "techniques")
    assert techniques["effects_of"]
    assert all(row["effect"] for row in techniques["list"] if row["on"])
    live = bench.controller.page.live
    assert "not watched" in live.latency.note and "not watched" in live.stream.snapshot and not live.stream.prompts
    look_at_all()
    do(bench, ask.tab("memory"))
    assert shown(bench, "answer")["tab"] == "memory" and drawn(bench)
    do(bench, ask.run(), ask.tab("left_out"))
    assert errors(bench) == "", "a tab that was clicked before it went away"
    assert shown(bench, "answer")["tab"] in tabs(bench)
    assert live.latency.note == "" and live.stream.prompts and "not watched" not in live.stream.snapshot
    look_at_all()
    do(bench, ask.tab("table"))
    assert drawn(bench) == [], "a figure that is not looked at is not kept"


def test_a_timeline_is_of_what_was_compared_and_not_of_what_is_chosen_now(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def spy(*given: Any, **options: Any) -> Any:
        asked[:] = [given, options]
        return timelines(*given, **options)

    monkeypatch.setattr(jobs, "timelines", spy)
    do(bench, ask.take_timeline())
    assert "press Compare" in errors(bench)
    do(bench, ask.setting("repeats", 1), ask.compare())
    kept = next(row["id"] for row in shown(bench, "runs")["rows"] if row["shown"])
    do(bench, ask.toggle("mask_removal", False), ask.edit_prompt(0, "9 " * 9), ask.setting("max_new_tokens", 0))
    do(bench, ask.pin("recorded:h200-compare-gpt2-xl", True), ask.take_timeline())
    assert errors(bench) == ""
    [(_, rows, recipe), options] = asked
    assert (rows, str(recipe), str(options["baseline"])) == ([[5, 6, 7], [8, 9, 10, 11, 12, 13]], ALL, "baseline")
    assert options["max_new_tokens"] == 8
    assert "timeline" in bench.controller.results.history.open(kept)[1]
    do(bench, ask.tab("timeline"))
    assert drawn(bench)
    do(bench, ask.pick_dtype("bfloat16"), ask.take_timeline())
    assert "float32" in errors(bench) and "bfloat16" in errors(bench), "both are told"


def test_a_pinned_run_that_cannot_run_here_keeps_nothing_else_from_running(bench: Workbench) -> None:
    do(bench, ask.setting("repeats", 1), ask.setting("max_new_tokens", 2), ask.toggle("mask_removal", False))
    do(bench, ask.pin("recorded:h200-compare-gpt2-xl", True))
    for command, kind in ((ask.run(), Run), (ask.ladder(), Ladder)):
        do(bench, command)
        assert errors(bench) == "" and isinstance(bench.result, kind)
    first, second = [row["id"] for row in shown(bench, "runs")["rows"] if row["writable"]]
    do(bench, ask.tick(first, True), ask.tick(second, True), ask.measure_ticked())
    assert errors(bench) == "" and isinstance(bench.result, Comparison)
    do(bench, ask.compare())
    assert "cannot run here" in errors(bench)


def test_a_pin_lets_the_baseline_be_compared_but_no_empty_ladder_be_climbed(bench: Workbench) -> None:
    do(bench, ask.setting("repeats", 1), ask.run())
    kept = next(row["id"] for row in shown(bench, "runs")["rows"] if row["shown"])
    do(
        bench,
        ask.pin(kept, True),
        *(ask.toggle(name, False) for name in ("pre_padding", "mask_removal", "memory_reuse")),
    )
    assert enabled(bench) == {"run": True, "compare": True, "ladder": False, "stop": False}
    assert "No technique is on" in shown(bench, "bar")["actions"]["ladder"]["tip"]
    do(bench, ask.ladder())
    assert "No technique is on" in errors(bench)


def test_a_figure_is_drawn_anew_for_another_result_and_after_a_race(
    bench: Workbench, comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet, figure = Sheet(bench.controller.page, bench.controller.results.memory), bench.controller.page.figure
    shows: list[int] = []
    monkeypatch.setattr(figure, "show", lambda *figures: shows.append(len(figures)))
    sheet.open("latency")
    first = replace(comparison)
    before = id(first)
    sheet.show(SheetContent(first))
    sheet.show(SheetContent(first))
    assert shows == [1]
    del first
    for _ in range(100):  # until one lies where the first one lay, if nothing keeps that
        other = replace(comparison)
        if id(other) == before:
            break
    sheet.show(SheetContent(other))
    assert shows == [1, 1]
    sheet.open("race")
    sheet.show(SheetContent(other, can_race=True))
    sheet.open("latency")
    sheet.show(SheetContent(other, can_race=True))
    assert shows == [1, 1, 1]


def test_a_logarithmic_axis_is_a_click(bench: Workbench, comparison: Comparison) -> None:
    bench.controller.results.finish(comparison, {}, {})
    for tab in ("latency", "tokens"):
        do(bench, ask.tab(tab))
        axes = [drawn(bench)[0]["layout"][name].get("type") for name in ("xaxis", "yaxis")]
        assert shown(bench, "answer")["tools"]["scale"] == {"name": "log", "on": "log" in axes}, "as it is drawn"
    do(bench, ask.tab("memory"))
    assert shown(bench, "answer")["tools"]["scale"] is None
    do(bench, ask.tab("latency"), ask.scale("log", True))
    assert drawn(bench)[0]["layout"]["yaxis"]["type"] == "log"
    do(bench, ask.scale("log", False))
    assert drawn(bench)[0]["layout"]["yaxis"].get("type", "linear") == "linear"


def test_a_turn_ends_even_if_each_command_asks_for_another(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def again(command: Any) -> None:
        asked.append(len(asked))
        if len(asked) < 100:
            bench.controller.put(ask.stop())

    monkeypatch.setattr(bench.controller, "do", again)
    bench.controller.put(ask.stop())
    turn(bench)
    assert asked == [0]


def test_what_goes_on_is_said_in_words_and_in_titles(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = bench.controller.status.clock
    look = lambda *told: (said.append(bench.controller.status.text), type(clock).start(clock))  # noqa: E731
    monkeypatch.setattr(clock, "start", look)
    hear = bench.controller.hear
    monkeypatch.setattr(bench.controller, "hear", lambda e: (hear(e), said.append(bench.controller.status.text)))
    do(bench, ask.pick_dtype("bfloat16"), ask.setting("repeats", 1), ask.ladder())
    assert said[0] == "loading the model GPT2LMHeadModel…" and "preparing the ladder…" in said
    assert any("all - memory reuse" in text for text in said), said
    assert any("pre-padding" in text for text in said), said
    assert not [text for text in said if "_" in text]


def test_the_bar_starts_again_when_kernels_have_been_built(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(self: Any, progress: Any = None, cancel: Any = None) -> None:
        for done in range(4) if progress else ():
            progress(done, 3, "building 3 CUDA sources")

    shares: list[float] = []
    watching = bench.controller.watching
    step = watching.step
    monkeypatch.setattr("eet_lab.workbench.jobs.Engine.prepare", prepare)
    clock = bench.controller.status.clock
    monkeypatch.setattr(watching, "step", lambda event: (step(event), shares.append(clock.share)))
    do(bench, ask.run())
    assert shares == [pytest.approx((i + 1) / 8) for i in range(8)]


def test_stop_ends_a_run_in_half_a_second_and_the_session_goes_on(bench: Workbench) -> None:
    do(bench, ask.setting("max_new_tokens", 120), ask.setting("repeats", 50))

    def seconds_to_stop() -> float:
        bench.controller.put(ask.compare())
        turn_until(bench, lambda: bench.controller.busy and bench.controller.status.clock.share > 0)
        begun = time.monotonic()
        bench.controller.put(ask.stop())
        turn(bench)
        assert "stopping…" in status(bench)
        turn_until(bench, lambda: not bench.controller.busy)
        assert "Compare was stopped after" in status(bench)
        assert errors(bench) == ""
        return time.monotonic() - begun

    assert any(seconds_to_stop() < 0.5 for _ in range(3)), "the best of three: another test may have the cores"
    do(bench, ask.setting("max_new_tokens", 4), ask.run())
    said = status(bench)
    do(bench, ask.stop())
    assert (status(bench), errors(bench)) == (said, ""), "it was pressed as the run ended"
    assert sum(map(len, bench.result.measurement.tokens)) == 8
    latency = bench.controller.page.live.latency
    steps, names = latency.points, [each["name"] for each in latency.series]
    assert len(steps) == 4
    seconds_to_stop()
    assert shown(bench, "bar")["headline"] and shown(bench, "bar")["status"]["kind"] == "warn"
    assert status(bench).endswith("s. The result below is the previous one."), "it stands beside that headline"
    bench.controller.put(ask.ladder())
    turn_until(bench, lambda: latency.note)
    do(bench, ask.stop())
    assert status(bench).startswith("Ladder was stopped") and isinstance(bench.result, Run)
    assert (latency.points, [each["name"] for each in latency.series], latency.note) == (steps, names, "")


def test_with_nothing_switched_on_there_is_nothing_to_compare(bench: Workbench) -> None:
    for name in ("pre_padding", "mask_removal", "memory_reuse"):
        do(bench, ask.toggle(name, False))
    assert enabled(bench) == {"run": True, "compare": False, "ladder": False, "stop": False}
    assert "No technique is on" in status(bench)
    do(bench, ask.toggle("memory_reuse", True))
    assert enabled(bench)["compare"]


def test_actions_are_never_dropped_without_a_word(bench: Workbench) -> None:
    with pytest.raises(EETError, match="Did you mean 'compare'"):
        bench.press("comapre")
    do(bench, ask.setting("max_new_tokens", 100))
    bench.press("run")
    turn(bench)
    with pytest.raises(EETError, match="while something runs"):
        bench.press("ladder")
    bench.press("stop")
    turn_until(bench, lambda: bench.controller.idle)
    bench.close()
    for press in (lambda: bench.press("run"), lambda: bench.wait()):
        with pytest.raises(EETError, match="is closed"):
            press()


@pytest.mark.usefixtures("few_rounds")
def test_a_double_click_is_one_press(bench: Workbench) -> None:
    for command in (ask.run(), ask.compare()):
        bench.controller.put(command)
        do(bench, command)
        assert errors(bench) == "" and shown(bench, "bar")["status"]["kind"] == "plain"
    bench.controller.put(ask.run())
    do(bench, ask.compare())
    assert "compare cannot start" in errors(bench)


def test_what_fails_while_it_is_heard_loses_nothing_behind_it(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*told: Any) -> None:
        raise ZeroDivisionError("no name for it")

    monkeypatch.setattr(bench.controller.watching, "name", fail)
    for event in (Named(["a", "b"]), Progress(0, 0, "heard all the same")):
        bench.controller.engine.feed.tell(event)
    turn(bench)
    assert "no name for it" in errors(bench) and bench.controller.status.text == "heard all the same"


def test_what_is_pressed_before_the_model_is_there_waits_for_it(hf_model: Any, tmp_path: Any) -> None:
    workbench = Workbench(hf_model, ["5 6"], max_new_tokens=4, folder=tmp_path, device="cpu")
    try:
        workbench.press("run")
        workbench.controller.put(ask.run())  # a double click
        turn_until(workbench, lambda: workbench.controller.idle)
        assert isinstance(workbench.result, Run) and errors(workbench) == ""
    finally:
        workbench.close()


def test_what_waits_for_a_model_that_does_not_come_is_told(tmp_path: Any) -> None:
    workbench = Workbench(str(tmp_path / "nothing"), folder=tmp_path, device="cpu")
    try:
        workbench.press("run")
        turn_until(workbench, lambda: workbench.controller.idle)
        assert "There is no folder" in errors(workbench)
    finally:
        workbench.close()


def test_waiting_starts_what_is_not_displayed_and_ends_with_a_word(hf_model: Any, tmp_path: Any) -> None:
    workbench = Workbench(hf_model, "5 6", max_new_tokens=4, folder=tmp_path, device="cpu")
    try:
        assert workbench.controller.state.prompts == ["5 6"], "one text is one prompt"
        workbench.press("run")
        assert isinstance(workbench.wait(30), Run)
        workbench.controller.choices.pick_model("demo")  # keeps it busy for a while
        with pytest.raises(EETError, match=r"not done after 0 s: [^<>]*\. Give"):
            workbench.wait(0)
    finally:
        workbench.close()
