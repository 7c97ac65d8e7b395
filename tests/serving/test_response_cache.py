"""Requests that come again: the same answer, without the engine; and nothing that is drawn anew."""

from __future__ import annotations

import asyncio
import json
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eet_lab
from eet_lab.errors import SetupError
from eet_lab.serving.bodies import ChatBody, CompletionBody, EmbeddingBody, parsed
from eet_lab.serving.errors import ApiError
from eet_lab.serving.generating import Piece, Step
from eet_lab.serving.jobs import Job, News
from eet_lab.serving.options import Options
from eet_lab.serving.response_cache import ENTRY_BYTES, Finished, ResponseCache, recorded

from .conftest import PAGED, PROMPT, Raw, eventually
from .test_encoders import TEXTS, bert  # noqa: F401  # a fixture

TEXT = "/v1/completions"
HOW = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def served(demo):
    served = eet_lab.serve(demo, PAGED, front="thread", response_cache_mib=1, api_key=None).wait_until_up(60)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def post(served):
    head = {"content-type": "application/json"}
    return lambda body, path=TEXT: httpx.post(f"{served.url}{path}", content=json.dumps(body), headers=head)


@pytest.fixture
def cache(served):
    return served._server.service.cache


def events(answer: httpx.Response) -> list:
    """The chunks of a stream, without what names the request."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [{**json.loads(line), "id": None, "created": None} for line in lines]


def without_names(answer: httpx.Response) -> dict:
    return {**answer.json(), "id": None, "created": None}


def test_a_request_that_comes_again_needs_no_engine(post, cache, generator, monkeypatch):
    asked = HOW | {"n": 2, "logprobs": 2}
    first = post(asked)
    hits = cache.hits
    monkeypatch.setattr(generator, "join", lambda job: pytest.fail("the engine was asked"))
    again = post(asked | {"model": "demo", "seed": 5, "top_p": 0.5, "user": "other"})
    assert without_names(again) == without_names(first) and again.json()["id"] != first.json()["id"]
    assert again.headers["x-cache"] == "hit" and "x-cache" not in first.headers and cache.hits == hits + 1


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"continuous_usage_stats": True}])
def test_a_stream_is_said_again_as_a_stream_and_whole(post, options):
    asked = HOW | {"temperature": 1.0, "seed": 3, "max_tokens": 5 + len(options)}
    first, again = (post(asked | {"stream": True, "stream_options": options}) for _ in range(2))
    assert events(again) == events(first) and again.headers["x-cache"] == "hit"
    assert again.headers["content-type"] == first.headers["content-type"]
    whole = post(asked)
    text = "".join(event["choices"][0]["text"] for event in events(first) if event["choices"])
    assert whole.headers["x-cache"] == "hit" and whole.json()["choices"][0]["text"] == text


@pytest.mark.parametrize("field", ["prompt", "max_tokens", "n", "logprobs", "stop", "ignore_eos", "stop_token_ids"])
def test_what_matters_makes_another_request(cache, field):
    other = {
        "prompt": "b",
        "max_tokens": 9,
        "n": 2,
        "logprobs": 0,
        "stop": "x",
        "ignore_eos": True,
        "stop_token_ids": [5],
    }
    bodies = [parsed(json.dumps(body).encode(), CompletionBody) for body in (HOW, HOW | {field: other[field]})]
    assert cache.key_of(TEXT, bodies[0]) != cache.key_of(TEXT, bodies[1])
    assert cache.key_of(TEXT, bodies[0]) != cache.key_of("/v1/chat/completions", bodies[0])


def test_what_is_drawn_anew_is_not_kept(post, cache):
    before = cache.hits, cache.misses, cache.num_bytes
    drawn = HOW | {"temperature": 1.0}
    assert all("x-cache" not in post(drawn).headers for _ in range(2))
    assert (cache.hits, cache.misses, cache.num_bytes) == before
    seeded = [parsed(json.dumps(drawn | {"seed": seed}).encode(), CompletionBody) for seed in (1, 2)]
    assert len({cache.key_of(TEXT, body) for body in seeded}) == 2
    chat = ChatBody(messages=[{"role": "user", "content": "a"}])
    assert chat.identity() is None and ResponseCache(0).key_of(TEXT, seeded[0]) is None


def test_errors_are_not_kept(post, served, cache, generator, monkeypatch):
    kept = cache.num_bytes
    for body in (HOW | {"max_tokens": 10**6}, HOW | {"stop": 3}):
        assert [post(body).status_code for _ in range(2)] == [400, 400]
    asked, service = HOW | {"prompt": "It fails"}, served._server.service
    with monkeypatch.context() as patch:
        broken = ApiError(500, "broken")
        patch.setattr(generator, "join", lambda job: service.receive([News(job.answer, (1,), None, broken, 1.0)]))
        assert [post(asked).status_code for _ in range(2)] == [500, 500] and cache.num_bytes == kept
    assert "x-cache" not in post(asked).headers and "x-cache" in post(asked).headers


@pytest.fixture
def held(generator, monkeypatch):
    """Jobs do not reach the engine: they are here, until `go` sends them on."""
    jobs, join = list[Job](), generator.join
    monkeypatch.setattr(generator, "join", jobs.append)

    def go() -> None:
        monkeypatch.setattr(generator, "join", join)
        while jobs:
            join(jobs.pop())

    jobs_of = namedtuple("Held", "jobs go")
    return jobs_of(jobs, go)


def all_inside(served, count: int) -> None:
    admission = served._server.service.admission
    eventually(lambda: admission.num_inside == count)


def test_what_is_asked_for_at_once_is_made_once(served, post, cache, held):
    asked, hits = HOW | {"prompt": "At once", "n": 2}, cache.hits
    with ThreadPoolExecutor() as pool:
        bodies = [asked | {"stream": stream} for stream in (True, False, True, False)]
        answers = [pool.submit(post, body) for body in bodies]
        all_inside(served, 4)
        eventually(lambda: len(held.jobs) == 2)
        held.go()
        answers = [answer.result() for answer in answers]
    assert sum("x-cache" in answer.headers for answer in answers) == 3 == cache.hits - hits
    streams, wholes = answers[::2], answers[1::2]
    assert events(streams[0]) == events(streams[1]) and without_names(wholes[0]) == without_names(wholes[1])
    assert not cache.making


def test_the_next_one_makes_what_the_first_one_fails_to(served, post, held, cache):
    """Whether it fails or its client leaves: only it is told."""
    service, asked = served._server.service, HOW | {"prompt": "It fails at first"}
    broken = ApiError(500, "broken")
    with ThreadPoolExecutor() as pool:
        first = Raw(served.url).post(TEXT, asked)
        eventually(lambda: len(held.jobs) == 1)
        answers = [pool.submit(post, asked) for _ in range(3)]
        all_inside(served, 4)
        first.close()
        all_inside(served, 3)
        eventually(lambda: len(held.jobs) == 2)
        news = News(held.jobs.pop().answer, (), None, broken, 1.0)
        served._server._loop.call_soon_threadsafe(service.receive, [news])
        eventually(lambda: len(held.jobs) == 2)
        held.go()
        answers = [answer.result() for answer in answers]
    assert sorted(answer.status_code for answer in answers) == [200, 200, 500]
    assert sum("x-cache" in answer.headers for answer in answers) == 1 and not cache.making


def test_whoever_waits_may_leave(served, post, held, cache):
    asked = HOW | {"prompt": "Somebody leaves"}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, asked)
        eventually(lambda: len(held.jobs) == 1)
        other = Raw(served.url).post(TEXT, asked)
        all_inside(served, 2)
        other.close()
        all_inside(served, 1)
        held.go()
        assert answer.result().status_code == 200


def test_a_first_one_that_reads_slowly_is_not_waited_for():
    async def run():
        async def steps():
            for number in range(5):
                yield Step([Piece(0, "a", "length" if number == 4 else None)], number + 1)

        cache = ResponseCache(9999)
        generating = SimpleNamespace(steps=steps, choices=[Finished(0, "length")], prompt_tokens=3)
        cache.begin(b"k")
        made, said = cache.making[b"k"], recorded(generating, cache, b"k")
        first = await anext(said)
        found = await made
        assert found.steps[0] == first and len(found.steps) == 5 and cache.get(b"k") == found

    asyncio.run(run())


def test_metrics_count_them(post, served, cache):
    for _ in range(2):
        post(HOW)
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    numbers = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    told = [
        numbers[f'eet:response_cache_{name}{{model_name="demo"}}'] for name in ("hits_total", "misses_total", "bytes")
    ]
    assert told == [cache.hits, cache.misses, cache.num_bytes] and all(told)


def test_vectors_and_classes_are_read_once(bert, monkeypatch):  # noqa: F811
    served = eet_lab.serve(bert, served_model_name="bert", response_cache_mib=1).wait_until_up(60)
    reader = served._server.service.reader
    try:
        for path in ("/v1/embeddings", "/v1/classify"):
            first = httpx.post(f"{served.url}{path}", json={"input": TEXTS})
            with monkeypatch.context() as patch:
                patch.setattr(reader, "join", lambda reading: pytest.fail("the engine was asked"))
                again = httpx.post(f"{served.url}{path}", json={"input": TEXTS})
            assert again.json()["data"] == first.json()["data"] and again.json()["usage"] == first.json()["usage"]
            assert again.headers["x-cache"] == "hit" and "x-cache" not in first.headers
        with ThreadPoolExecutor() as pool, monkeypatch.context() as patch:
            readings, join = [], reader.join
            patch.setattr(reader, "join", readings.append)
            both = [pool.submit(httpx.post, f"{served.url}/v1/embeddings", json={"input": "at once"}) for _ in range(2)]
            all_inside(served, 2)
            join(eventually(lambda: readings)[0])
            assert both[0].result().json()["data"] == both[1].result().json()["data"] and len(readings) == 1
        written = httpx.post(f"{served.url}/v1/embeddings", json={"input": TEXTS, "encoding_format": "base64"})
        assert written.headers["x-cache"] == "hit" and isinstance(written.json()["data"][0]["embedding"], str)
    finally:
        served.stop()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 900)), max_size=60), st.integers(0, 4000))
def test_it_never_holds_more_and_keeps_the_newest(asked, most):
    cache, order = ResponseCache(most), []
    for number, size in asked:
        key = bytes([number])
        if (found := cache.get(key)) is None:
            cache.put(key, bytes([number]) * size)
        else:
            assert set(found) <= {number}
        order = [*(each for each in order if each != key), key]
        held = sum(len(kept) + ENTRY_BYTES for kept in cache._kept.values())
        assert cache.num_bytes == held <= most
        assert [*cache._kept] == [each for each in order if each in cache._kept], "the oldest leave first"
    assert cache.hits + cache.misses == len(asked)


def test_arrays_come_back_whole():
    cache, key = ResponseCache(10_000), EmbeddingBody(input="a").identity()
    made = np.arange(6, dtype=np.float32).reshape(2, 3), 5
    cache.put(b"k", made)
    assert (
        key == {"input": "a", "truncate_prompt_tokens": None}
        and np.array_equal(cache.get(b"k")[0], made[0])
        and cache.get(b"k")[1] == 5
    )


@pytest.mark.parametrize("value", [-1, 1.5, "many"])
def test_a_room_that_is_none(value):
    with pytest.raises(SetupError, match="response_cache_mib"):
        Options(response_cache_mib=value)
