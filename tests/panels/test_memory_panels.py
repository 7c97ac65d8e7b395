"""What the workbench shows of memory: the tab, the bar of parts, and what is asked beside the page."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest

from eet_lab.bench.foresee import CompareForecast
from eet_lab.engine.engine import Engine
from eet_lab.engine.forecast import Forecast
from eet_lab.engine.settings import Settings
from eet_lab.memory import PLANNERS, DriverCalls, Lifetime
from eet_lab.monitor import Sample
from eet_lab.panels import Workbench, jobs, worker
from eet_lab.panels.aside import Answer, Aside
from eet_lab.panels.forecast_line import ForecastLine, Foreseen, in_html
from eet_lab.panels.memory_bar import bar, held_now
from eet_lab.panels.memory_tab import MemoryTab
from eet_lab.panels.outputs import PLOTLY
from eet_lab.panels.run_memory import KVUse, RunMemory, TorchCalls, TorchCounter
from eet_lab.technique import Recipe
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


def test_who_is_held_begins_nothing_and_who_waits_sees_the_end(aside: Aside) -> None:
    begun, ended, stop, order = threading.Event(), threading.Event(), threading.Event(), list[str]()
    aside.ask("slow", 0, lambda: (begun.set(), ended.wait(5), order.append("slow")))
    assert begun.wait(5)
    aside.hold()
    aside.ask("next", 0, lambda: order.append("next"))
    stop.set()
    assert not aside.wait_quiet(stop), "given up"
    waiting = threading.Thread(target=lambda: order.append(f"quiet: {aside.wait_quiet(threading.Event())}"))
    waiting.start()
    ended.set()
    waiting.join(5)
    assert order == ["slow", "quiet: True"]
    aside.resume()
    assert len(answers(aside, 2)) == 2
    assert order[-1] == "next"


def test_a_run_begins_when_nothing_is_computed_beside_it(bench: Workbench) -> None:
    """And the page goes on meanwhile: it is the run that waits."""
    turn_until(bench, lambda: bench.desk.beside.forecast.foreseen is not None)
    begun, end, ran = threading.Event(), threading.Event(), []
    bench.desk.beside._aside.ask("slow", 0, lambda: (begun.set(), end.wait(20)))
    bench.desk.beside._shown_by["slow"] = lambda answer: ran.append(bench.desk.live.latency.points)
    assert begun.wait(5)
    bench.desk.put("run")
    turn_until(bench, lambda: "beside the page" in bench.desk.status.text)
    for _ in range(20):
        bench.desk.tick()
        time.sleep(0.005)
    assert bench.result is None and not bench.desk.live.latency.points
    end.set()
    turn_until(bench, lambda: bench.result is not None and bench.desk.idle)
    assert ran
    do(bench, "setting", "max_new_tokens", 20)
    line = bench.desk.beside.forecast
    turn_until(bench, lambda: line.foreseen and line.foreseen.run.new_tokens == 20)


def test_a_run_that_waits_can_be_stopped(bench: Workbench) -> None:
    begun, end = threading.Event(), threading.Event()
    turn_until(bench, lambda: bench.desk.beside.forecast.foreseen is not None)
    bench.desk.beside._aside.ask("slow", 0, lambda: (begun.set(), end.wait(20)))
    bench.desk.beside._shown_by["slow"] = lambda answer: None
    assert begun.wait(5)
    bench.desk.put("compare")
    turn_until(bench, lambda: bench.desk.busy)
    do(bench, "stop")
    assert "compare stopped" in bench.desk.status.text and bench.result is None
    end.set()


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
    assert len(tab.picture.outputs) == 2, "the strip, and every planner's footprint"
    counts = {name: len(tab._runs["selection"].plan(name).lifetimes) for name in tab.phase.options}
    assert counts["both"] == counts["prefill"] + counts["decode"] > 0
    do(bench, "memory_pass", "both")
    assert figure(tab).startswith(f"{counts['both']} tensors")
    assert "calls of the arena" in tab._facts.value
    do(bench, "tab", "overview")
    assert tab.picture.outputs == (), "a saved notebook need not carry it"


def test_a_comparison_has_both_runs_and_a_recording_none(bench: Workbench) -> None:
    do(bench, "compare")
    do(bench, "tab", "memory")
    tab, view = bench.desk.shelf.view.memory, bench.desk.shelf.view
    assert list(tab.run.options) == ["baseline", "selection"]
    do(bench, "memory_run", "baseline")
    assert "fresh tensors" in tab._words.value
    assert tab.planner.options[0] == "as an arena would"
    assert "growing" in tab._facts.value and "static" in tab._facts.value
    assert len(view.figure.outputs) == 1
    do(bench, "save")
    view.files.value = str(next(bench.desk.shelf.files.folder.glob("*.json")))
    do(bench, "open")
    do(bench, "tab", "memory")
    assert tab.box.layout.display == "none" and len(view.figure.outputs) == 1


def test_torchs_calls_of_the_driver_are_those_of_each_first_run(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"num_device_alloc": 100, "num_device_free": 100}

    def generate(self: Engine, *args: Any, **kwargs: Any) -> Any:
        calls["num_device_alloc"] += 3 if self.memory.generation == 0 else 1
        return inner(self, *args, **kwargs)

    inner = Engine.generate
    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr("torch.cuda.memory_stats", lambda: calls)
    monkeypatch.setattr("eet_lab.panels.jobs.TorchCounter", lambda device: TorchCounter("cuda"))
    model, recipe = bench.model, Recipe.parse("pre_padding,memory_reuse", "cpu")

    def kept(job: Any, *more: Any) -> list[TorchCalls]:
        events: SimpleQueue[Any] = SimpleQueue()
        job(model, ["5 6"], recipe, Settings(4), *more)(worker.Feed(events), threading.Event())
        told = [events.get() for _ in range(events.qsize())]
        return [event.memory for event in told if isinstance(event, worker.Kept)]

    [run] = kept(jobs.run)
    assert run.torch_calls == TorchCalls(3, 0)
    assert run.facts()["torch's calls of the driver in the first run"] == "3 allocations, 0 frees"
    both = kept(jobs.compare, 2)
    assert [each.torch_calls for each in both] == [TorchCalls(3, None)] * 2
    assert "Compare empties torch's cache" in both[0].facts()["torch's calls of the driver in the first run"]


def test_after_a_run_the_bar_shows_it_beside_what_is_held_now(bench: Workbench) -> None:
    do(bench, "setting", "max_new_tokens", 100)
    samples = [
        Sample(t, {"weights_bytes": 10.0, "planned_bytes": p, "process_rss_bytes": 50.0}, "psutil")
        for t, p in ((0.0, 0.0), (0.1, 7.0), (0.2, 0.0))
    ]
    live = bench.desk.live
    for count, shown in ((1, False), (2, False), (3, True)):
        live.push_samples(samples[count - 1 : count], 0.0)
        live.snapshot()
        assert ("In the last run" in live.held.value) == shown
    assert "KV cache and activations" in live.held.value.split("Now, between runs")[0]
    assert "KV cache and activations" not in live.held.value.split("Now, between runs")[1]


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


def test_planners_of_the_result_before_are_not_shown_for_this_one() -> None:
    """Its runs and passes have the same names, and its question may be answered late."""

    class Questions:
        def __init__(self) -> None:
            self.asked: list[tuple[str, Any, Any]] = []

        def ask(self, name: str, key: Any, work: Any) -> None:
            self.asked.append((name, key, work))

    questions = Questions()
    tab = MemoryTab(lambda *command: None, questions)
    for num_bytes in (256, 25600):
        tab.put_up({"selection": kept(num_bytes)})
        tab.open()
        tab.turn(busy=False)
    late, present = (Answer(name, key, work()) for name, key, work in questions.asked)
    tab.answered(late)
    assert not tab._placed
    tab.answered(present)
    assert {each.plan.lower_bound_bytes for each in tab._placed["selection", "prefill"] if each.plan} == {25600}


def kept(num_bytes: int) -> RunMemory:
    """A run with one tensor in each pass."""
    plan = PLANNERS["greedy_by_size"]([Lifetime("x", num_bytes, 0, 1)])
    kv = KVUse("static", 1, 1, 0, 0)
    return RunMemory("memory_reuse", {"prefill": plan, "decode": plan}, True, 1, num_bytes, kv, DriverCalls(), None)


def told(free: int, **changes: Any) -> Forecast:
    numbers = dict(num_rows=4, prompt_tokens=50, new_tokens=100, weight_bytes=50, kv_bytes=30, activation_bytes=15)
    numbers |= dict(growth_bytes=0, workspace_bytes=5, largest_batch=3, largest_context=90)
    return Forecast(**{**numbers, "free_bytes": free, **changes})


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
    assert "eet-bad" in html and "left:80.000%" in html
    assert "memory_reuse" not in in_html(told(80, growth_bytes=9)), "whether that needs less was not foreseen"
    assert "weights alone" in in_html(told(40))
    assert "Not even one prompt" in in_html(told(80, largest_batch=0, largest_context=0))


def test_a_comparison_that_does_not_fit_is_told_beside_a_run_that_does() -> None:
    compare = CompareForecast(engine_bytes=150, check_bytes=40, workspace_bytes=5)
    fits, tight = in_html(told(200), compare), in_html(told(120), compare)
    assert "Compare fits too: 195 bytes." in fits and "eet-told eet-good" in fits
    assert "Run fits: 100 bytes of 120 bytes." in tight and "eet-told eet-warn" in tight
    assert "Compare does not: it needs 195 bytes, 75 bytes too much." in tight
    assert "150 bytes: both engines" in tight and "40 bytes: what the check" in tight and "Ladder" in tight
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


def figure(tab: Any) -> str:
    return str(tab.picture.outputs[0]["data"][PLOTLY]["layout"]["title"]["text"])
