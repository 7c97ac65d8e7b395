"""The workbench's page for serving: its switch, its own model measured and served, Stop, and what the page sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from cost_tables import TOY_DECODER, TURBO_2060

from eet_lab.errors import CostError, EETError
from eet_lab.figures.serving import agreement_table, in_percent, simulated_beside_measured
from eet_lab.scheduling.agreement import Compared
from eet_lab.scheduling.cost import DecoderCost
from eet_lab.serving.live import Look
from eet_lab.serving.profile import profile
from eet_lab.technique import Recipe
from eet_lab.workbench import Workbench, serving_jobs, serving_view
from eet_lab.workbench.serving_jobs import serving_recipe
from eet_lab.workbench.serving_view import ServingController, ServingView
from workbench import page_states
from workbench.driving import ask, do, errors, status, turn, turn_until
from workbench.page_harness import Open, sent, show

PLACES = [".eet-pickers", ".eet-do-run", ".eet-told-block", ".eet-larger", ".eet-left-column", ".eet-live"]
RECTS = "(names) => names.map((name) => JSON.stringify(document.querySelector(name).getBoundingClientRect()))"


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    """The cost tables of this file's one model, by recipe: what only needs one takes that of a test before."""
    return {}


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any]) -> None:
    """A cost table of few sizes, each measured once."""

    def small(model: Any, recipe: Any, **told: Any) -> Any:
        if str(recipe) not in tables:
            axes = ((0, 1, 20), (1, 4), (8, 32))
            tables[str(recipe)] = profile(model, recipe, axes=axes, repeats=1, fresh=True, **told)
        return tables[str(recipe)]

    monkeypatch.setattr(serving_jobs, "profile", small)


@pytest.fixture
def tab(bench: Workbench) -> ServingController:
    do(bench, ask.show_serving(True))
    controller = bench.controller.serving.controller
    assert controller is not None
    controller.page.fields["lengths"].value, controller.page.fields["new_tokens"].value = "4-12", "2-4"
    controller.page.fields["requests"].value = 6
    return controller


def press(bench: Workbench, action: str) -> None:
    bench.controller.serving.controller.inbox.put(action)
    turn(bench)
    turn_until(bench, lambda: bench.controller.idle)


def test_the_switch_shows_the_page_in_place_of_the_bench_and_makes_it_once(bench: Workbench) -> None:
    page = bench.controller.page
    assert bench.controller.serving.controller is None, "few ask for it"
    do(bench, ask.show_serving(True))
    assert "eet-serves" in page.box._dom_classes and page.bar.state["serving"]
    made = bench.controller.serving.controller
    assert made is not None and page.box.children[-1] is made.page.box
    assert "not measured here" in made.page._where.value and "say nothing of a GPU" in made.page._where.value
    do(bench, ask.show_serving(False), ask.show_serving(True), ask.run())  # what runs is seen on the bench
    assert "eet-serves" not in page.box._dom_classes and bench.controller.serving.controller is made


def test_this_model_is_measured_then_served_beside_its_simulation(
    bench: Workbench, tab: ServingController, tables: dict[str, Any]
) -> None:
    tables.clear()
    press(bench, "serve")
    assert "Press Measure this model first" in tab.page.error.value, "another's table is no measure of this model"
    tab.page.fields["trace"].value = "no-such-file"  # no table needs it
    press(bench, "measure")
    assert isinstance(tab.table, DecoderCost) and tab.table.source.model == bench.model.name  # type: ignore[union-attr]
    assert "on this machine" in tab.page._where.value and list(tab.figures) == ["table"]
    tab.page.fields["trace"].value, tab.page.fields["rate"].value = "", 40.0
    press(bench, "serve")
    [name] = tab.measured
    assert name == "Continuous batching" and {"table", "agreement"} <= set(tab.figures)
    table = tab.page._table.value
    assert "error of the simulation" in table and "Continuous batching, measured" in table and "TTFT p99" in table
    press(bench, "loads")
    diamonds = [trace for trace in tab.figures["loads"].data if trace.name == f"{name}, measured"]
    assert len(diamonds) == 1 and len(diamonds[0].x) == 1, "the measured point, on the curves of all policies"
    press(bench, "simulate")
    assert len(tab.results) == 2 and bench.controller.results.latest is None


def test_nothing_begins_beside_a_measurement_and_a_double_click_is_one_press(
    bench: Workbench, tab: ServingController
) -> None:
    for action in ("measure", "measure", "simulate"):
        bench.controller.serving.controller.inbox.put(action)
    turn_until(bench, lambda: bench.controller.idle)
    assert isinstance(tab.table, DecoderCost) and tab.results == {} and list(tab.figures) == ["table"]
    assert errors(bench) == "" and "eet-error" not in tab.page.error.value


def test_closing_ends_a_simulation(bench: Workbench, tab: ServingController, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(asked: Any, table: Any, progress: Any, cancel: Any) -> None:
        begun.set()
        cancel.wait(20)

    begun = threading.Event()
    monkeypatch.setitem(serving_view.WORK, "simulate", endless)
    tab.inbox.put("simulate")
    turn(bench)
    assert begun.wait(10)
    since = time.monotonic()
    bench.close()
    assert time.monotonic() - since < 4


def test_stop_ends_serving_from_the_page_and_from_the_bar(bench: Workbench, tab: ServingController) -> None:
    press(bench, "measure")
    tab.page.fields["rate"].value = 0.05  # somebody comes every twenty seconds

    def seconds_to_end(stop: Callable[[], None]) -> float:
        tab.inbox.put("serve")
        turn_until(
            bench, lambda: tab.page.live.box.layout.display == "grid" and tab.page.live.charts["requests"].points
        )
        with pytest.raises(EETError, match="cannot start while"):
            bench.controller.do(ask.run())
        begun = time.monotonic()
        stop()
        turn_until(bench, lambda: bench.controller.idle)
        took = time.monotonic() - begun
        assert "Stopped." in tab.page.status.value and tab.measured == {}
        return took

    for stop in (lambda: tab.inbox.put("stop"), lambda: bench.controller.put(ask.stop())):
        assert any(seconds_to_end(stop) < 0.5 for _ in range(3)), "the best of three: another test may have the cores"


def test_a_measurement_keeps_what_was_typed(bench: Workbench, tab: ServingController) -> None:
    fields, given = tab.page.fields, tab.page.fields["rate"].value
    press(bench, "measure")
    usual = fields["rate"].value
    assert usual != given and fields["lengths"].value == "4-12", "a rate that nobody typed is one that suits the model"
    fields["rate"].value, tab.page._policies[0].value = 7.0, "no_such_policy"
    press(bench, "measure")
    assert fields["rate"].value == 7.0 and fields["lengths"].value == "4-12"
    fields["rate"].value = -1.0
    press(bench, "measure")
    assert fields["rate"].value == -1.0 and "eet-error" not in tab.page.error.value
    fields["rate"].value = usual
    press(bench, "measure")
    assert fields["rate"].value == usual


def test_nothing_of_an_earlier_run_stands_beside_a_later_one_without_its_words(
    bench: Workbench, tab: ServingController
) -> None:
    page = tab.page
    press(bench, "measure")
    page.fields["rate"].value = 40.0
    press(bench, "simulate")
    press(bench, "serve")
    first = "6 requests, lengths 4 to 12 tokens (uniform), answers 2 to 4 tokens (uniform), cv 1, seed 0, 40 requests/s"
    assert f"Served: {first}" in page.live.caption.value and page.film.film == {}
    assert page._table.value.count(first) == 2, "one table of both, since their traffic is one, and the comparison"
    page.fields["rate"].value = 0.05
    tab.inbox.put("serve")
    turn_until(bench, lambda: page.live.charts["requests"].points)
    assert "Being served: 6 requests" in page.live.caption.value and "0.05 requests/s" in page.live.caption.value
    tab.inbox.put("stop")
    turn_until(bench, lambda: bench.controller.idle)
    assert "Stopped: 6 requests" in page.live.caption.value and "0.05 requests/s" in page.live.caption.value
    assert "Stopped. Tables and figures are of earlier runs." in page.status.value
    page.fields["rate"].value = 30.0
    press(bench, "simulate")
    assert page.live.box.layout.display == "none" and page.live.caption.value == ""
    assert page._table.value.count(first) == 2 and page._table.value.count("seed 0, 30 requests/s") == 1
    press(bench, "loads")
    assert any(trace.name.endswith(", measured") and len(trace.x) for trace in tab.figures["loads"].data)
    page.fields["seed"].value = 1
    press(bench, "loads")
    assert not any(trace.name.endswith(", measured") and len(trace.x) for trace in tab.figures["loads"].data)


def test_what_is_refused_is_not_called_done_and_has_no_charts(bench: Workbench, tab: ServingController) -> None:
    press(bench, "measure")
    kept = [box.value for box in tab.page._policies]
    for box in tab.page._policies:
        box.value = "no_batching"
    press(bench, "serve")
    assert "None of the policies can be served" in tab.page.error.value
    assert "done" not in status(bench) and "serving failed after" in status(bench)
    assert tab.page.live.box.layout.display == "none", "nothing was served that they could show"
    for box, words in zip(tab.page._policies, kept, strict=True):
        box.value = words
    press(bench, "serve")
    assert "serving done in" in status(bench) and tab.page.live.box.layout.display == "grid"


def test_what_cannot_be_drawn_is_told_on_the_page_that_asked_for_it(
    bench: Workbench, tab: ServingController, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> Any:
        raise ZeroDivisionError("nothing to draw")

    press(bench, "measure")
    monkeypatch.setattr(serving_view, "simulated_beside_measured", broken)
    press(bench, "serve")
    page = tab.page
    assert "nothing to draw" in page.error.value and "requests served" not in page.status.value
    assert "Served: 6 requests" in page.live.caption.value and "Being served" not in page.live.caption.value


def test_another_model_is_not_served_over_this_ones_table(tiny: Any, bench: Workbench, tab: ServingController) -> None:
    press(bench, "measure")
    given: Any = (tab.page.asked(), TOY_DECODER, lambda look: None, bench.model, Recipe(), lambda *step: None)
    with pytest.raises(CostError, match="Press Measure this model first"):
        serving_jobs.serve(*given, threading.Event())


def test_a_recipe_gets_what_requests_need_to_join_and_keeps_its_knobs(bench: Workbench) -> None:
    model = bench.model
    assert model is not None
    found = serving_recipe(Recipe.parse("all,continuous_batching:rows=3", "cpu"), model)
    assert "continuous_batching:rows=3" in str(found)
    assert "memory_reuse" in str(serving_recipe(Recipe(), model))


def test_a_view_without_a_model_says_so() -> None:
    view = ServingView(TURBO_2060, requests=20)
    view.press("serve")
    view.wait()
    assert (
        "no model to run" in view.controller.page.error.value
        and view.controller.page.buttons["serve"].layout.display == "none"
    )
    view.close()


def test_a_view_on_a_model_of_its_own_stops_within_a_pass(monkeypatch: pytest.MonkeyPatch, bench: Workbench) -> None:
    view = ServingView(model=bench.model, requests=4, lengths="4-8", new_tokens="2-3")
    assert view.table.source.note and isinstance(view.table, DecoderCost), "an example, until it is measured"
    view.press("measure")
    assert view.wait() == {} and not view.table.source.note.startswith("an example")
    view.controller.page.fields["rate"].value = 0.05
    looked = threading.Event()
    monkeypatch.setattr(view.controller.page.live, "push", lambda look: looked.set())

    def seconds_to_stop() -> float:
        looked.clear()
        view.press("serve")
        assert looked.wait(20)
        begun = time.monotonic()
        view.press("stop")
        view.wait()
        return time.monotonic() - begun

    assert any(seconds_to_stop() < 0.5 for _ in range(3)) and view.measured == {}
    view.close()


def test_looks_are_drawn_and_a_percentile_that_is_not_there_is_left_out(tab: ServingController) -> None:
    live = tab.page.live
    live.clear()
    live.push(Look(0.5, 3, 2, 0, 6, {}, {}))
    live.push(Look(1.0, 1, 4, 1, 6, {"p50": 20.0, "p99": 40.0}, {}))
    assert [point[1:] for point in live.charts["requests"].points] == [(0.5, 3.0), (1.0, 1.0), (0.5, 2.0), (1.0, 4.0)]
    assert len(live.charts["ttft"].points) == 2 and live.charts["tpot"].points == []
    for at_s in (1.5, 2.0):  # told just before the end, and read after it
        tab._looks.put(Look(at_s, 0, 1, 5, 6, {}, {}))
    tab.tick()
    assert not tab.busy and live.charts["requests"].points[-1] == (1, 2.0, 1.0)
    assert len(live.charts["requests"].points) == 8


def test_both_are_drawn_with_the_error_of_the_simulation() -> None:
    compared = [Compared("throughput", "requests/s", 10.0, 10.0), Compared("TTFT p50", "ms", 9.0, 10.0)]
    fig = simulated_beside_measured(compared, "title")
    assert [(trace.name, trace.y[0]) for trace in fig.data] == [
        ("simulated", 9.0), ("measured", 10.0), ("simulated", 10.0), ("measured", 10.0),
    ]  # fmt: skip
    assert fig.data[0].text == ("−10 %",) and in_percent(compared[1]) in agreement_table(compared)


@pytest.mark.parametrize("width", [1406, 1000, 500])
def test_the_switch_moves_nothing_and_the_page_stands_where_the_bench_was(opened: Open, width: int) -> None:
    page = opened(page_states.compared(), width=width)
    before = page.evaluate(RECTS, PLACES)
    column = "'beforeend', '<div class=eet-serving-column>Requests</div>'"
    page.evaluate(f"document.querySelector('.eet-page-grid').insertAdjacentHTML({column})")
    assert page.evaluate(RECTS, PLACES) == before and page.locator(".eet-serving-column").is_hidden()
    page.click("text=Serving")
    assert sent(page) == [{"view": "bar", "command": "show_serving", "on": True}]
    serving = page_states.compared()
    serving["bar"]["serving"] = True
    show(page, serving)
    page.evaluate("document.querySelector('.eet-page-grid').classList.add('eet-serves')")
    back = page.get_by_role("button", name="← Bench", exact=True)
    assert back.evaluate("(e) => getComputedStyle(e).backgroundColor") == "rgb(37, 99, 235)", "it is seen"
    assert page.locator(".eet-left-column").is_hidden() and page.locator(".eet-runs").is_hidden()
    box, bar = page.locator(".eet-serving-column").bounding_box(), page.locator(".eet-bar").bounding_box()
    assert box["y"] >= bar["y"] + bar["height"] and box["width"] == pytest.approx(bar["width"], abs=2)
    assert page.evaluate(RECTS, PLACES[:4]) == before[:4]
    back.click()
    assert sent(page)[-1]["on"] is False
