"""The load generator, on servers whose answers are made up: times, outcomes, and what it does not wait for."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time

import numpy as np
import pytest
from load_servers import due, say_three, serving

from eet_lab.cli import main
from eet_lab.errors import SetupError, TrafficError
from eet_lab.scheduling.traffic import Gamma, Uniform, make_traffic
from eet_lab.serving.load import Target, run_load, start_load


def test_times_count_from_when_a_request_was_due():
    with serving(lambda asked: say_three(asked, 0.2, 0.1)) as url:
        found = run_load(url, due(0.0, 0.05, 0.1))
    assert found.counts == {"answered": 3, "refused": 0, "failed": 0, "lost": 0} and not found.reasons
    assert np.all(found.ttft_ms > 195) and np.all(found.ttft_ms < 350)
    assert np.all(found.tpot_ms > 95) and np.all(found.tpot_ms < 180)
    assert np.all(found.e2e_ms >= found.ttft_ms + 195)
    assert found.told.tolist() == [3] * 3 and found.prompt_tokens.tolist() == [5] * 3
    assert found.tokens_per_s == pytest.approx(9 / found.span_s)
    assert found.goodput(ttft_ms=1) == 0 and found.goodput(ttft_ms=5000) == found.requests_per_s
    assert "3 answered" in repr(found) and "TTFT" in repr(found)


def test_requests_are_sent_when_they_are_due_whatever_became_of_those_before():
    """A closed loop, or one connection after another, would take 20 times as long."""
    came = list[float]()

    async def slow(asked):
        came.append(time.perf_counter())
        await say_three(asked, 1.0)

    with serving(slow) as url:
        found = run_load(url, due(*np.arange(20) / 50))
    assert found.counts["answered"] == 20 and found.span_s < 2.5
    assert np.diff(came).max() < 0.3 and 0.3 < came[-1] - came[0] < 0.7


def test_a_generator_that_lags_behind_counts_its_own_delay(monkeypatch):
    """Or else a stall of the generator would hide what those who came meanwhile waited."""
    real, requests = Target.request, iter(range(9))

    def stalled(self, *given):
        time.sleep(0.4 if next(requests) == 1 else 0)
        return real(self, *given)

    monkeypatch.setattr(Target, "request", stalled)
    with serving(say_three) as url:
        found = run_load(url, due(0.0, 0.1, 0.1))
    assert found.ttft_ms[1] > 250 and found.ttft_ms[2] > 250 and found.late_ms["p99"] > 250
    assert "the generator is too busy" in found.report()


def test_a_stream_without_done_ends_with_its_reasons_and_usage():
    """As that of transformers serve does; of several answers all must have ended."""
    usage = {"prompt_tokens": 4, "completion_tokens": 3}

    async def answer(asked):
        asked.stream()
        if asked.number < 2:
            asked.text("a")
        match asked.number:
            case 0:
                asked.event({"choices": [{"text": "", "finish_reason": "length"}], "usage": usage})
            case 1:
                asked.event({"choices": [{"finish_reason": "stop"}, {"finish_reason": None}], "usage": usage})
            case 2:
                asked.event({"choices": ["a"]})
        asked.send(b"0\r\n\r\n")

    with serving(answer) as url:
        found = run_load(url, due(0.0, 0.1, 0.2))
    assert found.counts == {"answered": 1, "refused": 0, "failed": 1, "lost": 1}
    assert {*found.reasons} == {
        "the stream ended without [DONE]",
        "an event is no JSON object, or its choices are none",
    }
    assert found.told[0] == 3


def test_every_outcome_is_counted_with_its_reason():
    async def answer(asked):
        match asked.number % 6:
            case 0:
                await say_three(asked)
            case 1:
                error = {"message": "The queue is full: 5 wait.", "code": "too_many"}
                asked.whole({"error": error}, 429, "retry-after: 1\r\n")
            case 2:
                code = "model_not_found" if asked.number < 6 else None
                asked.whole({"error": {"message": "No such model.", "code": code}}, 404)
            case 3:
                asked.stream()
                asked.text("a")
                return False
            case 4:
                asked.stream()
                asked.text("a")
                asked.event({"error": {"message": "broke", "code": "error-1"}})
                asked.finish()
            case 5:
                asked.stream()
                asked.text("a")
                asked.send(b"0\r\n\r\n")

    with serving(answer) as url:
        found = run_load(url, due(*np.arange(12) / 100))
    assert found.counts == {"answered": 2, "refused": 2, "failed": 4, "lost": 4}
    assert found.reasons == {
        "429 too_many": 2,
        "404 model_not_found: No such model.": 1,
        "404 No such model.": 1,
        "in the stream: error-1": 2,
        "The connection broke before the answer was complete (closed).": 2,
        "the stream ended without [DONE]": 2,
    }
    assert np.isfinite(found.first_ms).sum() == 2, "what broke off has no latency"
    assert found.refusal_ms["p99"] < 500 and "2 × 429 too_many" in found.report()
    assert found.goodput() == found.requests_per_s == pytest.approx(2 / found.span_s)


def test_a_server_that_wants_a_key_is_told_apart():
    with serving(say_three, 401) as url:
        for key, said in ((None, "asks for an API key, and none was given"), ("a", "takes another API key")):
            with pytest.raises(SetupError, match=f"{said}. Give the server's key .api_key, or --api-key-file FILE"):
                run_load(Target(url, api_key=key), due(0.0))


def test_what_is_never_answered_is_lost_after_its_time():
    async def never(asked):
        await asyncio.sleep(30)

    start = time.monotonic()
    with serving(never) as url:
        found = run_load(url, due(0.0, 0.1), timeout_s=0.3)
    assert time.monotonic() - start < 5
    assert found.counts["lost"] == 2 and found.reasons == {"no answer within 0.3 s": 2}
    assert not found.percentiles["ttft_ms"] and found.requests_per_s == 0 and "0 answered" in found.report()


def test_a_server_that_tells_no_usage_has_its_events_counted():
    async def chat(asked):
        assert isinstance(asked.body["messages"][0]["content"], str) and asked.body["stream"]
        asked.stream()
        asked.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(0.1)  # its first event is no token
        for text in ("a", '"usage": {"error"', "c"):
            asked.event({"choices": [{"delta": {"content": text}}]})
        asked.finish()

    with serving(chat) as url:
        found = run_load(Target(url, "chat"), due(0.0), keep_text=True)
    assert found.told.tolist() == [3] and found.ttft_ms[0] > 95 and found.texts == ('a"usage": {"error"c',)


def test_embeddings_are_answered_at_once():
    async def embed(asked):
        assert asked.path == "/v1/embeddings" and len(asked.body["input"]) == 5
        vector = {"object": "embedding", "index": 0, "embedding": "AAAA" * 50_000}
        asked.whole({"data": [vector], "usage": {"prompt_tokens": 7, "total_tokens": 7}})

    with serving(embed) as url:
        found = run_load(Target(f"{url}/v1/", "embeddings"), due(0.0, 0.01))
    assert found.counts["answered"] == 2 and found.prompt_tokens.tolist() == [7, 7]
    assert found.prompt_tokens_per_s == pytest.approx(14 / found.span_s) and found.tokens_per_s == 0
    assert not found.percentiles["tpot_ms"] and np.all(found.ttft_ms == found.e2e_ms)
    assert "TTFT" not in found.report() and "told" not in found.report(), "vectors have no tokens"


def test_a_report_shows_the_most_frequent_reasons_and_counts_the_others():
    async def refuse(asked):
        asked.whole({"error": {"message": f"A prompt holds {min(asked.number, 30)}."}}, 400)

    with serving(refuse) as url:
        found = run_load(url, due(*np.zeros(40)))
    assert len(found.reasons) == 31
    said = found.report().splitlines()
    first = next(number for number, line in enumerate(said) if "A prompt holds" in line)
    assert said[first] == "10 × 400 A prompt holds 30." and said[first + 10] == "21 more, for 21 other reasons"


def test_a_connection_that_its_server_has_closed_meanwhile_is_no_loss():
    """Keep-alive has this race: the request is sent again on another connection, once."""

    async def once(asked):
        await say_three(asked)
        asyncio.get_running_loop().call_later(0.05, asked.writer.close)

    seen = []  # the writers themselves: an id is given again once one is gone

    async def closes_on_the_second(asked):
        if asked.writer in seen:
            return False
        seen.append(asked.writer)
        await say_three(asked)

    for answer in (once, closes_on_the_second):
        with serving(answer) as url:
            found = run_load(Target(url, model="made-up"), due(0.0, 0.3, 0.6))
        assert found.counts["answered"] == 3, found.reasons


def test_a_thousand_streams_at_once():
    gate = threading.Event()

    async def wait(asked):
        asked.stream()
        asked.text("a")
        if asked.number == 999:
            gate.set()
        while not gate.is_set():
            await asyncio.sleep(0.05)
        asked.text("b")
        asked.finish()

    with serving(wait) as url:
        found = run_load(url, due(*[0.0] * 1000), timeout_s=60)
    assert found.counts["answered"] == 1000


def test_seeds_repeat():
    bodies = list[dict]()

    async def note(asked):
        bodies.append(asked.body)
        await say_three(asked)

    traffic = make_traffic(10, Gamma(500.0), Uniform(3, 9), Uniform(1, 4))
    with serving(note) as url:
        for seed in (0, 0, 1):
            run_load(url, traffic, seed=seed)
        run_load(Target(url, as_text=True), traffic, prompts=["one"] * 10)
        run_load(Target(url, vocab_size=9), traffic)
        for name in ("small", "untold", "not there"):
            run_load(Target(url, model=name), traffic)
    first, again, other, own = (sorted(map(json.dumps, bodies[at : at + 10])) for at in (0, 10, 20, 30))
    assert first == again != other
    asked = [json.loads(body) for body in first]
    assert sorted(len(body["prompt"]) for body in asked) == sorted(traffic.lengths)
    assert sorted(body["max_tokens"] for body in asked) == sorted(traffic.new_tokens)
    assert max(token for body in asked for token in body["prompt"]) < 50, "the server's vocabulary"
    assert {body["model"] for body in asked} == {"made-up"} and {json.loads(body)["prompt"] for body in own} == {"one"}
    limited, small, *wide = (
        {token for body in bodies[at : at + 10] for token in body["prompt"]} for at in (40, 50, 60, 70)
    )
    assert limited == {5, 6, 7, 8} and small == {5, 6}, "the vocabulary of the model that is named"
    assert all(50 < max(tokens) < 1000 for tokens in wide), "what is not told"


def test_where_no_server_is():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for apart in (False, True):
            with pytest.raises(SetupError, match="Nothing answers at http"):
                run_load(url, due(0.0), apart=apart)


WRONG = ["", "127.0.0.1:8000", "ftp://a", "http://", "http://a b", "http://a:99999", "http://u:p@a", "http://a\n", 5]


@pytest.mark.parametrize("url", WRONG)
def test_urls_that_are_none(url):
    with pytest.raises(SetupError, match="must be such as http"):
        Target(url)


def test_what_cannot_be_asked():
    for wrong in ({"endpoint": "embedings"}, {"vocab_size": 5}, {"api_key": "a\r\nb"}, {"model": ""}):
        with pytest.raises(SetupError):
            Target("http://a", **wrong)
    for prompt in (np.arange(4), [np.int64(3)], ["a"], [True], 5, None):
        with pytest.raises(
            TrafficError, match=r"prompts\[1\] is .*, but it must be a text, or a list of whole numbers"
        ):
            start_load("http://a", due(0.0, 1.0), prompts=["a", prompt])
    for wrong in (
        {"prompts": np.zeros((2, 3), int)},
        {"timeout_s": math.nan},
        {"timeout_s": 0},
        {"prompts": ["a"]},
        {"seed": -1},
    ):
        with pytest.raises(TrafficError):
            start_load("http://a", due(0.0, 1.0), **wrong)


def test_the_command(tmp_path, capsys):
    async def answer(asked):
        if asked.number < 10:
            await say_three(asked)
        else:
            asked.whole({"error": {"message": "no"}}, 400)

    saved = tmp_path / "found.json"
    words = ["--requests", "10", "--rate", "200", "--lengths", "3-9", "--new-tokens", "3", "--ttft", "5000"]
    with serving(answer) as url:
        assert main(["load", url, *words, "--save", str(saved)]) == 0
        out = capsys.readouterr().out
        assert "10 answered" in out and "Goodput, with ttft <= 5,000 ms" in out
        assert main(["load", url, *words]) == 1
    assert "10 × 400 no" in capsys.readouterr().out
    found = json.loads(saved.read_text())
    assert (
        found["answered"] == 10 and found["limits"] == {"ttft_ms": 5000} and found["percentiles"]["ttft_ms"]["p99"] > 0
    )
    assert main(["load", "http://127.0.0.1:9", "--requests", "1"]) == 2
    assert main(["load", "--trace", "a.csv", "--rate", "3"]) == 2
    capsys.readouterr()
    assert main(["load", "--tpot", "nan"]) == 2 and "--tpot is nan, but it must be a" in capsys.readouterr().err
    assert main(["load", "--endpoint", "embeddings", "--new-tokens", "9"]) == 2
    assert "--new-tokens is for answers" in capsys.readouterr().err
    assert main(["load", "--api-key-file", str(tmp_path / "none")]) == 2
