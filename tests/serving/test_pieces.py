"""The parts of a server on their own: stop strings, admission, answers, bodies."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eet_lab
from eet_lab.models.transcript import StoppedText
from eet_lab.serving.bodies import CompletionBody, parsed
from eet_lab.serving.errors import ApiError
from eet_lab.serving.gate import Admission, before
from eet_lab.serving.generating import Generating
from eet_lab.serving.jobs import Answer, News
from eet_lab.serving.metrics import Histogram
from eet_lab.serving.options import Options
from eet_lab.serving.service import LocalFront, Service


def of_bytes(ids):
    return bytes(ids).decode(errors="replace")


@given(
    st.text("abé€😀", max_size=30),
    st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), min_size=1),
)
def test_a_text_ends_before_the_first_stop_however_it_comes(text, stops, sizes):
    stream, pieces, raw, at = StoppedText(of_bytes, stops), [], list(text.encode()), 0
    for number in range(len(raw) + 1):
        size = sizes[number % len(sizes)]
        pieces.append(stream.add(raw[at : at + size]))
        at += size
    pieces.append(stream.finish())
    # Of all ends of the text, the shortest that holds a stop: what came first ended it.
    ends = [at + len(stop) for stop in stops for at in [text.find(stop)] if at >= 0]
    seen = text[: min(ends)] if ends else text
    first = min((at for stop in stops if (at := seen.find(stop)) >= 0), default=len(text))
    assert "".join(pieces) == text[:first]
    assert stream.is_stopped == bool(ends)
    assert all("\ufffd" not in piece for piece in pieces)


def test_what_cannot_begin_a_stop_is_not_held_back():
    stream = StoppedText(of_bytes, ["STOP"])
    assert [stream.add([byte]) for byte in b"a STx STO"] == ["a", " ", "", "", "STx", " ", "", "", ""]
    assert stream.finish() == "STO" and not stream.is_stopped


def test_an_error_is_raised_after_the_tokens_that_came_with_it():
    async def run():
        wake = asyncio.Event()
        answer = Answer(wake, is_followed=True)
        assert not answer.put(News(answer, [1], None, None, 0.0)), "it wakes at once for the first"
        await asyncio.wait_for(wake.wait(), 1)
        assert answer.put(News(answer, [2], None, None, 0.0)), "its stream waits for the others'"
        answer.put(News(answer, (), None, ApiError(500, "it failed"), 0.0))
        wake.clear()
        assert answer.take() == [1, 2]
        await asyncio.wait_for(wake.wait(), 1)
        with pytest.raises(ApiError, match="it failed"):
            answer.take()
        answer.put(News(answer, [3], "stop", None, 0.0))
        assert answer.reason is None, "it was over"

    asyncio.run(run())


@pytest.mark.parametrize("is_closed_first", [False, True], ids=["by an error", "by its client"])
def test_each_choice_is_counted_once(demo, is_closed_first):
    """One is complete and one fails in the same wake; or a client leaves, and what it was told is still recorded."""
    front = LocalFront(Service(demo))

    async def run():
        generating = Generating(front, [[1]], CompletionBody(prompt="a", n=3), front.admission.enter(0, 0.0))
        generating.start([eet_lab.Settings(4)], asyncio.Event().wait)
        first, second, _ = (choice.answer for choice in generating.choices)
        first.put(News(first, [1], "stop", None, 0.0))
        if is_closed_first:
            generating.close()
            assert [step.pieces[0].finish async for step in generating.steps()] == ["stop"]
        else:
            second.put(News(second, (), None, ApiError(500, "it failed"), 0.0))
            with pytest.raises(ApiError, match="it failed"):
                await anext(generating.steps())
            generating.close()

    asyncio.run(run())
    ends = ["abort"] * 3 if is_closed_first else ["stop", "error", "abort"]
    assert front.metrics.finished == Counter(ends)
    assert sum(front.metrics.whole_s._counts) == ends.count("stop")


def test_what_is_waited_for_ends_with_the_client_and_in_time():
    async def run():
        never, now = asyncio.Event(), time.perf_counter()

        async def receive(kind="http.disconnect"):
            return {"type": kind}

        with pytest.raises(ApiError, match="client has left"):
            await before(now + 60, never.wait(), receive)
        with pytest.raises(ApiError, match="longer than the server waits"):
            await before(now - 1, never.wait(), never.wait)
        assert await before(now + 60, asyncio.sleep(0, "done"), never.wait) == "done"

    asyncio.run(run())


def test_who_joins_after_all_were_ended_is_told(demo):
    """Whoever was about to: its text was still read, or it waited for another's answer."""
    service = LocalFront(Service(demo))
    service.end_all(ApiError(503, "it ends"))
    with pytest.raises(ApiError, match="it ends"):
        service.joined(Answer(asyncio.Event(), is_followed=True))


def test_a_look_for_a_template_that_failed_is_not_kept(demo, monkeypatch):
    """A disk that fails for a moment would otherwise fail all conversations until the server starts anew."""
    service, found = LocalFront(Service(demo)), object()
    looks = iter([OSError("not now"), found])

    def look(folder):
        if isinstance(each := next(looks), OSError):
            raise each
        return each

    async def run():
        monkeypatch.setattr("eet_lab.serving.front.template_of", look)
        with pytest.raises(OSError, match="not now"):
            await service.template()
        assert [await service.template(), await service.template()] == [found] * 2, "and the one that is there is kept"

    asyncio.run(run())


def test_admission_counts_tokens_until_the_first_is_there():
    admission = Admission(Options(max_queued_requests=3, max_queued_tokens=100))
    first = admission.enter(40, now=0.0)
    assert (admission.num_queued, admission.queued_tokens) == (1, 10), "four bytes a token, before it is read"
    first.count(2, 120)
    with pytest.raises(ApiError, match="120 tokens wait, and at most 100") as told:
        admission.enter(4, now=0.0)
    assert told.value.status == 429 and told.value.headers()["Retry-After"] == "1"
    for now in (50.0, 60.0):  # once
        first.started(now)
    assert (admission.num_queued, admission.queued_tokens, admission.num_inside) == (0, 0, 1)
    tickets = [admission.enter(0, now=0.0) for _ in range(3)]
    with pytest.raises(ApiError, match="3 requests wait, and at most 3") as told:
        admission.enter(0, now=0.0)
    assert told.value.headers()["Retry-After"] == "5", "what others waited"
    for ticket in [first, *tickets, first]:
        ticket.left()
    assert (admission.num_queued, admission.queued_tokens, admission.num_inside) == (0, 0, 0)
    admission.is_draining = True
    with pytest.raises(ApiError, match="shutting down"):
        admission.enter(0, now=0.0)


@settings(max_examples=25)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_value_of_a_field_is_taken_or_refused(value):
    for name in (*CompletionBody.model_fields, "logprobs", "tools"):
        try:
            parsed(json.dumps({name: value}).encode(), CompletionBody).stops()
        except ApiError as error:
            json.dumps(error.body()).encode()


def test_nulls_are_what_was_not_given():
    raw = b'{"prompt": "a", "n": null, "logprobs": null, "user": "me", "best_of": 1, "logit_bias": {}}'
    body = parsed(raw, CompletionBody)
    assert body == CompletionBody(prompt="a")


def test_a_histogram_counts_what_is_at_most_a_bound():
    histogram = Histogram((1, 10))
    for value in (0.5, 1, 2, 10, 11):
        histogram.observe(value)
    buckets = {s.labels["le"]: s.value for s in histogram.family("x", "y", "m").samples if s.name == "x_bucket"}
    assert buckets == {"1.0": 2, "10.0": 4, "+Inf": 5}
