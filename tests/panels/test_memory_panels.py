"""What the workbench shows of memory: the tab, the bar of parts, and what is asked beside the page."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from eet_lab.panels import Workbench
from eet_lab.panels.aside import Answer, Aside
from eet_lab.panels.memory_bar import bar, held_now
from eet_lab.panels.outputs import PLOTLY
from panels.driving import do, turn_until

MiB = 2**20


def answers(aside: Aside, count: int, seconds: float = 5.0) -> list[Answer]:
    found: list[Answer] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += aside.take()
        time.sleep(0.002)
    return found


@pytest.fixture
def aside() -> Any:
    aside = Aside()
    yield aside
    aside.close()
    assert not aside._thread.is_alive()


def test_only_the_newest_question_of_a_name_is_answered(aside: Aside) -> None:
    done: list[int] = []
    for number in range(20):
        aside.ask("slider", number, lambda number=number: done.append(number) or number, after_s=0.05)
    assert not aside.idle
    assert [(a.name, a.key, a.value) for a in answers(aside, 1)] == [("slider", 19, 19)]
    assert done == [19] and aside.idle


def test_an_error_is_an_answer_and_the_thread_lives_on(aside: Aside) -> None:
    aside.ask("a", 0, lambda: 1 / 0)
    [failed] = answers(aside, 1)
    assert isinstance(failed.error, ZeroDivisionError)
    aside.ask("a", 1, threading.current_thread)
    [answer] = answers(aside, 1)
    assert answer.value.name == "eet-aside"


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
    turn_until(bench, lambda: "weights" in bench.desk.live.held.value)
    assert bench.desk.worker.feed.weights_bytes() == bench.model.decoder.weight_bytes
    assert "rest of this process" in bench.desk.live.held.value


def test_after_a_run_the_tab_draws_its_plan_and_asks_the_other_planners(bench: Workbench) -> None:
    do(bench, "run")
    tab = bench.desk.shelf.view.memory
    assert tab.picture.outputs == () and tab.box.layout.display == "none"
    do(bench, "tab", "memory")
    assert tab.box.layout.display == ""
    turn_until(bench, lambda: len(tab.planner.options) > 3)
    assert "greedy_by_size" in tab._facts.value and "KV cache" in tab._facts.value
    own = figure(tab)
    do(bench, "memory_planner", "no_reuse")
    assert figure(tab) != own and "lower bound" in own
    do(bench, "memory_pass", "decode")
    turn_until(bench, lambda: tab._key in tab._placed)
    assert tab.run.value == "selection" and tab._key == ("selection", "decode")
    do(bench, "tab", "overview")
    assert tab.picture.outputs == (), "a saved notebook need not carry it"


def test_a_comparison_has_both_runs_and_a_recording_none(bench: Workbench) -> None:
    do(bench, "compare")
    do(bench, "tab", "memory")
    tab, view = bench.desk.shelf.view.memory, bench.desk.shelf.view
    assert list(tab.run.options) == ["baseline", "selection"]
    do(bench, "memory_run", "baseline")
    assert "no arena" in tab._words.value
    assert "growing" in tab._facts.value and "static" in tab._facts.value
    assert len(view.figure.outputs) == 1
    do(bench, "save")
    view.files.value = str(next(bench.desk.shelf.files.folder.glob("*.json")))
    do(bench, "open")
    do(bench, "tab", "memory")
    assert tab.box.layout.display == "none" and len(view.figure.outputs) == 1


def figure(tab: Any) -> str:
    [output] = tab.picture.outputs
    return str(output["data"][PLOTLY]["layout"]["title"]["text"])
