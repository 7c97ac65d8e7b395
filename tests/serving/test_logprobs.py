"""Log-probabilities in OpenAI's shapes, by the official client: whole and streamed."""

from __future__ import annotations

import pytest

import eet_lab
from eet_lab.scheduling import TokenLogprobs
from eet_lab.serving.logprobs import Scores, of_chat, of_completion

from .conftest import PROMPT
from .test_chat import HELLO, folder  # noqa: F401  # a fixture

HOW = dict(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def greedy(demo):
    """What the engine tells of the tokens after a prompt, in process."""
    return eet_lab.generate(demo, [PROMPT], max_new_tokens=24, logprobs=3).run


def joined(chunks) -> dict[str, list]:
    """The lists of all chunks of one choice, one behind the other."""
    found: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks:
        if chunk.choices[0].logprobs:
            for name, values in chunk.choices[0].logprobs.model_dump().items():
                found[name] += values
    return found


def test_a_completion_has_four_lists(client, demo, greedy):
    told = client.completions.create(**HOW, logprobs=3)
    [choice], [tokens], [want] = told.choices, greedy.tokens, greedy.logprobs
    found = choice.logprobs
    assert found.tokens == [demo.decode([token]) for token in tokens] and len(tokens) == told.usage.completion_tokens
    assert found.token_logprobs == pytest.approx([each.logprob for each in want], abs=1e-5)
    for each, top in zip(want, found.top_logprobs, strict=True):
        values = {demo.decode([token]): value for token, value in reversed(each.top)}
        assert top == pytest.approx(values, abs=1e-5), "greedy: the chosen one is the first of them"
    assert choice.text == "".join(found.tokens[:-1]), "the last one ends it, and is no part of it"
    assert [
        choice.text[at:][: len(token)] for at, token in zip(found.text_offset, found.tokens[:-1], strict=False)
    ] == (found.tokens[:-1])
    assert client.completions.create(**HOW).choices[0].logprobs is None


def test_a_stream_tells_the_same(client):
    whole = client.completions.create(**HOW, logprobs=2).choices[0]
    chunks = list(client.completions.create(**HOW, logprobs=2, stream=True))
    assert joined(chunks) == whole.logprobs.model_dump()
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text


def test_0_tells_the_chosen_ones_alone_and_a_draw_is_among_them(client):
    drawn = HOW | {"temperature": 1.5, "seed": 7, "max_tokens": 8}
    told = client.completions.create(**drawn, logprobs=0).choices[0].logprobs
    assert told.top_logprobs == [{t: v} for t, v in zip(told.tokens, told.token_logprobs, strict=True)]
    more = client.completions.create(**drawn, logprobs=1).choices[0].logprobs
    assert more.token_logprobs == pytest.approx(told.token_logprobs), "of the raw logits, whatever the temperature"
    assert {len(top) for top in more.top_logprobs} == {1, 2}, "what was drawn is told though it is not the likeliest"
    assert all(token in top for token, top in zip(more.tokens, more.top_logprobs, strict=True))


def test_each_choice_has_its_own(client):
    told = client.completions.create(**(HOW | {"temperature": 1.0, "seed": 7, "max_tokens": 6}), n=3, logprobs=1)
    alone = [choice.logprobs for choice in told.choices]
    assert all(
        len(each.tokens) == 6 or choice.finish_reason == "stop"
        for each, choice in zip(alone, told.choices, strict=True)
    )
    assert len({tuple(each.tokens) for each in alone}) > 1


def test_what_follows_a_stop_string_is_not_told(client, demo, scripted):
    tokens = demo.encode("one two STOP three")
    script = scripted(tokens)
    add = script.add

    def add_told(*given, **how):
        request = add(*given, **how)
        request.logprobs = [TokenLogprobs(-0.5)] * len(tokens)
        return request

    script.add = add_told
    told = client.completions.create(model="demo", prompt="a", temperature=0, max_tokens=50, stop="STOP", logprobs=0)
    found = told.choices[0].logprobs
    assert len(found.tokens) == told.usage.completion_tokens < len(tokens)
    assert "".join(found.tokens).startswith("one two ") and "three" not in "".join(found.tokens)


@pytest.fixture(scope="module")
def chat(folder):  # noqa: F811
    import openai

    served = eet_lab.serve(eet_lab.load(folder, device="cpu"), served_model_name="chat").wait_until_up(60)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client.chat.completions
    served.stop()


def test_a_chat_has_an_object_for_each_token(chat):
    how = dict(model="chat", messages=HELLO, max_tokens=8, temperature=0)
    told = chat.create(**how, logprobs=True, top_logprobs=2)
    content = told.choices[0].logprobs.content
    assert len(content) == told.usage.completion_tokens
    for each in content:
        assert bytes(each.bytes).decode() == each.token and each.logprob < 0
        assert each.top_logprobs[0].token == each.token and len(each.top_logprobs) == 2
        assert each.top_logprobs[0].logprob == each.logprob > each.top_logprobs[1].logprob
    chunks = chat.create(**how, logprobs=True, top_logprobs=2, stream=True)
    streamed = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert streamed == content
    plain = chat.create(**how, logprobs=True).choices[0].logprobs.content
    assert [each.top_logprobs for each in plain] == [[]] * len(content)
    assert chat.create(**how, logprobs=False).choices[0].logprobs is None


def test_half_a_character_is_shown_as_its_bytes(demo):
    text = "a 😀é b"
    tokens = demo.encode(text)
    scored = Scores(demo.bytes_of).add(tokens, [TokenLogprobs(-1e9, ((tokens[0], -1.0),))] * len(tokens))
    assert b"".join(each.raw for each in scored).decode() == text
    found = of_completion(scored)
    assert any(token.startswith("bytes:\\x") for token in found["tokens"]) and min(found["token_logprobs"]) == -9999
    assert found["text_offset"][-1] == len(text) - 2 and found["text_offset"] == sorted(found["text_offset"])
    assert bytes(byte for each in of_chat(scored)["content"] for byte in each["bytes"]).decode() == text
