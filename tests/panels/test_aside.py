"""What is asked beside the page, and how a run is left alone by it."""

from __future__ import annotations

import threading
import time

from eet_lab.panels import Workbench
from eet_lab.panels.aside import Aside
from panels.driving import answers, do, turn_until


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
