"""What is asked beside the page, and how a run is left alone by it."""

from __future__ import annotations

import threading
import time

import pytest

from eet_lab.workbench import Workbench
from eet_lab.workbench.threads import Answer, Background, Receiver
from workbench.driving import answers, ask, do, turn, turn_until


def slider(answer: Answer) -> None:
    """Asks in the background, and is told."""


def slow(answer: Answer) -> None:
    """Asks for what takes long."""


def test_only_the_newest_question_of_an_asker_is_answered(background: Background) -> None:
    done: list[int] = []
    for number in range(20):
        background.ask(slider, number, lambda number=number: done.append(number) or number, after_s=0.05)
    assert not background.idle
    assert [(a.to, a.key, a.value) for a in answers(background, 1)] == [(slider, 19, 19)]
    assert done == [19] and background.idle


def test_an_error_is_an_answer_and_the_thread_lives_on(background: Background) -> None:
    background.ask(slider, 0, lambda: 1 / 0)
    [failed] = answers(background, 1)
    assert isinstance(failed.error, ZeroDivisionError)
    background.ask(slider, 1, threading.current_thread)
    [answer] = answers(background, 1)
    assert answer.value.name == "eet-background"


def test_who_is_held_begins_nothing_and_who_waits_sees_the_end(background: Background) -> None:
    begun, ended, stop, order = threading.Event(), threading.Event(), threading.Event(), list[str]()
    background.ask(slow, 0, lambda: (begun.set(), ended.wait(5), order.append("slow")))
    assert begun.wait(5)
    background.hold()
    background.ask(slider, 0, lambda: order.append("next"))
    stop.set()
    assert not background.wait_quiet(stop), "given up"
    waiting = threading.Thread(target=lambda: order.append(f"quiet: {background.wait_quiet(threading.Event())}"))
    waiting.start()
    ended.set()
    waiting.join(5)
    assert order == ["slow", "quiet: True"]
    background.resume()
    assert len(answers(background, 2)) == 2
    assert order[-1] == "next"


@pytest.mark.parametrize("foresees", [True])
def test_a_run_begins_when_nothing_is_computed_beside_it(bench: Workbench) -> None:
    """And the page goes on meanwhile: it is the run that waits."""
    turn_until(bench, lambda: bench.controller.background.idle)
    begun, end, ran = threading.Event(), threading.Event(), []
    points: Receiver = lambda answer: ran.append(bench.controller.page.live.latency.points)  # noqa: E731
    bench.controller.background.ask(points, 0, lambda: (begun.set(), end.wait(20)))
    assert begun.wait(5)
    bench.controller.put(ask.run())
    turn_until(bench, lambda: "in the background" in bench.controller.status.text)
    for _ in range(20):
        turn(bench)
        time.sleep(0.005)
    assert bench.result is None and not bench.controller.page.live.latency.points
    end.set()
    turn_until(bench, lambda: bench.result is not None and bench.controller.idle)
    assert ran
    do(bench, ask.setting("max_new_tokens", 20))
    fits = bench.controller.fits
    turn_until(bench, lambda: fits._forecasts and fits._forecasts.run.new_tokens == 20)


def test_a_run_that_waits_can_be_stopped(bench: Workbench) -> None:
    begun, end = threading.Event(), threading.Event()
    turn_until(bench, lambda: bench.controller.background.idle)
    bench.controller.background.ask(slow, 0, lambda: (begun.set(), end.wait(20)))
    assert begun.wait(5)
    bench.controller.put(ask.compare())
    turn_until(bench, lambda: bench.controller.busy)
    do(bench, ask.stop())
    assert "Compare was stopped" in bench.controller.status.text and bench.result is None
    end.set()
