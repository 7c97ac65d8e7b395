"""The fold "Fits": whether a run fits, and a comparison."""

from __future__ import annotations

from typing import Any

import pytest

from eet_lab.bench.fit import CompareForecast, Forecasts
from eet_lab.engine.forecast import Forecast
from eet_lab.workbench import Workbench
from eet_lab.workbench.forecast import Fits, told
from eet_lab.workbench.threads import Answer, Background
from workbench.driving import answers, ask, do, enabled, shown, status, turn, turn_until

MiB = 2**20


@pytest.fixture
def foresees() -> bool:
    return True


def forecast(free: int, **changes: Any) -> Forecast:
    numbers = dict(num_rows=4, prompt_tokens=50, new_tokens=100, weight_bytes=50, kv_bytes=30, activation_bytes=15)
    numbers |= dict(growth_bytes=0, workspace_bytes=5, largest_batch=3, largest_context=90)
    return Forecast(**{**numbers, "free_bytes": free, **changes})


def words(*told_of: Any) -> str:
    state = told(*told_of)
    return " ".join([state["summary"], *state["words"]])


def current(bench: Workbench) -> Forecasts | None:
    fits = bench.controller.fits
    return None if fits._stale else fits._forecasts


def of_memory(monkeypatch: pytest.MonkeyPatch, free: Any) -> None:
    for module in ("workbench.forecast", "engine.forecast"):
        monkeypatch.setattr(f"eet_lab.{module}.free_bytes_of", lambda device: free())


def test_a_button_says_what_may_go_wrong_and_can_be_pressed(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def tips() -> list[str]:
        return [shown(bench, "bar")["actions"][name]["tip"] for name in ("run", "compare")]

    turn_until(bench, lambda: current(bench))
    assert "run out of memory" not in "".join(tips())
    weights = bench.model.decoder.weight_bytes
    of_memory(monkeypatch, lambda: 1000)
    turn_until(bench, lambda: current(bench) and current(bench).run.free_bytes == weights + 1000)
    assert all("run out of memory" in tip for tip in tips())
    assert enabled(bench)["run"]


def test_a_forecast_that_fits_says_what_else_would() -> None:
    most = forecast(200).most_rows
    assert f"Room for {most:,} or more prompts" in words(forecast(200, largest_batch=most))
    fine = told(forecast(200, largest_batch=9, largest_context=400))
    assert fine["summary"] == "Run fits: 100 bytes of 200 bytes" and fine["kind"] == "good"
    assert fine["limit_share"] is None and sum(part["share"] for part in fine["parts"]) == pytest.approx(1)
    assert "Room for 9 prompts like these, or 400 tokens in each of 4" in fine["words"][-1]


def test_a_forecast_that_does_not_fit_says_what_to_change() -> None:
    assert "Run does not fit: 100 bytes of 80 bytes It needs 20 bytes more" in words(forecast(80))
    assert "at most 40 new tokens, or at most 3 prompts" in words(forecast(80))
    cut = words(forecast(80, largest_context=30))
    assert "prompts of at most 29 tokens with one new token, or at most 3 prompts" in cut
    assert told(forecast(80))["kind"] == "bad" and told(forecast(80))["limit_share"] == pytest.approx(0.8)
    assert "memory_reuse" not in words(forecast(80, growth_bytes=9)), "whether that needs less was not foreseen"
    assert "weights alone" in words(forecast(40))
    assert "Not even one prompt" in words(forecast(80, largest_batch=0, largest_context=0))


def test_a_comparison_that_does_not_fit_is_told_beside_a_run_that_does() -> None:
    compare = CompareForecast(engine_bytes=150, check_bytes=40, workspace_bytes=5)
    assert "Compare fits too: 195 bytes, of which 150 bytes for both engines" in words(forecast(200), compare)
    assert told(forecast(200), compare)["kind"] == "good"
    tight = words(forecast(120), compare)
    assert "Run fits: 100 bytes of 120 bytes" in tight and told(forecast(120), compare)["kind"] == "warn"
    assert "Compare does not fit: it needs 195 bytes, 75 bytes too much. Use fewer prompts or new tokens." in tight
    assert "Compare" not in words(forecast(80), compare), "first things first"


def test_a_forecast_is_asked_again_when_memory_came_or_went(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100 * MiB]
    of_memory(monkeypatch, lambda: free[0])
    weights = bench.model.decoder.weight_bytes

    def seen() -> int:
        return current(bench).run.free_bytes - weights if current(bench) else 0

    turn_until(bench, lambda: seen() == free[0])
    free[0] = 98 * MiB
    before = current(bench)
    turn(bench, 25)
    assert current(bench) is before, "a little is nothing new"
    free[0] = 60 * MiB
    turn_until(bench, lambda: seen() == free[0])
    free[0] = 59 * MiB
    do(bench, ask.run())
    turn_until(bench, lambda: seen() == free[0])


def test_the_forecast_follows_the_choices_and_drops_what_is_late(background: Background) -> None:
    fits, asked = Fits(background), []
    for key in range(5):
        fits._ask(key, lambda key=key: asked.append(key) or Forecasts(forecast(200), None))
    fits.answered(Answer(fits.answered, 3, Forecasts(forecast(80), None)))
    assert fits.state()["summary"] == ""
    [answer] = answers(background, 1)
    fits.answered(answer)
    assert asked == [4] and "Run fits" in fits.state()["summary"] and not fits.state()["stale"]
    fits._ask(5, lambda: Forecasts(forecast(80), None))
    assert fits.state()["stale"] and "Run fits" in fits.state()["summary"], "it stands, dimmed, until the next is there"
    assert fits.warnings == ("", ""), "what is stale warns of nothing"
    [answer] = answers(background, 1)
    fits.answered(answer)
    assert not fits.state()["stale"] and "does not fit" in fits.state()["summary"]
    fits._ask(None, None)
    assert fits.state()["summary"] == ""


def test_a_forecast_that_fails_says_why(background: Background) -> None:
    fits = Fits(background)
    fits._ask(1, lambda: 1 / 0)
    [answer] = answers(background, 1)
    fits.answered(answer)
    assert fits.state()["summary"] == "No forecast: division by zero"


def test_the_workbench_forecasts_its_run(bench: Workbench) -> None:
    turn_until(bench, lambda: current(bench))
    first = current(bench)
    assert first.run.fits and (first.run.num_rows, first.run.prompt_tokens, first.run.new_tokens) == (2, 6, 8)
    assert first.run.weight_bytes == bench.model.decoder.weight_bytes
    assert first.compare.total_bytes > first.run.total_bytes
    do(bench, ask.setting("max_new_tokens", 20))
    turn_until(bench, lambda: current(bench) and current(bench).run.new_tokens == 20)
    assert current(bench).run.kv_bytes > first.run.kv_bytes
    do(bench, ask.setting("max_new_tokens", 10**6))
    turn_until(bench, lambda: shown(bench, "inputs")["fits"]["summary"] == "")
    assert "past the context" in status(bench)


def test_what_was_forecast_is_what_is_held(bench: Workbench) -> None:
    turn_until(bench, lambda: current(bench))
    told = current(bench).run
    do(bench, ask.run())
    [run] = bench.controller.results.memory.runs.values()
    assert (told.weight_bytes, told.kv_bytes, told.activation_bytes) == (
        run.weights_bytes,
        run.kv.held_bytes,
        run.activation_bytes,
    )
