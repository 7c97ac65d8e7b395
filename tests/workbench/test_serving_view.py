"""The serving view: what is pressed is simulated, errors are told, a new view closes the old one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cost_tables import TOY_DECODER, TURBO_2060

import eet_lab
from eet_lab.errors import Cancelled, CostError, EETError, ScheduleError, TrafficError
from eet_lab.figures.outputs import PLOTLY
from eet_lab.figures.players import MOST_PASSES, ServingFilm, film_lane
from eet_lab.scheduling.choices import usual_lengths
from eet_lab.scheduling.policies import POLICIES, NaivePadding
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.sweep import LOWEST, RISEN
from eet_lab.scheduling.traffic import Gamma, Uniform, make_traffic
from eet_lab.workbench import serving_view
from eet_lab.workbench.serving_jobs import MOST_POLICIES, MOST_REQUESTS, NUM_LOADS, Asked, against_load
from eet_lab.workbench.serving_view import ServingView


def eet_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("eet-")]


@pytest.fixture
def view() -> Iterator[ServingView]:
    view = eet_lab.ServingView(TURBO_2060, requests=60, lengths="5-100")
    yield view
    view.close()
    assert eet_threads() == []


def click(view: ServingView, action: str) -> None:
    view.controller.page.buttons[action].click()
    view.wait()


def test_what_is_chosen_is_simulated_and_kept(view: ServingView) -> None:
    assert view.results == {} and not view.busy
    click(view, "simulate")
    assert list(view.results) == ["Naive padding", "Dynamic program"]
    traffic = make_traffic(60, Gamma(view.controller.page.fields["rate"].value), Uniform(5, 100))
    alone = simulate_traffic(traffic, NaivePadding(max_rows=TURBO_2060.most_rows), TURBO_2060)
    assert np.array_equal(view.results["Naive padding"].last_ms, alone.last_ms)
    assert "Naive padding" in view.controller.page._table.value and "TTFT" not in view.controller.page._table.value
    title, figure = view.controller.page._kept.outputs
    assert "longest queue: 60 requests, lengths 5 to 100 tokens (uniform), cv 1" in title["data"]["text/plain"]
    layout, whole = figure["data"][PLOTLY]["layout"], view.figures["batches"].layout
    assert "title" not in layout and "<br>" in whole.title.text, "a text is as wide as the page"
    assert whole.margin.t - layout["margin"]["t"] == whole.height - layout["height"] > 0
    assert len(view.controller.page.film.film["lanes"]) == 2
    click(view, "loads")
    assert list(view.figures) == ["batches", "loads"] and len(view.controller.page._kept.outputs) == 4
    assert len(view.figures["loads"].data[0].x) == NUM_LOADS


def test_traffic_is_named_in_the_terms_of_serving(view: ServingView) -> None:
    heads = {name: form.children[0].value for name, form in view.controller.page.form.items()}
    named = {"rate": "arrival rate (requests/s)", "cv": "arrivals", "lengths": "input tokens per request"}
    named["new_tokens"] = "output tokens per request"
    assert all(f">{words}<" in heads[name] for name, words in named.items())


def test_loads_reach_past_the_knee_for_all_policies_with_those_that_were_chosen_in_front(view: ServingView) -> None:
    view.controller.page._policies[1].value = "dynamic_program:trigger=lazy:wait_ms=20"
    view.controller.page.fields["requests"].value = 300
    click(view, "loads")
    curves = {trace.name: trace for trace in view.figures["loads"].data if trace.line.dash == "solid"}
    titles = [kind.title for kind in POLICIES.values() if "encode" in kind.stages]
    assert [*curves] == titles and [name for name in titles if curves[name].opacity == 1.0] == [titles[1], titles[3]]
    for name in (titles[1], titles[3]):
        assert curves[name].y[-1] > RISEN * curves[name].y[0] and curves[name].marker.symbol[0] == "circle"
    view.controller.page.fields["requests"].value = 1
    click(view, "loads")
    assert "There is 1 request, which comes at no rate" in view.controller.page.error.value


def test_as_many_policies_as_can_be_asked_for_have_a_colour_each() -> None:
    words = [f"continuous_batching:max_rows={number}" for number in range(2, 2 + MOST_POLICIES)]
    view = ServingView(TOY_DECODER, words, requests=5, lengths="5-30", new_tokens="2-10")
    view.press("loads")
    view.wait()
    view.close()
    colors = [trace.line.color for trace in view.figures["loads"].data if trace.line.dash == "solid"]
    assert len({*colors}) == len(colors) > MOST_POLICIES


def test_a_curve_that_ends_where_its_passes_go_beyond_the_table_says_so(view: ServingView) -> None:
    view.controller.page._policies[0].value = f"naive_padding:max_rows={4 * TURBO_2060.most_rows}"
    view.controller.page.fields["requests"].value = 300
    click(view, "loads")
    figure = view.figures["loads"]
    found = {trace.name: len(trace.x) for trace in figure.data if trace.line.dash == "solid"}
    assert 0 < found["Naive padding"] < NUM_LOADS == found["Dynamic program"]
    words = " ".join(figure.layout.title.text.replace("<br>", " ").split())
    assert words.endswith("After its last point, passes go beyond the table: Naive padding")


@pytest.mark.parametrize("stopped_at", [0, 1, NUM_LOADS + 3])
def test_stop_leaves_the_loads_that_are_there(view: ServingView, monkeypatch: Any, stopped_at: int) -> None:
    def stopping(asked: Asked, table: Any, progress: Any, cancel: Any) -> Any:
        def told(done: int, total: int, what: str) -> None:
            if done >= stopped_at:
                cancel.set()

        return against_load(asked, table, told, cancel)

    monkeypatch.setitem(serving_view.WORK, "loads", stopping)
    view.controller.page.fields["requests"].value = 1100  # a simulation of fewer passes does not look at Stop
    click(view, "loads")
    status = view.controller.page.status.value
    if not stopped_at:
        assert "Stopped." in status and "loads" not in view.figures
        return
    assert "Stopped. The curves are what was simulated until then." in status
    found = {trace.name: len(trace.x) for trace in view.figures["loads"].data if trace.line.dash == "solid"}
    assert 0 < found["Naive padding"] <= NUM_LOADS and found["Length buckets"] == 0
    assert "stopped before the rest" in view.figures["loads"].layout.title.text


def test_a_policy_with_two_knobs_can_be_read_in_its_box(view: ServingView) -> None:
    words = "dynamic_program:trigger=lazy:wait_ms=200"
    assert all(int(box.layout.width.removesuffix("px")) >= 7 * len(words) for box in view.controller.page._policies)


def test_stop_can_be_pressed_while_there_is_something_to_stop(view: ServingView) -> None:
    page = view.controller.page
    assert page.buttons["stop"].disabled
    click(view, "loads")
    assert page.buttons["stop"].disabled
    click(view, "simulate")
    assert page.film.film and not page.buttons["stop"].disabled
    click(view, "stop")
    assert not page.film.film and page.buttons["stop"].disabled


def test_a_run_that_fails_leaves_no_film_of_another_and_says_what_is_below(view: ServingView, tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text("0,5\n" * (MOST_REQUESTS + 1))
    page = view.controller.page
    click(view, "simulate")
    page.fields["trace"].value = str(tmp_path / "long.csv")
    click(view, "simulate")
    assert "draws at most 20,000" in page.error.value and "--policy NAME" in page.error.value
    assert page.buttons["stop"].disabled and not page.film.film
    assert "Tables and figures are of earlier runs." in page.status.value and "60 requests" in page._table.value


def test_a_file_of_lengths_is_read_once(tmp_path: Path) -> None:
    """The title tells of what was simulated, though the file is another by then, or gone."""
    path = tmp_path / "day.txt"
    path.write_text("7 7 7")
    asked = Asked(("no_batching",), rate=10.0, lengths=str(path), requests=3)
    assert asked.traffic(TURBO_2060).lengths.tolist() == [7, 7, 7]
    path.unlink()
    assert "lengths day.txt" in asked.in_words(TURBO_2060)
    assert Asked(("no_batching",), requests=1).in_words(TURBO_2060).startswith("1 request, lengths")
    assert asked.traffic(TURBO_2060, 2.0).lengths.tolist() == [7, 7, 7]


def test_a_trace_takes_the_place_of_what_is_drawn(view: ServingView, tmp_path: Path) -> None:
    (tmp_path / "day.csv").write_text("time,length\n0,5\n0.05,100\n0.2,20\n")
    (tmp_path / "wrong.csv").write_text("0,5\n-1,5\n")
    page = view.controller.page
    page.fields["trace"].value = f" {tmp_path / 'day.csv'} "
    click(view, "simulate")
    found = view.results["Naive padding"].traffic
    assert found.arrival_ms.tolist() == [0, 50, 200] and found.lengths.tolist() == [5, 100, 20]
    click(view, "loads")
    loads = view.figures["loads"]
    assert "3 requests of day.csv" in loads.layout.title.text
    assert loads.data[0].x[0] == pytest.approx(LOWEST * 2 / 0.2), "a share of the trace's own rate"
    (tmp_path / "day.csv").unlink()
    page.fields["trace"].value = ""
    click(view, "simulate")
    assert len(view.results["Naive padding"].traffic) == 60 and "eet-error" not in page.error.value
    assert "3 requests of day.csv" in view.figures["loads"].layout.title.text, "and what was drawn before stays"
    page.fields["trace"].value = str(tmp_path / "wrong.csv")
    click(view, "simulate")
    assert "wrong.csv, line 2: time is -1" in page.error.value
    page.put_table(TURBO_2060)
    with pytest.raises(TrafficError, match="line 2: time is -1"):
        ServingView(TURBO_2060, trace=tmp_path / "wrong.csv")
    (tmp_path / "long.csv").write_text("0,5\n" * (MOST_REQUESTS + 1))
    with pytest.raises(TrafficError, match="20,001, but this view draws at most 20,000.*--policy NAME"):
        ServingView(TURBO_2060, trace=tmp_path / "long.csv")
    (tmp_path / "once.csv").write_text("0,5\n0,9\n")
    assert Asked(("no_batching",), trace=str(tmp_path / "once.csv")).traffic(TURBO_2060, 2.0).arrival_ms.tolist() == [
        0,
        0,
    ]
    page.fields["trace"].value = str(tmp_path / "once.csv")
    click(view, "loads")
    assert "once.csv come at once, so it has no rate" in page.error.value and "Simulate" in page.error.value
    click(view, "simulate")
    assert len(view.results["Naive padding"].traffic) == 2


def test_fields_are_read_when_a_button_is_pressed(view: ServingView) -> None:
    page = view.controller.page
    page._policies[1].value = "dynamic_program:trigger=lazy:wait_ms=2"
    page.fields["requests"].value, page.fields["cv"].value, page.fields["lengths"].value = 40, 2.0, "lognormal:20:0.5"
    view.press("simulate")
    [_, lazy] = view.wait().values()
    assert "trigger=lazy:wait_ms=2.0" in lazy.policy
    assert len(lazy.traffic) == 40 and "gamma (cv 2)" in lazy.traffic.name and "log-normal" in lazy.traffic.name


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("rate", -1.0, "rate is -1"),
        ("rate", float("nan"), "rate is nan"),
        ("lengths", "<b>many</b>", "neither a length"),
        ("lengths", "9000", "9,000 tokens"),
    ],
)
def test_a_wrong_field_is_told_and_what_was_shown_stays(view: ServingView, field: str, value: Any, said: str) -> None:
    click(view, "simulate")
    view.controller.page.fields[field].value = value
    click(view, "simulate")
    assert "eet-error" in view.controller.page.error.value and said in view.controller.page.error.value
    assert "<b>many" not in view.controller.page.error.value
    assert "Naive padding" in view.controller.page._table.value
    assert len(view.results) == 2 and len(view.controller.page._kept.outputs) == 2
    assert not view.controller.page.buttons["simulate"].disabled


def test_an_unknown_policy_and_none_are_told(view: ServingView) -> None:
    view.controller.page._policies[0].value = "naive_paddin"
    click(view, "simulate")
    assert "Did you mean" in view.controller.page.error.value
    for box in view.controller.page._policies:
        box.value = ""
    click(view, "simulate")
    assert "There are 0 policies" in view.controller.page.error.value


def test_stop_ends_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def endless(asked: Asked, table: Any, progress: Any, cancel: Any) -> dict:
        begun.set()
        progress(3, 7, "half-way")
        while not cancel.is_set():
            time.sleep(0.005)
        raise Cancelled("stopped")

    monkeypatch.setitem(serving_view.WORK, "simulate", endless)
    view = ServingView(TURBO_2060, requests=20)
    view.start()
    view.press("simulate")
    assert begun.wait(10) and view.busy
    deadline = time.monotonic() + 10
    while "half-way: 3 of 7" not in view.controller.page.status.value and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "half-way: 3 of 7" in view.controller.page.status.value and view.controller.page.buttons["simulate"].disabled
    with pytest.raises(EETError, match="not done after"):
        view.wait(0.05)
    view.press("stop")
    assert view.wait(10) == {} and "Stopped." in view.controller.page.status.value
    view.press("simulate")
    with pytest.raises(EETError, match="while something runs"):
        view.press("loads")
    time.sleep(0.3)
    view.close()
    assert eet_threads() == []


def test_what_cannot_be_drawn_leaves_a_view_that_works(view: ServingView, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise ZeroDivisionError("nothing to draw")

    with monkeypatch.context() as patch:
        patch.setattr(serving_view, "batches", broken)
        click(view, "simulate")
    assert (
        "nothing to draw" in view.controller.page.error.value and not view.controller.page.buttons["simulate"].disabled
    )
    click(view, "simulate")
    assert "Naive padding" in view.controller.page._table.value


def test_a_length_may_be_a_number() -> None:
    view = ServingView(TOY_DECODER, requests=5, lengths=16, new_tokens=2)
    view.press("simulate")
    [first, _] = view.wait().values()
    view.close()
    assert {*first.traffic.lengths} == {16} and {*first.traffic.new_tokens} == {2}


def test_a_table_of_another_kind_brings_its_fields_and_policies(view: ServingView) -> None:
    """A page that began with an encoder's example measures a model that generates."""
    page = view.controller.page
    assert page.form["new_tokens"].layout.display == "none"
    page.put_table(TOY_DECODER)
    assert page.form["new_tokens"].layout.display is None
    assert page.fields["new_tokens"].value == usual_lengths(TOY_DECODER)
    assert all("continuous_batching" in box.options for box in page._policies)


def test_a_rate_that_was_asked_for_stays_with_another_table() -> None:
    view = ServingView(TURBO_2060, rate=7.0, requests=20, lengths="5-30")
    view.controller.page.put_table(TOY_DECODER)
    assert view.controller.page.fields["rate"].value == 7.0
    view.close()


def test_a_new_view_closes_the_old_one_unless_it_is_asked_for_wrongly() -> None:
    first = ServingView(TURBO_2060, requests=20)
    first.start()
    wrong: list[tuple[Any, dict[str, Any], type[EETError]]] = [
        ("no-such-table", {}, CostError),
        (TURBO_2060, {"rate": -1.0}, TrafficError),
        (TURBO_2060, {"cv": float("inf")}, TrafficError),
        (TURBO_2060, {"requests": MOST_REQUESTS + 1}, TrafficError),
        (TURBO_2060, {"requests": 0}, TrafficError),
        (TURBO_2060, {"rate": "many"}, TrafficError),
        (TURBO_2060, {"seed": 2**53 + 1}, TrafficError),  # a page would make it 2**53
        (TURBO_2060, {"lengths": "1-9000"}, CostError),
        (TURBO_2060, {"policies": []}, ScheduleError),
        (TURBO_2060, {"policies": "continuous_batching"}, ScheduleError),
    ]
    for table, options, error in wrong:
        with pytest.raises(error):
            ServingView(table, **options)
    first.press("simulate")
    assert first.wait()
    second = ServingView(TOY_DECODER, requests=20, lengths="5-30", new_tokens="2-10")
    with pytest.raises(EETError, match="closed"):
        first.press("simulate")
    with pytest.raises(EETError, match="no action 'simulat'"):
        second.press("simulat")
    second.press("simulate")
    assert list(second.wait()) == ["Packed, token budget", "Continuous batching"]
    assert all(f">{head}<" in second.controller.page._table.value for head in ("end to end p50 ms", "TTFT p99 ms"))
    second.close()
    second.close()
    assert eet_threads() == [] and not second.busy


def test_a_film_has_each_pass_and_each_request() -> None:
    traffic = make_traffic(80, Gamma(100.0), Uniform(5, 90))
    served = simulate_traffic(traffic, NaivePadding(max_rows=4), TURBO_2060)
    film = film_lane("naive", "#000", served)
    passes = np.frombuffer(film["passes"], "<f4").reshape(-1, 6)
    assert len(passes) == len(served.passes) and not film["cut"]
    np.testing.assert_allclose(passes[:, 1], served.passes.end_ms, rtol=1e-6)
    assert np.array_equal(passes[:, 4], served.passes.pads) and passes[:, 5].sum() == 80
    ended, took = (np.frombuffer(film[key], "<f4") for key in ("ended", "took"))
    assert (np.diff(ended) >= 0).all() and took.sum() == pytest.approx(served.e2e_ms.sum(), rel=1e-5)
    begun, came = (np.frombuffer(film[key], "<f4") for key in ("begun", "came"))
    at = float(np.median(came))
    assert (came <= at).sum() - (begun <= at).sum() == served.queued(np.array([at]))[0]
    widget = ServingFilm()
    widget.show({"naive": served}, "title")
    assert widget.film["begin"] and len(widget.film["lanes"]) == 1
    widget.stop()
    assert widget.film == {}
    widget.close()


def test_a_long_film_is_cut() -> None:
    traffic = make_traffic(MOST_PASSES + 5, Gamma(1e5), Uniform(5, 9))
    served = simulate_traffic(traffic, NaivePadding(max_rows=1), TURBO_2060)
    film = film_lane("naive", "#000", served)
    assert film["cut"] and len(film["passes"]) == MOST_PASSES * 6 * 4
