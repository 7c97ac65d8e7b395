"""Requests that come again: the same answer, without the engine; and nothing that is drawn anew."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eet_lab
from eet_lab.errors import SetupError
from eet_lab.serving.answer import News
from eet_lab.serving.bodies import ChatBody, CompletionBody, EmbeddingBody, parsed
from eet_lab.serving.errors import ApiError
from eet_lab.serving.options import Options
from eet_lab.serving.response_cache import ENTRY_BYTES, ResponseCache

from .conftest import PAGED, PROMPT
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
    assert key == {"input": "a"} and np.array_equal(cache.get(b"k")[0], made[0]) and cache.get(b"k")[1] == 5


@pytest.mark.parametrize("value", [-1, 1.5, "many"])
def test_a_room_that_is_none(value):
    with pytest.raises(SetupError, match="response_cache_mib"):
        Options(response_cache_mib=value)
