"""What goes wrong while requests are served: clients that leave, engines that fail, queues that are full.

All with a front in this process, into which a test can look; `test_front.py` has the other one.
"""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import eet_lab
from eet_lab.engine.slot_passes import SlotPasses
from eet_lab.models import Model
from eet_lab.ops.types import Choice
from eet_lab.serving.body_framing import MOST_HEAD
from eet_lab.serving.generator import Generator
from eet_lab.serving.handle import ServerHandle
from eet_lab.serving.jobs import Job, News
from eet_lab.technique import Recipe

from .conftest import PAGED, PROMPT, Raw, Script, eventually, free_pages, numbers

LONG = {"model": "demo", "prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def served(demo: Model) -> Iterator[ServerHandle]:
    served = eet_lab.serve(demo, PAGED, front="thread").wait_until_up(60)
    yield served
    served.stop()


def short(client: openai.OpenAI) -> str:
    return client.completions.create(model="demo", prompt="The", max_tokens=4, temperature=0).choices[0].text


@pytest.mark.parametrize(
    ("stream", "more"), [(True, b""), (False, b""), (False, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")]
)
def test_a_client_that_leaves_frees_its_pages_within_a_step(
    served, client, generator, monkeypatch, slowed, stream, more
):
    """Also one that has sent its next request already."""
    before, events, told = free_pages(generator), list[str](), numbers(served)
    step, cancel = generator.engine.step, generator.engine.cancel
    monkeypatch.setattr(generator.engine, "step", lambda: (events.append("step"), step())[1])
    monkeypatch.setattr(generator.engine, "cancel", lambda request: (events.append("cancel"), cancel(request))[1])
    leave = generator.leave
    monkeypatch.setattr(generator, "leave", lambda answer: (events.append("left"), leave(answer))[1])
    raw = Raw(served.url).post(TEXT, {**LONG, "stream": stream})
    eventually(lambda: free_pages(generator) < before)
    raw.send(more)
    time.sleep(0.05)  # it is there while the server listens for nothing but the client's leave
    raw.close()
    eventually(lambda: free_pages(generator) == before)
    between = events[events.index("left") : events.index("cancel")]
    assert between.count("step") <= 1, "the step that was under way, and no other"
    assert len(events) < 100, "it was not run to its end"
    assert eventually(lambda: served._server.service.admission.num_inside == 0)
    now = numbers(served)
    grown = {name: now[name] - told.get(name, 0) for name in now}
    assert grown['vllm:request_success_total{finished_reason="abort",model_name="demo"}'] == 1
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"):
        assert grown[f'vllm:{name}_count{{model_name="demo"}}'] == 0, "it was not answered"
    assert short(client)


def test_what_a_client_sends_ahead_is_read_up_to_a_bound(served, generator, slowed):
    """It waits in the client's socket until the answer before it is there."""
    before, known = free_pages(generator), set(served._server._uvicorn.server_state.connections)
    raw = Raw(served.url).post(TEXT, LONG)
    eventually(lambda: free_pages(generator) < before)
    [connection] = served._server._uvicorn.server_state.connections - known
    raw.socket.settimeout(1)
    with pytest.raises(TimeoutError):
        raw.send(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" * 500_000)
    assert connection.flow.read_paused
    assert len(connection._held) < MOST_HEAD + 2**18, "and what asyncio reads at once"
    raw.close()
    connection._loop.call_soon_threadsafe(connection.transport.abort)
    eventually(lambda: free_pages(generator) == before)


def test_one_that_leaves_does_not_disturb_the_others(served, client, demo, slowed):
    alone = eet_lab.generate(demo, [PROMPT], max_new_tokens=20).texts[0]
    raw = Raw(served.url).post(TEXT, {**LONG, "stream": True})
    raw.until(b"data: ")
    with ThreadPoolExecutor() as pool:
        other = pool.submit(client.completions.create, model="demo", prompt=PROMPT, max_tokens=20, temperature=0)
        raw.close()
        assert other.result().choices[0].text == alone


def test_an_engine_that_fails_in_mid_step(served, client, generator, monkeypatch, slowed, caplog):
    """Those that it served get 500 with an id, and the next ones are served by a new engine."""
    right, broken = short(client), generator.engine
    step, build, held, told_at = broken.step, generator._build, [], []

    def fail():
        if len(generator._jobs) == 2:
            tensor = torch.empty(8)
            held.append(weakref.ref(tensor))
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step()

    def build_later():
        assert held[0]() is None, "the new engine needs the room"
        eventually(lambda: told_at)
        build()

    monkeypatch.setattr(broken, "step", fail)
    monkeypatch.setattr(generator, "_build", build_later)
    stream = iter(client.completions.create(model="demo", prompt="The", max_tokens=500, temperature=0, stream=True))
    assert next(stream).choices[0].text
    with pytest.raises(openai.InternalServerError, match=r"engine failed \(RuntimeError\)") as told:
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, temperature=0)
    told_at.append("and not after a new engine was built")
    assert told.value.status_code == 500 and told.value.code.startswith("error-") and told.value.request_id
    assert "illegal memory access" in caplog.text and told.value.code in caplog.text, "the log has the reason"
    with pytest.raises(openai.APIError, match="engine failed"):  # it had begun, so its status was 200
        list(stream)
    assert short(client) == right and generator.engine is not broken
    assert eventually(lambda: served._server.service.admission.num_inside == 0)


def test_memory_that_is_full_for_one_who_joins_ends_all_that_the_engine_had(
    served, client, generator, monkeypatch, slowed
):
    """It frees itself then: what was in flight is lost, and so is the room that was reserved for the next ones."""
    right, broken, make_room = short(client), generator.engine, SlotPasses.make_room

    def full(passes, choice, tells_logprobs):
        if choice is Choice.LIMITED:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        make_room(passes, choice, tells_logprobs)

    monkeypatch.setattr(SlotPasses, "make_room", full)
    stream = iter(client.completions.create(model="demo", prompt="The", max_tokens=500, temperature=0, stream=True))
    assert next(stream).choices[0].text
    began = time.monotonic()
    with pytest.raises(openai.InternalServerError, match=r"engine failed \(OutOfMemory\)"):
        client.completions.create(model="demo", prompt="The", max_tokens=4, top_p=0.5)
    with pytest.raises(openai.APIError, match=r"engine failed \(OutOfMemory\)"):
        list(stream)
    assert time.monotonic() - began < 10
    assert short(client) == right and generator.engine is not broken
    assert generator.engine._reserved == (4, generator._columns)
    assert eventually(lambda: served._server.service.admission.num_inside == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_what_was_answered_leaves_the_collector_nothing_to_find(served, stream):
    """Garbage in cycles piles up until the collector walks all of it, and nothing is answered meanwhile."""
    raw, body = Raw(served.url), {"model": "demo", "prompt": "The", "max_tokens": 3, "temperature": 0, "stream": stream}

    def ask(times: int) -> None:
        for _ in range(times):
            raw.post(TEXT, body).until(b"0\r\n\r\n" if stream else b"total_tokens")
        eventually(lambda: served._server.service.admission.num_inside == 0)

    ask(1)
    gc.collect()
    gc.disable()
    try:
        ask(20)
        assert gc.collect() < 20
    finally:
        gc.enable()
        raw.close()


def test_nothing_ends_the_engines_thread(client, generator, slowed):
    """Whatever goes wrong on it, those in flight are told, and the next ones are served."""
    stream = iter(client.completions.create(model="demo", prompt="The", max_tokens=500, temperature=0, stream=True))
    assert next(stream).choices[0].text
    generator.command(lambda: 1 / 0)
    with pytest.raises(openai.APIError, match="ZeroDivisionError"):
        list(stream)
    assert short(client)


@pytest.mark.parametrize("front", ["thread", "process"])
def test_an_engine_that_cannot_be_built_again(demo, monkeypatch, front):
    served = eet_lab.serve(demo, front=front).wait_until_up(60)
    generator = served._server.service.generator

    def fail(*args):
        raise RuntimeError("the device is gone")

    try:
        monkeypatch.setattr(generator.engine, "step", fail)
        monkeypatch.setattr(generator, "_build", fail)
        body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
        assert httpx.post(f"{served.url}{TEXT}", json=body).status_code == 500
        health = eventually(lambda: (told := httpx.get(f"{served.url}/health")).status_code == 503 and told)
        for answer in (health, httpx.post(f"{served.url}{TEXT}", json=body)):
            assert answer.status_code == 503 and "engine is lost" in answer.json()["error"]["message"]
    finally:
        served.stop()


def test_a_client_that_does_not_read_slows_nobody(served, client, demo, scripted):
    admission = served._server.service.admission
    script = scripted(demo.encode(PROMPT) * 250)
    # Connections inherit it: else the machine would take all that is sent.
    served._server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    lazy = [Raw(served.url).post(TEXT, {**LONG, "prompt": "a", "n": 64, "stream": True}) for _ in range(2)]
    eventually(lambda: len(script.requests) == 128 and all(request.done for request in script.requests), 30)
    start = time.monotonic()
    told = client.completions.create(model="demo", prompt="a", max_tokens=len(demo.encode(PROMPT)), temperature=0)
    assert told.choices[0].text == PROMPT and time.monotonic() - start < 5
    eventually(lambda: admission.num_inside <= 2)
    time.sleep(0.1)
    assert admission.num_inside == 2, "they have not got all: the server must have been waiting for them"
    for raw in lazy:
        assert b"[DONE]" in raw.until(b"[DONE]")
        raw.close()
    eventually(lambda: admission.num_inside == 0)


@pytest.fixture
def full(demo, monkeypatch):
    """A server whose queue is full: its engine stands still, and two requests wait. `go()` lets it go on."""
    served = eet_lab.serve(demo, PAGED, front="thread", max_queued_requests=2, drain_s=20).wait_until_up(60)
    generator, gate = served._server.service.generator, threading.Event()
    step = generator.engine.step
    monkeypatch.setattr(generator.engine, "step", lambda: (gate.wait(30), step())[1])
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(httpx.post, f"{served.url}{TEXT}", json=body, timeout=60) for _ in range(2)]
        eventually(lambda: served._server.service.admission.num_queued == 2)
        yield served, gate.set, waiting
        gate.set()
    served.stop()


def test_a_full_queue_refuses_before_it_reads(full, demo, monkeypatch):
    served, go, waiting = full
    monkeypatch.setattr("eet_lab.serving.gate.read_body", lambda *words: pytest.fail("the body was read"))
    body, took = {"prompt": "word " * 20_000}, []
    with httpx.Client() as client:
        for _ in range(8):
            start = time.perf_counter()
            answer = client.post(f"{served.url}{TEXT}", json=body)
            took.append(time.perf_counter() - start)
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert error["type"] == "rate_limit_error" and error["code"] == "too_many_queued_requests"
    assert min(took) < 0.01, took
    monkeypatch.setattr("eet_lab.serving.connection.LINGER_S", 0.1)
    connections = served._server._uvicorn.server_state.connections
    eventually(lambda: len(connections) == 2)
    for length, is_kept in ((9000, True), (900_000, False)):
        raw = Raw(served.url)
        raw.send(b"POST %s HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n" % TEXT.encode())
        raw.send(b"content-length: %d\r\n\r\n{" % length)
        head = raw.until(b"}}")
        assert b" 429 " in head and (b"connection: close" in head) is not is_kept
        if is_kept:
            raw.send(b"a" * (length - 1) + b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert raw.until(b'"demo"}').startswith(b"HTTP/1.1 200 ")
            raw.close()
        else:
            assert raw.until(b"") == b""
        eventually(lambda: len(connections) == 2)
    go()
    assert [each.result().status_code for each in waiting] == [200, 200]
    assert eventually(lambda: served._server.service.admission.num_queued == 0)
    assert httpx.post(f"{served.url}{TEXT}", json={"prompt": "a", "max_tokens": 1, "temperature": 0}).status_code == 200


def test_a_draining_server_finishes_what_it_accepted(full):
    served, go, waiting = full
    stopping = threading.Thread(target=served.stop)
    stopping.start()
    eventually(lambda: served._server.service.admission.is_draining)
    refused = httpx.post(f"{served.url}{TEXT}", json={"prompt": "a"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
    assert httpx.get(f"{served.url}/health").status_code == 503
    go()
    assert [each.result().status_code for each in waiting] == [200, 200]
    stopping.join(30)
    assert served.state == "stopped"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/health")


@given(lives=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30), data=st.data())
def test_a_job_ends_at_its_deadline_whenever_it_joined(demo, lives, data):
    """A deadline counts from the gate, and a body may come late: the order of joining says nothing."""
    now, told = [0.0], list[News]()
    generator = Generator(demo, Recipe.parse(PAGED, "cpu"), 64)
    generator.receive = told.extend
    generator.engine = Script([1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now[0])
        for number, (deadline, leaves_first) in enumerate(lives):
            generator._join(Job([1], eet_lab.Settings(4), 0, number, float(deadline)), now[0])
            if leaves_first:
                generator._leave(data.draw(st.integers(0, number)))
        waiting = {job.answer: job.deadline for job in generator._jobs.values()}
        for now[0] in (3.0, 6.0, 9.0):
            told.clear()
            generator._end_late()
            late = {answer for answer, deadline in waiting.items() if deadline <= now[0]}
            assert sorted(news.answer for news in told) == sorted(late)
            assert all(news.error.status == 504 for news in told)
            waiting = {answer: deadline for answer, deadline in waiting.items() if answer not in late}
            assert {job.answer for job in generator._jobs.values()} == set(waiting)
    assert not generator._jobs and not generator._requests and not generator._queued


def test_a_server_stops_at_the_end_of_its_block(demo):
    """Also where nobody reads what it says."""

    def told():
        raise BrokenPipeError

    with eet_lab.serve(demo, PAGED, front="thread") as served:
        assert httpx.get(f"{served.wait_until_up(60).url}/health").status_code == 200
        served._server.told_drain = told
    assert served.state == "stopped"


def test_what_takes_too_long_ends(demo, monkeypatch):
    """By its deadline, and at the end of the drain."""
    served = eet_lab.serve(demo, PAGED, front="thread", request_s=1.5, drain_s=0.2).wait_until_up(60)
    generator = served._server.service.generator
    before, step = free_pages(generator), generator.engine.step
    monkeypatch.setattr(generator.engine, "step", lambda: (time.sleep(0.01), step())[1])
    with ThreadPoolExecutor() as pool:
        late = httpx.post(f"{served.url}{TEXT}", json=LONG, timeout=30)
        assert late.status_code == 504 and late.json()["error"]["type"] == "timeout_error"
        eventually(lambda: free_pages(generator) == before)
        streamed = httpx.post(f"{served.url}{TEXT}", json={**LONG, "stream": True}, timeout=30)
        *pieces, why, end = streamed.text.strip().split("\n\n")
        assert pieces and json.loads(why.removeprefix("data: "))["error"]["code"] == "timeout" and end == "data: [DONE]"
        eventually(lambda: free_pages(generator) == before)
        cut = pool.submit(httpx.post, f"{served.url}{TEXT}", json=LONG, timeout=30)
        eventually(lambda: free_pages(generator) < before)
        served.stop()
        assert cut.result().status_code == 503
