"""Two replicas on a Ray cluster of this machine, on the CPU. The tests run in their order: the last one ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import httpx
import numpy as np
import openai
import psutil
import pytest
from encoders import theirs

import eet_lab
from eet_lab.serving.replicas import ServedReplicas
from eet_lab.threads import num_cores

from .conftest import PAGED, PROMPT, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray installs and tests it"),
    pytest.mark.skipif(num_cores() < 2, reason="two replicas on the CPU need two cores"),
]
LONG = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def two() -> Iterator[ServedReplicas]:
    """Two replicas of the demo model, four slots each."""
    served = eet_lab.serve_replicas("demo", PAGED, replicas=2, device="cpu", drain_s=20, max_body_bytes=65536)
    yield served
    served.stop()


def processes() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if "ServeReplica" in "".join(each.cmdline())]


def test_replicas_answer_as_the_plain_server_does(two, demo):
    with openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        how = {"model": "demo", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        alone = eet_lab.generate(demo, [PROMPT], max_new_tokens=20).texts[0]
        assert client.completions.create(**how).choices[0].text == alone
        pieces = list(client.completions.create(**how, stream=True))
        assert "".join(each.choices[0].text for each in pieces) == alone and len(pieces) > 1
        many = client.completions.create(**how | {"max_tokens": 300}, stream=True, extra_body={"ignore_eos": True})
        assert len(list(many)) > 30, "tokens come as they are made, or the few of a step together"
        with pytest.raises(openai.NotFoundError) as told:
            client.completions.create(**{**how, "model": "other"})
        assert told.value.param == "model"
    mine = httpx.get(f"{two.url}/health", headers={"x-request-id": "mine"})
    assert mine.status_code == 200 and mine.headers["x-request-id"] == "mine"
    large = httpx.post(f"{two.url}/v1/completions", json={"prompt": "a" * 70_000})
    assert large.status_code == 413 and "max_body_bytes" in large.json()["error"]["message"]


def test_nothing_leaves_the_machine(two):
    from ray._common.usage import usage_lib

    assert not usage_lib.usage_stats_enabled()
    here = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    ours = {each.pid for each in psutil.Process().children(recursive=True)}
    others = {
        each.raddr.ip.removeprefix("::ffff:") for each in psutil.net_connections() if each.pid in ours and each.raddr
    }
    assert others and others <= here


def outcome(url: str, stream: bool, begun: Callable[[], object] = lambda: None) -> str:
    """ "complete", "told" with an error, or how it was silent. `begun` is called with each piece."""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": stream}, timeout=60) as answer:
            text = "".join((begun(), piece)[1] for piece in answer.iter_text())
    except httpx.TransportError:
        return "told"
    if answer.status_code != 200:
        assert json.loads(text)["error"]["message"] and answer.headers["x-request-id"]
        return "told"
    if '"error":' in text:
        return "told"
    if stream:
        return "complete" if text.endswith("data: [DONE]\n\n") else f"silent: {text[-200:]}"
    return "complete" if json.loads(text)["choices"][0]["finish_reason"] == "length" else f"silent: {text}"


def test_a_replica_that_is_killed_loses_nothing_silently_and_is_replaced(two):
    before = {each.pid for each in processes()}
    assert len(before) == 2
    begun = [threading.Event() for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(outcome, two.url, n % 4 > 0, begun[n].set) for n in range(16)]
        eventually(lambda: sum(each.is_set() for each in begun) > 4, 60)  # more than one replica has slots for
        os.kill(min(before), signal.SIGKILL)
        found = [each.result() for each in waiting]
    assert set(found) <= {"complete", "told"} and "told" in found, found
    eventually(lambda: len({each.pid for each in processes()} - before) == 1 and "2 running" in two.state, 120)
    assert outcome(two.url, stream=True) == "complete"


def test_stop_finishes_what_was_accepted_and_refuses_the_rest(two):
    """The last one: it ends the cluster."""
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(outcome, two.url, stream) for stream in (True, False) * 2]
        time.sleep(0.5)
        stopping = pool.submit(two.stop)
        refused = eventually(lambda: (told := httpx.get(f"{two.url}/health")).status_code == 503 and told)
        assert refused.json()["error"]["code"] == "shutting_down"
        assert [each.result() for each in waiting] == ["complete"] * 4
        stopping.result()
    assert two.state == "stopped" and not processes()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{two.url}/health")


def test_an_encoder_answers_through_rays_proxy_and_is_replaced(tmp_path):
    bert = eet_lab.load(theirs("bert-classes"), device="cpu")
    bert.save(tmp_path / "bert")
    served = eet_lab.serve_replicas(tmp_path / "bert", device="cpu", served_model_name="bert", drain_s=1)
    try:
        body = {"model": "bert", "input": [[5, 6, 7]]}
        answer = httpx.post(f"{served.url}/v1/embeddings", json=body, headers={"x-request-id": "mine"}, timeout=60)
        expected = eet_lab.encode(bert, [[5, 6, 7]]).vectors
        found = [each["embedding"] for each in answer.json()["data"]]
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)
        assert answer.headers.get_list("x-request-id") == ["mine"]
        [replica] = processes()
        replica.kill()

        def is_answered() -> bool:
            told = httpx.post(f"{served.url}/v1/embeddings", json=body, timeout=120)
            assert told.status_code == 200 or told.json()["error"]["message"]
            return told.status_code == 200

        eventually(is_answered, 120)
        assert replica not in processes()
    finally:
        served.stop()


def test_ray_is_imported_only_for_replicas():
    code = "import sys, eet_lab; eet_lab.serve, eet_lab.serve_replicas; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
