"""serve in a notebook: a handle that is there at once."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time

import httpx
import pytest

import eet_lab
from eet_lab.engine.engine import Engine
from eet_lab.errors import SetupError
from eet_lab.serving.generator import Generator
from eet_lab.serving.handle import serving

from .conftest import eventually


def test_serve_returns_at_once_and_stop_works_at_any_time(demo, monkeypatch):
    build, may = Generator._build, threading.Event()
    monkeypatch.setattr(Generator, "_build", lambda self: (may.wait(30), build(self))[1])
    start = time.monotonic()
    served = eet_lab.serve(demo)
    assert time.monotonic() - start < 2 and served.state == "starting"
    assert f'<a href="{served.url}/v1/models">{served.url}</a>' in served._repr_html_()
    assert "demo" in repr(served) and served.url in repr(served) and "starting" in repr(served)
    with pytest.raises(SetupError, match="starting, and not up after 0.05 s"):
        served.wait_until_up(0.05)
    may.set()
    answer = httpx.get(f"{served.url}/v1/models", timeout=30)  # who connects early waits
    [card] = answer.json()["data"]
    assert card["max_model_len"] == 1024 and card["vocab_size"] == demo.config.vocab_size
    assert eventually(lambda: served.state == "serving")
    served.stop()
    served.stop()
    assert served.state == "stopped" and not served._thread.is_alive()
    assert not served._server.service.worker._thread.is_alive()


def test_a_package_that_is_missing_is_named(demo, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("eet_lab.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SetupError, match=r"uvicorn.*pip install -c \S+ .*\[serve\]'"):
        eet_lab.serve(demo)


def test_a_heap_is_frozen_where_the_process_is_the_servers(demo):
    """The collector never walks it again; what a notebook holds, it still finds."""
    for is_ours in (False, True):
        gc.unfreeze()  # what the tests' collection has left
        server, _ = serving(demo, None, "127.0.0.1", 0, {}, "thread")
        server.has_process = is_ours
        running = threading.Thread(target=lambda: asyncio.run(server.run()))  # noqa: B023
        running.start()
        try:
            assert server.is_up.wait(60)
            assert (gc.get_freeze_count() > 10_000) == is_ours
        finally:
            server.drain_soon()
            running.join()
            gc.unfreeze()


def test_a_server_can_be_stopped_before_it_is_up(demo, monkeypatch):
    monkeypatch.setattr(Generator, "_build", lambda self: time.sleep(0.5))
    served = eet_lab.serve(demo)
    served.stop()
    assert served.state == "stopped"
    with pytest.raises(SetupError, match="stopped.* Serve the model again"):
        served.wait_until_up()


def test_an_engine_that_cannot_be_built_is_told(demo, monkeypatch):
    def fail(self):
        raise SetupError("there is no room")

    monkeypatch.setattr(Generator, "_build", fail)
    served = eet_lab.serve(demo)
    with pytest.raises(SetupError, match="there is no room"):
        served.wait_until_up(10)
    assert eventually(lambda: "no room" in served.state) and "no room" in repr(served)
    served.stop()


def test_no_piece_of_an_answer_waits_for_an_acknowledgement(served):
    """Nagle's algorithm keeps the second one back for some 40 ms, where the client's system delays its answer to it."""
    took = []
    with httpx.Client() as client:
        for _ in range(10):
            start = time.monotonic()
            assert client.get(f"{served.url}/health").status_code == 200
            took.append(time.monotonic() - start)
    assert sorted(took)[2] < 0.03


def test_what_is_built_before_the_first_request_is_told(demo, monkeypatch):
    told = []
    monkeypatch.setattr(
        Engine, "prepare", lambda self, progress=None, cancel=None: progress and progress(0, 1, "building")
    )
    server, _ = serving(demo, None, "127.0.0.1", 0, {}, progress=lambda *news: told.append(news))
    server.service.worker._build()
    server.service.worker._close()
    server._socket.close()
    assert told[0] == (0, 1, "building")
