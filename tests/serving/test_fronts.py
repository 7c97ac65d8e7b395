"""Fronts before the engines of several replicas: who gets which job, and who is told when one is gone. Without Ray."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

import eet_lab
from eet_lab.errors import SetupError
from eet_lab.serving import cluster, fronts, replica, replicas_front
from eet_lab.serving.fronts import Fronts
from eet_lab.serving.generator import Generator
from eet_lab.serving.lifecycle import listen
from eet_lab.serving.links import Link
from eet_lab.serving.options import Options
from eet_lab.serving.reach import ahead_s, as_link, clock, connected
from eet_lab.serving.replica import EngineReplica, ReplicaArgs
from eet_lab.serving.service import Service
from eet_lab.serving.wire import TO_FRONT, Channel, Hello, ToEngine, ToFront

from .conftest import PAGED, PROMPT, Raw, eventually, free_pages, slow_down

TEXT = "/v1/completions"
LONG = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


class Replicas:
    """Fronts, and the engines of replicas on a loop of this process."""

    def __init__(self, num_fronts: int, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.fronts, self.all = Fronts("127.0.0.1", 0, num_fronts, "127.0.0.1"), list[EngineReplica]()
        self.url, self._options = self.fronts.url, Options(**options)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def add(self) -> EngineReplica:
        async def started() -> EngineReplica:
            new = object.__new__(EngineReplica)
            await EngineReplica.__init__(
                new, ReplicaArgs("demo", PAGED, "cpu", None, self._options, True, self.fronts.reach)
            )
            return new

        self.all.append(self.do(started()))
        return self.all[-1]

    def kill(self, each: EngineReplica) -> None:
        """As far as fronts can see."""

        async def cut() -> None:
            for link in each._links._links:
                link.channel._end.shutdown(socket.SHUT_RDWR)

        self.do(cut())
        eventually(lambda: not each._links._links)

    def close(self) -> None:
        self.fronts.close()
        for each in self.all:
            each._has_left = True
            each.generator.close()
        self.loop.call_soon_threadsafe(self.loop.stop)


def inside(each: EngineReplica) -> int:
    return each._links.num_inside


def all_are_free(generator: Generator) -> bool:
    assert generator.engine is not None
    return free_pages(generator) == generator.engine.cache.ledger.num_pages - 1  # one is never given out


@pytest.fixture
def replicas(monkeypatch) -> Iterator[Replicas]:
    """One front, and no engine yet."""
    monkeypatch.setattr(replica, "freeze_heap", lambda: None)
    made = Replicas(1, max_queued_requests=3)
    yield made
    made.close()


@pytest.fixture
def busy(replicas) -> tuple[list[EngineReplica], list[Raw]]:
    """Two engines, each with one long stream."""
    both = [replicas.add(), replicas.add()]
    streams = list[Raw]()
    for _ in both:
        streams.append(Raw(replicas.url).post(TEXT, LONG | {"stream": True, "max_tokens": 300}))
        streams[-1].until(b"data: ")
    return both, streams


def test_jobs_go_to_the_engine_that_has_fewest_and_a_client_that_leaves_frees_its_pages(busy):
    both, streams = busy
    assert [*map(inside, both)] == [1, 1]
    for stream in streams:
        stream.close()
    eventually(lambda: not any(map(inside, both)))
    for generator in (each.generator for each in both):
        eventually(partial(all_are_free, generator))


def test_a_lost_replica_is_told_and_the_other_one_serves_on(replicas, busy, demo):
    both, streams = busy
    replicas.kill(both[0])
    assert b"The replica is lost" in streams[0].until(b"[DONE]")
    answer = httpx.post(f"{replicas.url}{TEXT}", json=SHORT, timeout=30)
    assert answer.json()["choices"][0]["text"] == eet_lab.generate(demo, [PROMPT], max_new_tokens=8).texts[0]
    replicas.kill(both[1])
    gone = eventually(lambda: (told := httpx.post(f"{replicas.url}{TEXT}", json=SHORT)).status_code == 503 and told)
    assert gone.json()["error"]["code"] == "unavailable" and int(gone.headers["retry-after"]) > 0
    assert httpx.get(f"{replicas.url}/health").status_code == 503
    replicas.add()
    assert httpx.post(f"{replicas.url}{TEXT}", json=SHORT, timeout=30).status_code == 200


def test_what_has_no_token_yet_goes_from_a_lost_replica_to_another_one(replicas, monkeypatch, demo):
    first = replicas.add()
    slow_down(first.generator, monkeypatch)
    streams = list[Raw]()
    for _ in range(4):  # which has as many slots
        streams.append(Raw(replicas.url).post(TEXT, LONG | {"stream": True}))
        streams[-1].until(b"data: ")
    waiting = [Raw(replicas.url).post(TEXT, SHORT | {"stream": True}) for _ in range(2)]
    eventually(lambda: inside(first) == 6)
    second = replicas.add()
    replicas.kill(first)
    assert all(b"The replica is lost" in stream.until(b"[DONE]") for stream in streams)
    text = eet_lab.generate(demo, [PROMPT], max_new_tokens=8).texts[0]
    for client in waiting:
        pieces = re.findall(rb"data: ({.*})", client.until(b"[DONE]"))
        assert "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces) == text
    assert not inside(second)


def test_a_replica_that_is_too_many_finishes_what_it_has(replicas, busy, monkeypatch):
    both, streams = busy
    leaving = both[0].__del__()
    assert leaving is not None and both[0].__del__() is None
    done = asyncio.run_coroutine_threadsafe(leaving, replicas.loop)
    eventually(lambda: all(link.sends_no_more for link in both[0]._links._links))
    joined = list[object]()
    monkeypatch.setattr(both[0].generator, "join", joined.append)
    for _ in range(3):
        assert httpx.post(f"{replicas.url}{TEXT}", json=SHORT, timeout=30).status_code == 200
    assert all(b"[DONE]" in stream.until(b"[DONE]") for stream in streams)
    done.result(30)
    assert not inside(both[0]) and not joined


def test_bounds_are_those_of_each_replica(replicas, monkeypatch):
    """Three wait in each, beside the four that its slots run."""
    for each in (replicas.add(), replicas.add()):
        slow_down(each.generator, monkeypatch)
    streams = list[Raw]()
    for _ in range(8):
        streams.append(Raw(replicas.url).post(TEXT, LONG | {"stream": True}))
        streams[-1].until(b"data: ")
    waiting = [Raw(replicas.url).post(TEXT, LONG) for _ in range(6)]
    eventually(lambda: sum(map(inside, replicas.all)) == 14)
    refused = httpx.post(f"{replicas.url}{TEXT}", json=SHORT)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
    assert "at most 6 may" in refused.json()["error"]["message"]
    assert [*map(inside, replicas.all)] == [7, 7]
    assert replicas.do(replicas.all[0].record_autoscaling_stats()) == {"inside": 7}
    for client in [*streams, *waiting]:
        client.close()


def test_several_fronts_share_a_port_and_drain(monkeypatch):
    monkeypatch.setattr(replica, "freeze_heap", lambda: None)
    made = Replicas(2)
    try:
        each = made.add()
        assert len(each._links._links) == 2
        streams = [Raw(made.url).post(TEXT, LONG | {"stream": True, "max_tokens": 30}) for _ in range(8)]
        assert all(b"[DONE]" in stream.until(b"[DONE]") for stream in streams)
        made.fronts.check()
        made.fronts.drain(10)
        assert [process.returncode for process in made.fronts._processes] == [0, 0]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{made.url}/health")
    finally:
        made.close()


def test_an_engine_that_is_left_with_nothing_tells_the_other_fronts(replicas):
    """Else they would take it for busy until somebody gives it a job."""
    links = replicas.add()._links
    [link], (ours, its) = links._links, map(Channel, socket.socketpair())
    links._links += (Link(ours),)

    async def others() -> int | None:
        return TO_FRONT.decode(await asyncio.wait_for(anext(its.frames()), 20)).others

    async def left() -> None:
        links._do(link, ToEngine(leaves=[5]))

    for leave in (lambda: replicas.do(left()), replicas.fronts._processes[0].kill):
        link.numbers.add(5)  # a job of which the engine knows nothing: it tells no news
        links._fewer()
        assert replicas.do(others()) == 1
        leave()
        assert replicas.do(others()) == 0
    its.close()


def test_a_front_that_ends_by_itself_is_told(replicas, monkeypatch):
    each, left = replicas.add(), list[object]()
    monkeypatch.setattr(each.generator, "leave", lambda job: [left.append(job), Generator.leave(each.generator, job)])
    replicas.fronts.check()
    stream = Raw(replicas.url).post(TEXT, LONG | {"stream": True})
    stream.until(b"data: ")
    os.kill(replicas.fronts._processes[0].pid, signal.SIGKILL)
    replicas.fronts._processes[0].wait(10)
    with pytest.raises(SetupError, match=r"process \d+ of 1 front\) has ended with -9.*Serve the model again"):
        replicas.fronts.check()
    eventually(lambda: not each._links._links)
    eventually(partial(all_are_free, each.generator))
    assert len(left) == 1, "it was not run to its end"
    stream.close()
    replicas.do(each.check_health())


def test_clients_are_told_when_the_process_that_serves_replicas_has_ended(replicas):
    replicas.add()
    stream = Raw(replicas.url).post(TEXT, LONG | {"stream": True})
    stream.until(b"data: ")
    replicas.fronts.close()
    assert b"The process that serves replicas has ended" in stream.until(b"")


def test_bounds_of_several_fronts_are_those_of_all_replicas_together(demo):
    async def run() -> None:
        front = replicas_front.ReplicasFront(b"token", 4)
        with listen("127.0.0.1", 0) as listening:
            server = front.serve(Hello(Service(demo).card, Options()), listening)
        front.engines.changed(2)
        assert server.service.admission.share == 0.5

    asyncio.run(run())


def test_who_has_no_token_is_no_replica(replicas):
    [address] = replicas.fronts.reach.addresses
    with socket.create_connection(address, timeout=10) as end:
        end.sendall(b"x" * len(replicas.fronts.reach.token))
        assert end.recv(1) == b""
    assert replicas.fronts.reach.token.hex() not in repr(replicas.fronts.reach)


def test_a_front_without_a_file_left_takes_replicas_later(monkeypatch):
    monkeypatch.setattr(replicas_front, "RETRY_S", 0)

    async def run() -> None:
        loop, errors = asyncio.get_running_loop(), [OSError(errno.EMFILE, "Too many open files")]
        accept = loop.sock_accept

        async def once_too_many(links: socket.socket) -> Any:
            if errors:
                raise errors.pop()
            return await accept(links)

        monkeypatch.setattr(loop, "sock_accept", once_too_many)
        with listen("127.0.0.1", 0) as links:
            accepting = asyncio.create_task(replicas_front.ReplicasFront(b"token", 1).accept(links))
            with await connected(links.getsockname()) as end:
                await loop.sock_sendall(end, b"wrong")
                assert await asyncio.wait_for(loop.sock_recv(end, 1), 10) == b""
            assert not errors
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)

    asyncio.run(run())


def test_a_link_to_a_replica_that_breaks_is_logged(caplog):
    async def run() -> None:
        with listen("127.0.0.1", 0) as links:
            accepting = asyncio.create_task(replicas_front.ReplicasFront(b"token", 1).accept(links))
            channel = Channel(await connected(links.getsockname()))
            channel._end.send(b"token")
            channel.send(ToFront(order="leave"))  # it is no Hello
            assert await asyncio.wait_for(anext(channel.frames(), None), 10) is None
            channel.close()
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)

    asyncio.run(run())
    assert "a link to a replica broke" in caplog.text and "ValidationError" in caplog.text


def test_all_fronts_have_the_same_time_to_end(monkeypatch, pass_time):
    waits = list[float]()

    def never_ended(process: object, patience_s: float) -> None:
        waits.append(patience_s)
        pass_time(patience_s)

    both = object.__new__(Fronts)
    both._controls, both._processes = [], [None, None]
    monkeypatch.setattr(fronts, "ended", never_ended)
    both.drain(10)
    both.close()
    assert waits == pytest.approx([25, 0, 5, 0], abs=1)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_a_machine_that_is_gone_is_missed_though_something_was_sent_to_it():
    with socket.socket() as end:
        as_link(end)
        assert 0 < end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000


def test_the_clocks_of_two_machines_are_compared_before_a_front_is_waited_for(demo, monkeypatch):
    async def run() -> None:
        front, (ours, its) = replicas_front.ReplicasFront(b"token", 1), map(Channel, socket.socketpair())
        were_up = list[bool]()
        monkeypatch.setattr(replicas_front, "ahead_s", lambda clock: were_up.append(front._is_up.is_set()) or 0.0)
        ours.send(Hello(Service(demo).card, Options()))
        linking = asyncio.create_task(front._link(its))
        await asyncio.wait_for(front.first, 10)
        assert were_up == [False]
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)
        ours.close()
        its.close()

    asyncio.run(run())


def test_no_front_takes_the_replica(replicas):
    replicas.fronts.close()
    with pytest.raises(SetupError, match="No front of the server takes this replica"):
        replicas.add()


def test_a_front_that_does_not_take_a_replica_is_logged(replicas, caplog):
    with listen("127.0.0.1", 0) as nobody:
        host, port = nobody.getsockname()
    reach = replicas.fronts.reach
    replicas.fronts.reach = replace(reach, addresses=(*reach.addresses, (host, port)))
    assert len(replicas.add()._links._links) == 1
    assert f"the front at {host}:{port} gives this replica no jobs" in caplog.text


def test_a_front_for_each_replica_that_has_two_cores(monkeypatch):
    monkeypatch.setattr(fronts, "num_cores", lambda: 8)
    assert [*map(fronts.num_fronts, (1, 3, 8))] == [1, 3, 4]
    monkeypatch.setattr(fronts, "num_cores", lambda: 1)
    assert fronts.num_fronts(2) == 1


def test_clocks_of_one_machine_are_the_same():
    machine, now = clock()
    assert ahead_s((machine, now - 50)) == 0 and ahead_s(None) == 0
    assert 49 < ahead_s(("another", now + 50)) < 51


def test_replicas_end_though_waiting_for_the_fronts_is_interrupted(monkeypatch):
    class Waiting:
        def close(self) -> None:
            raise KeyboardInterrupt

    left = list[bool]()
    monkeypatch.setattr(cluster, "_leave", left.append)
    with pytest.raises(KeyboardInterrupt):
        cluster.Running(None, True, Waiting()).close()
    assert left == [True]
