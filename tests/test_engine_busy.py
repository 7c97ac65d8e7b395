"""One batch at a time: who comes to an engine that is generating is told so, and its run goes on unharmed."""

from __future__ import annotations

import threading

import pytest
from test_engine import batch

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import Cancelled, EngineBusy, PromptError
from eet_lab.technique import Recipe

PROMPTS = batch(3, 2, 9)
ASKED = {
    "generate": lambda engine: engine.generate([[1, 2]], Settings(2)),
    "reserve": lambda engine: engine.reserve(2, 4, Settings(2)),
    "close": lambda engine: engine.close(),
}


@pytest.fixture(params=["baseline", "all"])
def engine(tiny, request):
    return Engine(tiny.decoder, Recipe.parse(request.param).parts)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("where", ["on_step", "another thread"])
def test_a_second_call_is_refused_and_the_first_goes_on(engine, asked, where):
    expected = engine.generate(PROMPTS, Settings(6)).tokens
    told = []

    def ask():
        with pytest.raises(EngineBusy) as caught:
            ASKED[asked](engine)
        told.append(str(caught.value))

    def on_step(event):
        if where == "on_step":
            return ask()
        other = threading.Thread(target=ask)
        other.start()
        other.join()

    run = engine.generate(PROMPTS, Settings(6), on_step=on_step)
    assert run.tokens == expected and len(told) == len(run.step_ms)
    assert f"{asked} cannot begin: this engine is generating" in told[0] and "build another Engine" in told[0]
    ASKED[asked](engine)  # free again


@pytest.mark.parametrize("error", [ZeroDivisionError, PromptError, Cancelled])
def test_an_engine_is_free_again_after_a_run_that_broke_off(engine, error):
    """Whatever `on_step` raises is its own, and neither a refusal nor a stop of the engine's."""

    def broken(event):
        if event.index == 1:
            raise error("of on_step")

    for _ in range(2):
        with pytest.raises(error, match="of on_step"):
            engine.generate(PROMPTS, Settings(6), on_step=broken)
    assert engine.generate([[1]], Settings(2)).num_tokens == 2


def test_an_engine_may_be_used_by_one_thread_after_another(engine):
    found = []
    threads = [threading.Thread(target=lambda: found.append(engine.generate(PROMPTS, Settings(4)))) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len({run.tokens for run in found}) == 1 == len(found) - 2


def test_a_refused_close_leaves_what_is_reserved(tiny):
    engine = Engine(tiny.decoder, Recipe.parse("all").parts)
    engine.reserve(3, 16, Settings(6))
    slots = engine._all_slots.copy()

    def on_step(event):
        with pytest.raises(EngineBusy):
            engine.close()

    engine.generate(PROMPTS, Settings(6), on_step=on_step)
    assert engine._reserved == (3, 22) and slots.items() <= engine._all_slots.items()


def test_requests_of_a_thread_that_has_ended_go_on_in_another(tiny):
    """Nobody could step them any more; a thread that lives keeps its own."""
    parts = Recipe.parse("all,continuous_batching").parts
    engine, requests = Engine(tiny.decoder, parts), []
    thread = threading.Thread(target=lambda: requests.append(engine.add([1, 2], Settings(6))) or engine.step())
    thread.start()
    thread.join()
    requests.append(engine.add([3], Settings(6)))
    while not all(request.done for request in requests):
        engine.step()
    alone = Engine(tiny.decoder, parts).generate([[1, 2], [3]], Settings(6))
    assert [tuple(request.generated) for request in requests] == list(alone.tokens)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_request_that_an_engine_drops_is_finished(tiny, num_steps):
    engine = Engine(tiny.decoder, Recipe.parse("all,continuous_batching").parts)
    request = engine.add([1, 2], Settings(6))
    for _ in range(num_steps):
        engine.step()
    engine.close()
    assert (request.status, request.finish_reason) == ("finished", "cancelled")


def test_only_the_thread_whose_requests_are_in_flight_ends_them(tiny):
    engine = Engine(tiny.decoder, Recipe.parse("all,continuous_batching").parts)
    request = engine.add([1, 2], Settings(6))
    engine.step()

    def close():
        with pytest.raises(EngineBusy, match="close was called on the thread 'other', but the requests in flight") as e:
            engine.close()
        told.append(e.value)

    told: list[EngineBusy] = []
    other = threading.Thread(target=close, name="other")
    other.start()
    other.join()
    assert told and request.status != "finished"
    while not request.done:
        engine.step()
    assert tuple(request.generated) == Engine(tiny.decoder).generate([[1, 2]], Settings(6)).tokens[0]
    other = threading.Thread(target=engine.close)  # nothing is in flight
    other.start()
    other.join()
    assert engine.slots is None
