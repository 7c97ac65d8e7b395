"""Load that goes on beside its caller: from a process or a thread of its own, stopped, and interrupted."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import threading
import time
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
from load_servers import due, say_three, serving

from eet_lab.errors import Cancelled, SetupError
from eet_lab.serving.load import run_load, start_load
from eet_lab.serving.load.apart import _listen
from eet_lab.serving.load.run import Loading


def test_a_process_of_its_own_finds_the_same():
    told = []
    with serving(lambda asked: say_three(asked, 0.1)) as url:
        loading = start_load(url, due(0.0, 0.1), keep_text=True)
        assert not loading.done and "load" in repr(loading)
        found = loading.result(60)
        traffic = replace(due(0.0, 0.7), name="")
        other = run_load(url, traffic, apart=True, progress=lambda *progress: told.append(progress))
    assert other.traffic is traffic and other.report().startswith(f"2 requests, to {url}\n")
    assert found.counts["answered"] == 2 and found.texts == ("abc", "abc") and np.all(found.ttft_ms > 95)
    assert loading.done and "2 answered" in repr(loading) and told


@pytest.mark.parametrize("apart", [False, True])
def test_stop(apart):
    async def never(asked):
        await asyncio.sleep(30)

    with serving(never) as url:
        loading = start_load(url, due(0.0, 60.0), apart=apart)
        time.sleep(0.3)
        loading.cancel()
        with pytest.raises(Cancelled):
            loading.result(10)
    assert "stopped" in repr(loading)


def test_an_interrupt_ends_what_is_sent(monkeypatch):
    def interrupted(loading: Loading) -> None:
        assert came.wait(30)
        raise KeyboardInterrupt  # a signal could as well come a moment later, and end the process of the tests

    came = threading.Event()
    monkeypatch.setattr(Loading, "result", interrupted)

    async def note(asked):
        came.set()
        await say_three(asked)

    with serving(note) as url:
        with pytest.raises(KeyboardInterrupt):
            run_load(url, due(0.0, 60.0))
        for thread in threading.enumerate():
            if thread.name == "eet-loading":
                thread.join(2)
                assert not thread.is_alive(), "it goes on sending"


@pytest.fixture
def children(monkeypatch):
    """The processes that send."""
    real, begun = subprocess.Popen, []
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **how: begun.append(real(*words, **how)) or begun[-1])
    return begun


def test_an_interrupt_of_the_group_leaves_what_runs_in_the_background(children):
    """A notebook's Stop goes to the whole group of its kernel."""
    with serving(say_three) as url:
        loading = start_load(url, due(0.0, 60.0))
        while not children:
            time.sleep(0.01)
        group = os.getpgid(children[0].pid)
        loading.cancel()
        loading.wait(10)
    assert group != os.getpgrp()


@pytest.mark.parametrize("words", [b"", b"Hello", b"Info: x\n", b"cno.module\nname\n."])
def test_a_process_that_says_what_is_no_answer_is_not_waited_for(words):
    said, stdout = SimpleQueue(), io.BytesIO(words)
    _listen(stdout, said)
    assert isinstance(said.get_nowait(), Exception) if words else said.get_nowait() is None
    assert stdout.closed


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('Hello', flush=True); import time; time.sleep(60)", "said what is no result, and was ended. Does"),
        ("import sys; sys.stdin.buffer.read(); sys.exit(3)", "ended with 3 and no result. Its error is on"),
    ],
)
def test_why_a_process_gave_no_result_is_told(code, says, monkeypatch):
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda words, **how: real([*words[:1], "-ISc", code], **how))
    with pytest.raises(SetupError, match=says):
        run_load("http://a", due(0.0), apart=True)
