"""Running and stopping: what the desk does with jobs, without a kernel."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest

from eet_lab.bench import Comparison, Ladder
from eet_lab.engine.settings import Settings
from eet_lab.errors import EETError
from eet_lab.panels import Workbench, jobs, worker
from eet_lab.panels.outputs import PLOTLY
from eet_lab.technique import Recipe
from panels.driving import do, errors, turn_until


def test_run_streams_text_and_latency(bench: Workbench) -> None:
    bench.desk.actions.run.click()
    turn_until(bench, lambda: bench.result is not None)
    assert bench.desk.live.stream.counts == [8, 8]
    assert len(bench.desk.live.latency.points) == 8
    assert bench.result.texts == tuple(text.strip() for text in bench.desk.live.stream.texts)
    assert bench.desk.status.text.startswith("run done")


def test_a_text_ends_before_the_token_that_ends_it(bench: Workbench) -> None:
    """In the panes as in the result; the token itself is there."""
    model, prompts = bench.desk.model, list(bench.desk.state.prompts)

    def run(**settings: Any) -> jobs.RunReport:
        job = jobs.run(model, prompts, Recipe(), Settings(max_new_tokens=8, **settings))
        return job(worker.Feed(SimpleQueue()), threading.Event())

    end = run().generation.tokens[0][-1]
    stopped = run(stop=(end,))
    tokens = stopped.generation.tokens[0]
    assert tokens[-1] == end
    assert stopped.texts[0] == model.decode(tokens[:-1])
    assert jobs.decoder(model, (end,))(tokens) == jobs.decoder(model)(tokens[:-1])


def test_compare_measures_with_the_view_at_rest(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[bool] = []
    inner = bench.desk.device.rest
    monkeypatch.setattr(bench.desk.device, "rest", lambda resting: (rests.append(resting), inner(resting)))
    do(bench, "compare")
    assert errors(bench) == ""
    assert isinstance(bench.result, Comparison)
    assert rests[0] is True
    assert rests[-1] is False
    assert False in rests[1:-1], "the watched runs are not at rest"
    assert {series for series, _, _ in bench.desk.live.latency.points} == {0, 1}
    assert set(bench.desk.shelf._monitor) == {"baseline", "selection"}
    assert "what watching cost" in bench.desk.shelf.view._words.value


def test_ladder_opens_on_its_waterfall(bench: Workbench) -> None:
    do(bench, "choose", "repeats", 1)
    do(bench, "ladder")
    assert errors(bench) == ""
    assert isinstance(bench.result, Ladder)
    [output] = bench.desk.shelf.view.figure.outputs
    assert {trace["type"] for trace in output["data"][PLOTLY]["data"]} == {"waterfall", "scatter"}, "and its labels"


def test_a_ladder_after_a_comparison_leaves_its_tabs_alone(bench: Workbench) -> None:
    """The new result has other tabs, and opens on another than the one that was chosen."""
    do(bench, "choose", "repeats", 1)
    do(bench, "compare")
    view = bench.desk.shelf.view
    view.tabs.value = "latency"
    bench.desk.actions.ladder.click()
    turn_until(bench, lambda: isinstance(bench.result, Ladder) and not bench.desk.busy)
    turn_until(bench, lambda: bench.desk.idle, 5)
    assert view.tabs.value == "waterfall"
    view.tabs.value = "memory"
    turn_until(bench, lambda: bench.desk.idle, 5)
    assert view.tabs.value == "memory"
    assert view.figure.outputs
    do(bench, "run")
    view.tabs.index = 0
    do(bench, "tab", "left_out")
    assert errors(bench) == "", "a tab that was clicked before it went away"
    assert view.tabs.value == "overview"


def test_a_turn_ends_even_if_each_command_asks_for_another(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def do_again() -> None:
        asked.append(len(asked))
        if len(asked) < 100:
            bench.desk.put("again")

    monkeypatch.setattr(bench.desk, "do_again", do_again, raising=False)
    bench.desk.put("again")
    bench.desk.tick()
    assert asked == [0]


def test_the_bar_starts_again_when_kernels_have_been_built(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(self: Any, progress: Any = None, cancel: Any = None) -> None:
        for done in range(4) if progress else ():
            progress(done, 3, "building 3 CUDA sources")

    shares: list[float] = []
    step = bench.desk._on_step
    monkeypatch.setattr("eet_lab.panels.jobs.Engine.prepare", prepare)
    monkeypatch.setattr(
        bench.desk, "_on_step", lambda event: (step(event), shares.append(bench.desk.status.clock.share))
    )
    do(bench, "run")
    assert shares == [pytest.approx((i + 1) / 8) for i in range(8)]


def test_a_replay_takes_long_enough_to_be_seen_and_samples_go_forward(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SHORTEST_REPLAY_S", 0.25)
    samples = [{"t": t, "values": {"power_w": 1.0}} for t in (0.0, 0.0005)]
    recording = {"label": "GPU", "metrics": {"power_w": "W"}, "missing": {}, "samples": samples}
    events: SimpleQueue[Any] = SimpleQueue()
    begun = time.monotonic()
    jobs.replay(comparison, {"baseline": recording, "selection": recording})(worker.Feed(events), threading.Event())
    assert time.monotonic() - begun > 0.45
    told = [events.get() for _ in range(events.qsize())]
    assert [(e.done, e.total) for e in told if isinstance(e, worker.Progress)] == [(0, 2), (1, 2)]
    assert all("slow motion" in e.text for e in told if isinstance(e, worker.Phase))
    times = [e.t for e in told if isinstance(e, worker.Sampled)]
    assert len(times) == 4
    assert times == sorted(times), "the second run is drawn after the first"


def test_stop_ends_a_run_in_half_a_second_and_the_session_goes_on(bench: Workbench) -> None:
    do(bench, "setting", "max_new_tokens", 120)
    do(bench, "choose", "repeats", 50)

    def seconds_to_stop() -> float:
        bench.desk.put("compare")
        turn_until(bench, lambda: bench.desk.busy and bench.desk.status.clock.share > 0)
        begun = time.monotonic()
        bench.desk.actions.stop.click()
        bench.desk.tick()
        assert "stopping…" in bench.desk.actions.status.value
        turn_until(bench, lambda: not bench.desk.busy)
        assert "compare stopped" in bench.desk.actions.status.value
        assert errors(bench) == ""
        return time.monotonic() - begun

    assert any(seconds_to_stop() < 0.5 for _ in range(3)), "the best of three: another test may have the cores"
    do(bench, "setting", "max_new_tokens", 4)
    do(bench, "run")
    assert bench.result.generation.num_tokens == 8


def test_with_nothing_switched_on_there_is_nothing_to_compare(bench: Workbench) -> None:
    for name in ("pre_padding", "mask_removal", "memory_reuse"):
        do(bench, "toggle", name, False)
    actions = bench.desk.actions
    assert (actions.run.disabled, actions.compare.disabled, actions.ladder.disabled) == (False, True, True)
    assert "No technique is switched on" in actions.status.value
    do(bench, "toggle", "memory_reuse", True)
    assert not actions.compare.disabled


def test_an_action_that_does_not_exist_is_told(bench: Workbench) -> None:
    with pytest.raises(EETError, match="Did you mean 'compare'"):
        bench.press("comapre")
