"""Replicas of Ray Serve: what is planned, and what a replica does. No Ray is needed."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import eet_lab
from eet_lab import ray_here
from eet_lab.cli import main
from eet_lab.commands import serve as command
from eet_lab.errors import ModelError, RecipeError, SetupError
from eet_lab.serving import cluster, fronts, replicas
from eet_lab.serving.errors import ApiError
from eet_lab.serving.jobs import Answer, News, Reason
from eet_lab.serving.options import Options
from eet_lab.serving.ray_asgi import PATH, OpenAIErrors, within_serve
from eet_lab.serving.replica import Replica, ReplicaArgs
from eet_lab.serving.service import LocalFront

from .conftest import PAGED


@pytest.fixture
def planned(monkeypatch) -> list[tuple[ReplicaArgs, dict[str, Any], int]]:
    """What would be run, without Ray."""
    plans = []

    def run(plan, scale, most, host, port):
        cluster.check_room(plan.device, most, 2)
        plans.append((plan, scale, most))
        return Still(), f"http://{host}:{port}"

    monkeypatch.setattr(ray_here, "check_installed", lambda *_: None)
    monkeypatch.setattr(cluster, "run", run)
    return plans


class Still(cluster.Running):
    """An application of two replicas that have two requests and one, and finish none by themselves."""

    def __init__(self) -> None:
        super().__init__(None, False)
        self.asked: list[str] = []
        self.is_closed = False

    def ask(self, method: str) -> list[int]:
        self.asked.append(method)
        return [2, 1]

    def states(self) -> dict[str, int]:
        return {"RUNNING": 2, "STARTING": 1}

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"replicas": 0}, SetupError, "replicas is 0"),
        ({"replicas": True}, SetupError, "replicas is True"),
        ({"replicas": (2, 1)}, SetupError, "the fewest must come first"),
        ({"replicas": (1, 2, 3)}, SetupError, r"replicas is \(1, 2, 3\)"),
        ({"replicas": 3}, SetupError, "replicas is 3, but each takes a CPU, and there are 2 CPUs"),
        ({"replicas": (1, 3)}, SetupError, "Ask for at most 2"),
        ({"target_ongoing_requests": 0}, SetupError, "target_ongoing_requests is 0"),
        ({"device": "cuda:1"}, SetupError, "device is 'cuda:1'"),
        ({"recipe": "nothing"}, RecipeError, "nothing"),
        ({"max_model_len": 10_000}, SetupError, "max_model_len is 10,000"),
        ({"policy": "naive_padding"}, SetupError, "Leave policy out"),
        ({"max_queued_requests": 0}, SetupError, "max_queued_requests is 0"),
        ({"model": "nothing"}, ModelError, "no model 'nothing'"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(planned, how, error, said):
    with pytest.raises(error, match=said):
        eet_lab.serve_replicas(**({"model": "demo", "device": "cpu"} | how))
    assert not planned


def test_a_live_model_cannot_be_reached_by_other_processes(planned, demo):
    with pytest.raises(SetupError, match=r"model is a Model, but replicas are processes.* its name or its folder"):
        eet_lab.serve_replicas(demo)


def test_more_replicas_than_gpus():
    with pytest.raises(SetupError, match=r"replicas is 2, but each takes a GPU, and there is 1 GPU here.*at most 1"):
        cluster.check_room("cuda", 2, 1)
    with pytest.raises(SetupError, match=r"there are 0 GPUs here. Ask for device='cpu'"):
        cluster.check_room("cuda", 1, 0)


def test_ray_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else name)
    monkeypatch.setitem(sys.modules, "ray", None)  # another test may have imported it
    with pytest.raises(SetupError, match=r"ray is not installed.*pip install -c \S+ .*\[ray\]'"):
        eet_lab.serve_replicas("demo")
    with pytest.raises(SetupError, match="replicas"):
        eet_lab.serve_replicas("demo", replicas=0)  # what Ray could not mend either comes first


@pytest.fixture
def ray(monkeypatch) -> ModuleType:
    """A package that says what it is asked for, in place of Ray; and none of Ray's settings."""
    ray, util = ModuleType("ray"), ModuleType("ray.util")
    ray.util, ray.asked, ray.is_initialized = util, [], lambda: False
    ray.init = lambda **how: ray.asked.append(({name: os.environ.get(name) for name in cluster.SETTINGS}, how))
    ray.cluster_resources = lambda: {"CPU": 2.0}
    util.list_named_actors = lambda all_namespaces: []
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", util)
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name[:4] != "RAY_"})
    return ray


def test_a_cluster_of_our_own_takes_only_who_has_its_token(ray):
    assert cluster._join("cpu", 1)
    [(settings, how)] = ray.asked
    assert settings == cluster.SETTINGS and settings["RAY_AUTH_MODE"] == "token" and how["address"] == "local"


@pytest.mark.parametrize("named", ["by RAY_ADDRESS", "by ray.init"])
def test_a_cluster_that_is_given_keeps_its_own_settings(ray, named):
    if named == "by ray.init":
        ray.is_initialized = lambda: True
    else:
        os.environ["RAY_ADDRESS"] = "10.0.0.1:6379"
    assert not cluster._join("cpu", 2)
    [(settings, _)] = ray.asked
    assert set(settings.values()) == {None}, "its own may ask for no token"


def test_fronts_find_a_free_port_once_ray_has_taken_its_own(ray, monkeypatch):
    class Found:
        url, port, reach = "http://127.0.0.1:4711", 4711, None

        def __init__(self, *asked: Any) -> None:
            self.asked = asked

        def close(self) -> None:
            """Nothing."""

    started = list[dict[str, Any]]()
    ray.serve = ModuleType("ray.serve")
    ray.serve.start, ray.serve.run = lambda **how: started.append(how), lambda *what, **how: None
    monkeypatch.setattr(fronts, "Fronts", Found)
    monkeypatch.setattr(cluster, "_application", lambda *_: None)
    running, url = cluster.run(ReplicaArgs("demo", PAGED, "cpu", None, Options(), True), {}, 1, "127.0.0.1", 0)
    assert running._fronts.asked == ("127.0.0.1", 0, 1, "127.0.0.1")
    assert url == Found.url and started[0]["http_options"] == {"host": "127.0.0.1", "port": 4711}


def test_a_cluster_that_does_not_answer(ray, monkeypatch):
    def fail(**how):
        raise ConnectionError("it cannot be reached")

    os.environ["RAY_ADDRESS"], ray.init = "10.0.0.1:6379", fail
    with pytest.raises(SetupError, match=r"10\.0\.0\.1:6379 cannot be joined: it cannot be reached.*RAY_ADDRESS"):
        cluster._join("cpu", 1)


def test_the_plan_and_the_bounds(planned, demo, tmp_path):
    demo.save(tmp_path / "mine")
    how = {"replicas": (1, 2), "device": "cpu", "target_ongoing_requests": 7, "max_queued_requests": 9, "drain_s": 0.1}
    served = eet_lab.serve_replicas(tmp_path / "mine", PAGED, **how)
    [(plan, scale, most)] = planned
    assert Path(plan.model) == tmp_path / "mine" and "rows=4" in plan.recipe and plan.options.max_queued_requests == 9
    bounds = {"min_replicas": 1, "max_replicas": 2, "initial_replicas": 1, "target_ongoing_requests": 7}
    module, _, name = replicas.POLICY.partition(":")
    assert getattr(importlib.import_module(module), name) is cluster.replicas_wanted
    bounds["policy"] = {"policy_function": replicas.POLICY}
    assert scale == {"autoscaling_config": bounds} and plan.has_fronts and most == 2
    assert "mine" in repr(served) and "1 to 2 replicas" in repr(served)
    assert served.state == "serving (2 running, 1 starting)"
    running = served._running
    served.stop()
    served.stop()
    assert running.asked[0] == "drain" and running.asked[-1] == "end_all", "after drain_s nobody waits any longer"
    assert running.is_closed and served.state == "stopped"


def test_an_encoder_is_brought_requests_by_rays_proxy(planned, tmp_path):
    """Its vectors are written where they are made. A replica's own bounds are met before the proxy queues."""
    eet_lab.serve_replicas("bert-base", device="cpu", replicas=(1, 2), max_queued_requests=9)
    [(plan, scale, _)] = planned
    assert not plan.has_fronts and scale["max_ongoing_requests"] == 9 + replicas.SPARE
    assert "policy" not in scale["autoscaling_config"]


def test_replicas_as_many_as_the_jobs_inside_ask_for():
    class Config:
        def get_target_ongoing_requests(self) -> float:
            return 8

    context = type("Context", (), {"aggregated_metrics": {"inside": {"a": 30.0, "b": 10.0}}, "config": Config()})()
    assert cluster.replicas_wanted(context) == (5.0, {})
    context.aggregated_metrics = {}
    assert cluster.replicas_wanted(context) == (0.0, {})


def test_replicas_that_cannot_be_asked_end_all_the_same(planned, monkeypatch):
    served = eet_lab.serve_replicas("demo", device="cpu")
    running = served._running
    monkeypatch.setattr(running, "ask", lambda method: 1 / 0)
    served.stop()
    assert running.is_closed


def test_words_become_arguments(planned, capsys, monkeypatch):
    """The command waits for a signal, and then stops what it started."""
    stopped = []
    monkeypatch.setattr(replicas.ServedReplicas, "stop", lambda self: stopped.append(self))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    over = threading.Event()

    def end() -> None:
        while signal.getsignal(signal.SIGTERM) is handlers[signal.SIGTERM]:  # which would end this process
            if over.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        threading.Thread(target=end, daemon=True).start()
        words = ["--device", "cpu", "--replicas", "1-2", "--target-ongoing-requests", "5", "--served-model-name", "a"]
        assert main(["serve", *words]) == 0
    finally:
        over.set()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    [(plan, scale, _)] = planned
    assert scale["autoscaling_config"]["target_ongoing_requests"] == 5 and plan.options.served_model_name == "a"
    assert "Serving a (" in (out := capsys.readouterr().out) and "by 1 to 2 replicas on http://127.0.0.1:8000;" in out
    assert len(stopped) == 1
    assert main(["serve", "--device", "cpu", "--target-ongoing-requests", "5"]) == 2
    assert "such as --replicas 1-4" in capsys.readouterr().err
    assert [command._span(text) for text in ("3", "1-4")] == [3, (1, 4)]
    with pytest.raises(SystemExit):
        main(["serve", "--replicas", "1-"])
    assert "'1-' is neither a number" in capsys.readouterr().err
    assert main(["serve", "--device", "cpu", "--replicas", "-1"]) == 2 and command._span("1000000") == 1_000_000
    assert "replicas is -1, but it must be a whole number from 1" in capsys.readouterr().err


async def of_demo() -> Replica:
    replica = object.__new__(Replica)
    await Replica.__init__(replica, ReplicaArgs("demo", PAGED, "cpu", None, Options()))
    return replica


def test_a_replica_is_as_well_as_its_engine():
    """And it drains: what comes is refused, what is inside is counted."""

    async def look() -> None:
        replica = await of_demo()
        try:
            await replica.check_health()
            await events_of_many_streams_go_together(replica.service)
            assert await replica.drain() == 0 and replica.service.admission.is_draining
            await replica.end_all()
            replica.service.worker.dead = ApiError(503, "The engine is lost.")
            with pytest.raises(ApiError, match="lost"):
                await replica.check_health()
            assert gc.get_freeze_count() > 10_000, "its process is its own"
        finally:
            replica.service.worker.close()
            gc.unfreeze()

    before = sys.getswitchinterval()
    try:
        asyncio.run(look())
    finally:
        sys.setswitchinterval(before)


async def events_of_many_streams_go_together(front: LocalFront) -> None:
    """Or the proxy, which has one thread for all replicas, would bound them. First tokens and ends do not wait."""
    wakes = [asyncio.Event() for _ in range(20)]
    answers = [Answer(wake, is_followed=True) for wake in wakes]

    def put(number: int, reason: Reason | None = None) -> None:
        front.receive([News(answer, [1], reason, None, 0.0) for answer in answers[:number]])

    put(20)
    assert all(wake.is_set() for wake in wakes)
    for wake in wakes:
        wake.clear()
    begin = time.perf_counter()
    put(20)
    put(1, "length")
    assert [wake.is_set() for wake in wakes] == [True, *[False] * 19]
    await wakes[-1].wait()
    assert time.perf_counter() - begin > 20 * 0.0015


def test_the_application_within_serve():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"a"), (b"b", b"c")]})

    async def call(kind: str, *events: str) -> list[dict[str, Any]]:
        sent, coming = list[Any](), iter(events)

        async def receive() -> dict[str, str]:
            return {"type": next(coming)}

        async def send(message: Any) -> None:
            sent.append(message)

        await within_serve(app)({"type": kind}, receive, send)
        return sent

    assert asyncio.run(call("http"))[0]["headers"] == [(b"b", b"c")], "the proxy adds the id itself"
    lived = asyncio.run(call("lifespan", "lifespan.startup", "lifespan.shutdown"))
    assert [event["type"] for event in lived] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def start(status: int, kind: str, **more: str) -> dict[str, Any]:
    headers = [[b"content-type", kind.encode()], *([name.encode(), value.encode()] for name, value in more.items())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(text: str, more_body: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more_body}


def through_the_proxy(
    *messages: dict[str, Any], given: bytes | None = b"mine"
) -> tuple[int, dict[bytes, bytes], str, bytes]:
    """What a client gets where Ray's proxy sends this: status, headers and text; and the id that a replica is told."""
    sent, ids = list[Any](), list[bytes]()

    async def proxy(scope, receive, send):
        ids.append(dict(scope["headers"])[b"x-request-id"])
        for message in messages:
            await send(message)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"a"), *([(b"x-request-id", given)] if given else [])]
    asyncio.run(OpenAIErrors(proxy)({"type": "http", "headers": headers}, None, send))
    first, *rest = sent
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * len(rest)]
    assert not rest[-1].get("more_body", False)
    return first["status"], dict(map(tuple, first["headers"])), b"".join(m["body"] for m in rest).decode(), ids[0]


def test_a_lost_replica_is_told_in_openais_shape():
    for given in (b"mine", None):
        status, headers, text, number = through_the_proxy(given=given)
        error = json.loads(text)["error"]
        assert status == 500 and "replica is lost" in error["message"] and error["type"] == "server_error"
        assert headers[b"x-request-id"] == number == error["code"].encode() and number == (given or number)
    began = start(200, "text/event-stream; charset=utf-8"), body("data: {}\n\n", more_body=True)
    status, _, text, _ = through_the_proxy(*began)
    first, error, done = text.split("\n\n")[:3]
    assert status == 200 and (first, done) == ("data: {}", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "mine"


@pytest.mark.parametrize(
    ("status", "code", "more"),
    [(429, "too_many_requests", {"retry-after": "3"}), (503, "unavailable", {}), (408, "timeout", {})],
)
def test_the_proxys_own_words_get_openais_shape(status, code, more):
    told = through_the_proxy(start(status, "text/plain; charset=utf-8", **more), body("It is "), body("full"))
    found, headers, text, _ = told
    error = json.loads(text)["error"]
    assert found == status and error["message"] == "It is full" and error["code"] == code
    assert headers[b"x-request-id"] == b"mine" and headers[b"content-type"] == b"application/json"
    assert headers.get(b"retry-after", b"").decode() == more.get("retry-after", "")


def test_what_a_replica_says_passes_as_it_is():
    for messages in (
        [start(400, "application/json"), body('{"error": {}}')],
        [start(200, "text/plain"), body("a", True), body("b")],
        [start(200, "text/event-stream"), body("data: [DONE]\n\n", True), body("")],
    ):
        status, _, text, _ = through_the_proxy(*messages)
        assert (status, text) == (messages[0]["status"], b"".join(m["body"] for m in messages[1:]).decode())


def test_the_proxy_finds_what_stands_around_it():
    module, _, name = PATH.rpartition(".")
    [around] = getattr(importlib.import_module(module), name)()
    assert around.cls is OpenAIErrors and cluster.SETTINGS["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == PATH
