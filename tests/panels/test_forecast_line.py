"""The line under the buttons: whether a run fits, and a comparison."""

from __future__ import annotations

from typing import Any

import pytest

from eet_lab.bench.foresee import CompareForecast
from eet_lab.engine.forecast import Forecast
from eet_lab.panels import Workbench
from eet_lab.panels.aside import Answer, Aside
from eet_lab.panels.forecast_line import ForecastLine, Foreseen, in_html
from panels.driving import answers, do, turn_until

MiB = 2**20


def told(free: int, **changes: Any) -> Forecast:
    numbers = dict(num_rows=4, prompt_tokens=50, new_tokens=100, weight_bytes=50, kv_bytes=30, activation_bytes=15)
    numbers |= dict(growth_bytes=0, workspace_bytes=5, largest_batch=3, largest_context=90)
    return Forecast(**{**numbers, "free_bytes": free, **changes})


def test_a_button_says_what_may_go_wrong_and_can_be_pressed(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    line, actions = bench.desk.beside.forecast, bench.desk.actions
    turn_until(bench, lambda: line.foreseen is not None)
    assert "run out of memory" not in actions.run.tooltip + actions.compare.tooltip
    weights = bench.model.decoder.weight_bytes
    for module in ("panels.beside", "engine.forecast"):
        monkeypatch.setattr(f"eet_lab.{module}.free_bytes_of", lambda device: 1000)
    turn_until(bench, lambda: line.foreseen is not None and line.foreseen.run.free_bytes == weights + 1000)
    assert "run out of memory" in actions.run.tooltip and "run out of memory" in actions.compare.tooltip
    assert not actions.run.disabled


def test_a_forecast_that_fits_says_what_else_would() -> None:
    most = told(200).most_rows
    assert f"Room for {most:,} or more prompts" in in_html(told(200, largest_batch=most))
    html = in_html(told(200, largest_batch=9, largest_context=400))
    assert "Run fits: 100 bytes of 200 bytes." in html and "Room for 9 prompts like these" in html
    assert "400 tokens in each of 4" in html and "eet-good" in html and "<u " not in html


def test_a_forecast_that_does_not_fit_says_what_to_change() -> None:
    html = in_html(told(80))
    assert "Run does not fit: it needs 100 bytes, and 80 bytes are there, 20 bytes too few" in html
    assert "at most 40 new tokens, or at most 3 prompts" in html
    cut = in_html(told(80, largest_context=30))
    assert "prompts of at most 29 tokens with one new token, or at most 3 prompts" in cut
    assert "eet-bad" in html and "left:80.000%" in html
    assert "memory_reuse" not in in_html(told(80, growth_bytes=9)), "whether that needs less was not foreseen"
    assert "weights alone" in in_html(told(40))
    assert "Not even one prompt" in in_html(told(80, largest_batch=0, largest_context=0))


def test_a_comparison_that_does_not_fit_is_told_beside_a_run_that_does() -> None:
    compare = CompareForecast(engine_bytes=150, check_bytes=40, workspace_bytes=5)
    fits, tight = in_html(told(200), compare), in_html(told(120), compare)
    assert "Compare fits too: 195 bytes." in fits and "eet-told eet-good" in fits
    assert "Run fits: 100 bytes of 120 bytes." in tight and "eet-told eet-warn" in tight
    assert "Compare does not: it needs 195 bytes, 75 bytes too much. Give it fewer prompts or new tokens." in tight
    assert (
        "150 bytes: both engines" in tight
        and "40 bytes: the most that is needed beside them" in tight
        and "Ladder" in tight
    )
    assert "Compare" not in in_html(told(80), compare), "first things first"


def test_a_forecast_is_asked_again_when_memory_came_or_went(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100 * MiB]
    for module in ("panels.beside", "engine.forecast"):
        monkeypatch.setattr(f"eet_lab.{module}.free_bytes_of", lambda device: free[0])
    line, weights = bench.desk.beside.forecast, bench.model.decoder.weight_bytes

    def shown() -> int:
        return line.foreseen.run.free_bytes - weights if line.foreseen else 0

    turn_until(bench, lambda: shown() == free[0])
    free[0] = 98 * MiB
    before = line.foreseen
    for _ in range(25):
        bench.desk.tick()
    assert line.foreseen is before, "a little is nothing new"
    free[0] = 60 * MiB
    turn_until(bench, lambda: shown() == free[0])
    free[0] = 59 * MiB
    do(bench, "run")
    turn_until(bench, lambda: shown() == free[0])


def test_the_forecast_follows_the_choices_and_drops_what_is_late(aside: Aside) -> None:
    line, asked = ForecastLine(aside), []
    for key in range(5):
        line.look(key, lambda key=key: asked.append(key) or Foreseen(told(200), None))
    late = Answer("forecast", 3, Foreseen(told(80), None))
    line.answered(late)
    assert line.foreseen is None and line.box.value == ""
    [answer] = answers(aside, 1)
    line.answered(answer)
    assert asked == [4] and "Run fits" in line.box.value
    line.look(5, lambda: Foreseen(told(80), None))
    assert "eet-stale" in line.box.value, "it stands, dimmed, until the next is there"
    [answer] = answers(aside, 1)
    line.answered(answer)
    assert "eet-stale" not in line.box.value and "does not fit" in line.box.value
    line.look(None, None)
    assert line.box.value == ""


def test_a_forecast_that_fails_says_why(aside: Aside) -> None:
    line = ForecastLine(aside)
    line.look(1, lambda: 1 / 0)
    [answer] = answers(aside, 1)
    line.answered(answer)
    assert "No forecast: division by zero" in line.box.value


def test_the_workbench_foresees_its_run(bench: Workbench) -> None:
    line = bench.desk.beside.forecast
    turn_until(bench, lambda: line.foreseen is not None)
    first = line.foreseen.run
    assert first.fits and (first.num_rows, first.prompt_tokens, first.new_tokens) == (2, 6, 8)
    assert first.weight_bytes == bench.model.decoder.weight_bytes
    assert line.foreseen.compare.total_bytes > first.total_bytes
    do(bench, "setting", "max_new_tokens", 20)
    turn_until(bench, lambda: line.foreseen and line.foreseen.run.new_tokens == 20)
    assert line.foreseen.run.kv_bytes > first.kv_bytes
    do(bench, "setting", "max_new_tokens", 10**6)
    turn_until(bench, lambda: line.box.value == "")
    assert "past the context" in bench.desk.actions.status.value


def test_what_was_foreseen_is_what_is_held(bench: Workbench) -> None:
    line = bench.desk.beside.forecast
    turn_until(bench, lambda: line.foreseen is not None)
    told, tab = line.foreseen.run, bench.desk.beside.memory
    do(bench, "run")
    [run] = tab._runs.values()
    assert (told.weight_bytes, told.kv_bytes, told.activation_bytes) == (
        run.weights_bytes,
        run.kv.held_bytes,
        run.activation_bytes,
    )
