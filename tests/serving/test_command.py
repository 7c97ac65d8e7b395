"""`eet-lab serve`, as it is typed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from eet_lab.cli import main

from .conftest import PROMPT, eventually


class Run:
    """The command, with what it printed, and when."""

    def __init__(self, *words: str) -> None:
        self.start = time.monotonic()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "eet_lab", "serve", "--port", "0", "--device", "cpu", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://[\d.:]+", line)
        assert found, line + self.process.communicate()[1]
        self.url = found[0]

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time that it has taken: what its time is on a machine that does nothing else."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            user, system = file.read().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def run():
    runs = []
    yield lambda *words: runs.append(Run(*words)) or runs[-1]
    for each in runs:
        each.process.kill()
        each.process.communicate()


def test_the_demo_answers_within_five_seconds_and_sigterm_finishes_what_it_accepted(run):
    run = run()
    client = openai.OpenAI(base_url=f"{run.url}/v1", api_key="none", max_retries=0, timeout=60)
    assert client.completions.create(model="demo", prompt=PROMPT, max_tokens=4, temperature=0).choices[0].text
    took, worked = time.monotonic() - run.start, run.cpu_s
    assert min(took, worked) < 5, f"{took:.1f} s, of which it had a processor for {worked:.1f}"
    how = {"model": "demo", "prompt": "The", "max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor() as pool:
        stream = client.completions.create(**how, stream=True)
        text = next(iter(stream)).choices[0].text
        run.process.send_signal(signal.SIGTERM)
        answer = eventually(lambda: refused(run.url))
        assert answer.json()["error"]["code"] == "shutting_down"
        rest = pool.submit(list, stream)
        assert rest.result()[-1].choices[0].finish_reason == "length" and text is not None
    assert run.process.wait(30) == 0
    assert run.process.stderr is not None and run.process.stderr.read().split("\n") == [
        "", "Finishing what was accepted, within 30 s. Ctrl+C ends it at once.", ""
    ]  # fmt: skip


def refused(url: str) -> httpx.Response | None:
    """The answer to a request, once requests are refused."""
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1, "temperature": 0})
    return answer if answer.status_code == 503 else None


def test_ctrl_c_ends_a_server_that_is_not_up_yet(run):
    assert run().end(signal.SIGINT) == 0


def test_words_become_options(tmp_path, monkeypatch, capsys):
    (tmp_path / "key").write_text("secret\n")
    servers = []
    monkeypatch.setattr(
        "eet_lab.serving.handle.run_server", lambda server, started: (servers.append(server), started())
    )
    words = ["--api-key-file", str(tmp_path / "key"), "--served-model-name", "mine", "--drain-s", "2.5"]
    recipe = "all,continuous_batching:rows=3"
    assert main(["serve", "--port", "0", "--device", "cpu", "--recipe", recipe, "--max-model-len", "99", *words]) == 0
    [server] = servers
    service = server.service
    card, options = service.card, service.options
    assert (options.api_key, card.name, options.drain_s, card.columns) == ("secret", "mine", 2.5, 99)
    assert service.recipe.parts.schedule.max_rows == 3
    out, err = capsys.readouterr()
    assert "http://127.0.0.1:" in out and err == ""
    assert main(["serve", "--port", "0", "--device", "cpu", "--host", "0.0.0.0"]) == 0
    assert "no --api-key-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipe", "all"], "no requests that join"),
        (["--port", "99999"], "--port is 99999"),
        (["--max-queued-requests", "0"], "--max-queued-requests is 0"),
        (["--api-key-file", "/nowhere/key"], "/nowhere/key"),
        (["--model", "nothing"], "no model 'nothing'"),
        (["--target-ongoing-requests", "5", "--replicas", "2"], "such as --replicas 1-4"),
        (["--front", "thread", "--replicas", "2"], "Leave one out"),
        (["--pool", "cls"], "pool is cls, which says how an encoder makes vectors, but demo generates. Leave pool out"),
        (["--host", "no.such.host.invalid"], "Choose another host, such as 127.0.0.1"),
    ],
)
def test_words_that_cannot_be(capsys, words, said):
    assert main(["serve", "--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err
