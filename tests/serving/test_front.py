"""A front in a process of its own: what it needs, what it and the engine tell, and what is left when one dies."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import openai
import psutil
import pytest

import eet_lab
from eet_lab.errors import SetupError
from eet_lab.models.tokenizer import Tokenizer
from eet_lab.scheduling import TokenLogprobs
from eet_lab.serving import front_process
from eet_lab.serving.errors import ApiError
from eet_lab.serving.front_process import RemoteEngine
from eet_lab.serving.jobs import Job, Load, News
from eet_lab.serving.lifecycle import listen, url_of
from eet_lab.serving.options import Options
from eet_lab.serving.server import Server
from eet_lab.serving.service import Service
from eet_lab.serving.split_server import SplitServer
from eet_lab.serving.wire import ENCODER, HELLO, JOB, TO_ENGINE, TO_FRONT, Channel, Hello, ToEngine, ToFront

from .conftest import PAGED, PROMPT, Raw, eventually, free_pages, numbers

LONG = {"model": "demo", "prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
TEXT = "/v1/completions"
SHORT = {"model": "demo", "prompt": "The", "max_tokens": 4, "temperature": 0}


def front_of(served) -> subprocess.Popen:
    assert isinstance(served._server, SplitServer) and served._server._front is not None
    return served._server._front


@pytest.mark.parametrize("module", ["front_process", "replicas_front"])
def test_a_front_loads_neither_torch_nor_transformers(module):
    look = f"import sys, eet_lab.serving.{module}; print({{'torch', 'transformers'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="Linux has it")
def test_a_front_may_have_more_connections_open_than_a_shell_lets_it(demo):
    kind = resource.RLIMIT_NOFILE
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (min(1024, before[1] - 1), before[1]))
    try:
        served = eet_lab.serve(demo, PAGED).wait_until_up(60)
        try:
            eventually(lambda: resource.prlimit(front_of(served).pid, kind)[0] == before[1])
            assert resource.getrlimit(kind)[0] < before[1], "this process is not there for the server alone"
        finally:
            served.stop()
    finally:
        resource.setrlimit(kind, before)


def test_requests_in_flight_do_not_bring_a_fronts_collector():
    """It would walk all of them in vain, and whoever is refused meanwhile waits for it."""
    look = """if True:
        import asyncio, gc, socket
        from eet_lab.serving import front_process

        def run(serving):
            serving.close()
            gc.collect()
            gc.callbacks.append(lambda phase, told: came.append(phase))
            in_flight = [[] for _ in range(10_000)]
            print(came)
            del in_flight
            for _ in range(100_000):  # but what nobody else frees, it still finds
                cycle = []
                cycle.append(cycle)
            print(bool(came))

        came, asyncio.run = [], run
        front_process.main([str(each.detach()) for each in socket.socketpair()])
    """
    told = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
    assert told.stdout == "[]\nTrue\n", told.stderr


def test_frames_bring_what_was_sent(demo):
    async def sent(message, decoder):
        ours, its = map(Channel, socket.socketpair())
        ours.send(message)
        found = decoder.decode(await anext(its.frames()))
        ours.close()
        its.close()
        return found

    async def run():
        settings = eet_lab.Settings(4, temperature=0.5, stop=(1, 2))
        job = Job([1, 2], settings, 1, 7, 2.5)
        asked = await sent(ToEngine([msgspec.Raw(ENCODER.encode(job))], [3], True), TO_ENGINE)
        assert JOB.decode(asked.jobs[0]) == job and asked.leaves == [3] and asked.wants_load
        tokens = News(7, [1], "stop", None, 1.5, [TokenLogprobs(-0.5, ((1, -0.5), (3, -2.0)))])
        told = await sent(ToFront([tokens, News(8, (), None, ApiError(504, "late"), 2.0)]), TO_FRONT)
        first, second = told.news
        assert first == tokens and second.error.body() == ApiError(504, "late").body()
        assert (await sent(ToFront(load=Load(1, 2, 0.5, 3), order="drain"), TO_FRONT)).load == Load(1, 2, 0.5, 3)
        card = Service(demo).card
        hello = await sent(Hello(card, Options(api_key="key")), HELLO)
        assert hello.options == Options(api_key="key") and hello.card.ends == card.ends
        assert hello.card.encode("Return é") == demo.encode("Return é")
        assert hello.card.decode(demo.encode(PROMPT)) == PROMPT

    asyncio.run(run())


def test_a_job_that_no_frame_can_have_fails_alone():
    """Jobs and leaves of the same turn of the loop are one frame."""

    async def run():
        ours, its = map(Channel, socket.socketpair())
        engine, settings = RemoteEngine(ours), eet_lab.Settings(4)
        engine.serve(asyncio.get_running_loop())
        engine.join(Job([1], settings, 0, "left", 2.5))
        engine.leave("left")
        with pytest.raises(OverflowError):
            engine.join(Job([2**70], settings, 0, "wrong", 2.5))
        engine.leave("wrong")
        engine.join(Job([2], settings, 0, "right", 2.5))
        async with asyncio.timeout(5):
            asked = TO_ENGINE.decode(await anext(its.frames()))
        assert [JOB.decode(job).prompt for job in asked.jobs] == [[1], [2]] and asked.leaves == [0]
        ours.close()
        its.close()

    asyncio.run(run())


def test_an_older_tokenizer_keeps_its_first_tokens(demo):
    begun = demo.tokenizer._beginning_with([5])
    written = begun.written()
    assert written.read().encode("The") == begun.encode("The") == [5, *demo.encode("The")]


def test_sending_never_waits_and_keeps_the_order():
    """The other end may read nothing for as long as it likes."""

    async def run():
        ours, its = map(Channel, socket.socketpair())
        reading = asyncio.create_task(anext(ours.frames(), None))  # whose loop sends what is kept
        await asyncio.sleep(0)
        sent = [ToFront([News(number, list(range(500)), None, None, 0.0)]) for number in range(4000)]
        start = time.monotonic()
        sender = threading.Thread(target=lambda: [ours.send(each) for each in sent])
        sender.start()
        await asyncio.to_thread(sender.join, 10)
        assert not sender.is_alive() and time.monotonic() - start < 5
        assert ours._kept, "more than the socket takes"
        frames = its.frames()
        assert [TO_FRONT.decode(await anext(frames)).news[0].answer for _ in sent] == list(range(4000))
        its.close()
        await reading
        ours.close()

    asyncio.run(run())


def test_a_loop_forgets_a_channel_that_is_closed_with_something_kept():
    """The next socket gets its number: a front that loses a replica has other connections."""

    async def run():
        ours, its = map(Channel, socket.socketpair())
        reading = asyncio.create_task(anext(ours.frames(), None))
        await asyncio.sleep(0)
        while not ours._kept:
            ours.send(ToFront([News(0, list(range(500)), None, None, 0.0)]))
        await asyncio.sleep(0)
        number = ours._end.fileno()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        ours.close()
        ours.close()
        ends = list[socket.socket]()
        while number not in (numbers := [end.fileno() for end in ends]):
            ends += socket.socketpair()
        at = numbers.index(number)
        ends[at].setblocking(False)
        receiving = asyncio.create_task(asyncio.get_running_loop().sock_recv(ends[at], 1))
        await asyncio.sleep(0)
        ends[at ^ 1].send(b"x")
        assert await asyncio.wait_for(receiving, 5) == b"x"
        for end in ends:
            end.close()
        its.close()

    asyncio.run(run())


def test_a_tokenizer_that_cannot_be_sent_keeps_the_front_here(demo, monkeypatch):
    monkeypatch.setattr(Tokenizer, "written", lambda self: None)
    with pytest.raises(SetupError, match=r"tokenizer of demo .* front='thread'"):
        eet_lab.serve(demo, front="process")
    with pytest.raises(SetupError, match="front is 'fork'"):
        eet_lab.serve(demo, front="fork")
    served = eet_lab.serve(demo)
    assert isinstance(served._server, Server) and "front here" in repr(served)
    served.stop()


def test_a_front_that_cannot_be_started_is_told(demo, monkeypatch):
    def fail(*words, **how):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fail)
    served, told = eet_lab.serve(demo, front="process"), list[Exception]()

    def wait():
        try:
            served.wait_until_up()
        except Exception as error:  # noqa: BLE001  looked at below
            told.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive() and isinstance(told[0], SetupError)
    assert re.search("cannot be started: .*temporarily unavailable. Say front='thread'", str(told[0]))
    assert "temporarily unavailable" in served.state
    served.stop()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(served, client, generator, slowed, stream):
    before = free_pages(generator)
    raw = Raw(served.url).post(TEXT, {**LONG, "stream": stream})
    eventually(lambda: free_pages(generator) < before)
    raw.close()
    eventually(lambda: free_pages(generator) == before)
    assert not generator._jobs and not generator._queued and not generator._phases
    assert client.completions.create(**SHORT).choices[0].text


def test_metrics_tell_how_long_each_phase_took(served, client, slowed):
    """Of five with 16 tokens, one waits for a slot: 16 steps of 10 ms, in which the others are decoded."""
    before = numbers(served)
    client.completions.create(**SHORT | {"n": 5, "max_tokens": 16, "extra_body": {"ignore_eos": True}})
    after = eventually(lambda: (now := numbers(served)) != before and now)

    def grown(name: str, kind: str, label: str = "") -> float:
        key = f'vllm:{name}_seconds_{kind}{{{label}model_name="demo"}}'
        return after[key] - before[key]

    waited = [grown("request_queue_time", "bucket", f'le="{bound}",') for bound in ("0.1", "+Inf")]
    assert waited == [4, 5]
    queue, prefill, decode, inference, whole = (
        grown(name, "sum")
        for name in (
            *(f"request_{phase}_time" for phase in ("queue", "prefill", "decode", "inference")),
            "e2e_request_latency",
        )
    )
    assert queue > 0.15 and prefill >= 5 * 0.01 and decode >= 5 * 15 * 0.01
    assert inference == pytest.approx(prefill + decode) and queue + inference < whole


def test_an_engine_that_fails_in_mid_step(served, client, generator, monkeypatch, slowed):
    """Those that it served get 500 with an id, and the next ones are served by a new engine."""
    right, step = client.completions.create(**SHORT).choices[0].text, generator.engine.step

    def fail():
        if len(generator._jobs) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step()

    monkeypatch.setattr(generator.engine, "step", fail)
    stream = iter(_long(client))
    assert next(stream).choices[0].text
    with pytest.raises(openai.InternalServerError, match=r"engine failed \(RuntimeError\)") as told:
        client.completions.create(**SHORT)
    assert told.value.code.startswith("error-") and told.value.request_id
    with pytest.raises(openai.APIError, match="engine failed"):
        list(stream)
    assert client.completions.create(**SHORT).choices[0].text == right


def _long(client):
    how = {name: value for name, value in LONG.items() if name != "ignore_eos"}
    return client.completions.create(**how, stream=True, extra_body={"ignore_eos": True})


def test_a_full_queue_refuses_quickly_and_a_drain_finishes_what_was_accepted(demo, monkeypatch):
    served = eet_lab.serve(demo, PAGED, max_queued_requests=2, drain_s=20).wait_until_up(60)
    generator, go = served._server.service.generator, threading.Event()
    step, url = generator.engine.step, f"{served.url}{TEXT}"
    monkeypatch.setattr(generator.engine, "step", lambda: (go.wait(30), step())[1])
    with ThreadPoolExecutor() as pool, httpx.Client() as client:
        waiting = [pool.submit(httpx.post, url, json=SHORT, timeout=60) for _ in range(2)]
        eventually(lambda: len(generator._jobs) + generator._commands.qsize() == 2)
        took = []
        for _ in range(8):
            start = time.perf_counter()
            answer = client.post(url, json={"prompt": "word " * 20_000})
            took.append(time.perf_counter() - start)
            assert answer.status_code == 429 and answer.json()["error"]["code"] == "too_many_queued_requests"
        assert min(took) < 0.01, took
        stopping = threading.Thread(target=served.stop)
        stopping.start()
        refused = eventually(lambda: (told := httpx.post(url, json=SHORT)).status_code == 503 and told)
        assert refused.json()["error"]["code"] == "shutting_down"
        go.set()
        assert [each.result().status_code for each in waiting] == [200, 200]
    stopping.join(30)
    assert served.state == "stopped" and front_of(served).returncode == 0


def test_a_front_that_dies_ends_the_server_and_says_so(demo, monkeypatch):
    served = eet_lab.serve(demo, PAGED).wait_until_up(60)
    generator = served._server.service.generator
    step = generator.engine.step
    monkeypatch.setattr(generator.engine, "step", lambda: (time.sleep(0.01), step())[1])
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(httpx.post, f"{served.url}{TEXT}", json=LONG, timeout=30)
        eventually(lambda: generator._jobs)
        front_of(served).kill()
        with pytest.raises(httpx.TransportError):
            asked.result()
    assert eventually(lambda: "front" in served.state and "ended with -9" in served.state)
    eventually(lambda: not generator._thread.is_alive())
    served.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/health")


def test_a_front_that_cannot_read_a_frame_ends(demo):
    """Whoever waits is told, and nobody else is let in: it must not stay behind, healthy and deaf."""

    async def run():
        service, listening = Service(demo), listen("127.0.0.1", 0)
        url, (ours, its) = url_of(listening), socket.socketpair()
        channel = Channel(ours)
        front = asyncio.create_task(front_process.serve(Channel(its), listening))
        frames = channel.frames()
        channel.send(Hello(service.card, service.options))
        channel.send(ToFront(order="start"))
        async with asyncio.timeout(20), httpx.AsyncClient(timeout=10) as client:
            assert TO_ENGINE.decode(await anext(frames)).is_up
            waiting = asyncio.create_task(client.post(f"{url}{TEXT}", json=SHORT))
            assert TO_ENGINE.decode(await anext(frames)).jobs
            channel.send(Load())  # which is no frame of this direction
            answer = await waiting
            assert answer.status_code == 503 and "front has failed" in answer.json()["error"]["message"]
            with pytest.raises(msgspec.ValidationError):
                await front
        channel.close()
        its.close()

    asyncio.run(run())


SCRIPT = """
import time, eet_lab
print(eet_lab.serve(eet_lab.load("demo", device="cpu")).wait_until_up(60).url, flush=True)
time.sleep(600)
"""


def test_the_front_ends_with_the_process_of_the_model(tmp_path):
    """A script without a guard for `__main__`, killed: whoever waits is told, and nothing is left."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    (tmp_path / "uvicorn.py").write_text("raise RuntimeError('a file of the folder in which it runs')")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-P", path], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env
    ) as run:
        try:
            url = re.match(r"http://\S+", run.stdout.readline())[0]
            [front] = psutil.Process(run.pid).children()
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
                stream = iter(_long(client))
                assert next(stream).choices[0].text is not None
                run.send_signal(signal.SIGKILL)
                with pytest.raises(openai.APIError, match="process with the model has ended"):
                    list(stream)
            eventually(lambda: not front.is_running() or front.status() == psutil.STATUS_ZOMBIE)
        finally:
            run.kill()
