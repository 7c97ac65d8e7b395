"""The official client against a real server: texts, streams, seeds and stops."""

from __future__ import annotations

import time
from types import SimpleNamespace

import httpx
import openai
import pytest

import eet_lab
from eet_lab.serving.errors import ApiError
from eet_lab.serving.truncation import last_of, most_of

from .conftest import PAGED, PROMPT, Raw, numbers


@pytest.fixture(scope="module")
def greedy(demo):
    """What the model says after a prompt, in process."""
    return lambda prompt, n: eet_lab.generate(demo, [prompt], max_new_tokens=n).texts[0]


def test_a_text_is_what_generate_says(client, demo, greedy):
    told = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
    [choice] = told.choices
    assert choice.text == greedy(PROMPT, 24)
    assert choice.finish_reason == "stop" and told.object == "text_completion" and told.model == "demo"
    assert told.usage.prompt_tokens == len(demo.encode(PROMPT)) == 5
    assert told.usage.total_tokens == 5 + told.usage.completion_tokens


def test_max_tokens_ends_a_text(client, demo, greedy):
    told = client.completions.create(model="demo", prompt=demo.encode("The"), max_tokens=5, temperature=0)
    assert told.choices[0].text == greedy("The", 5)
    assert told.choices[0].finish_reason == "length" and told.usage.completion_tokens == 5
    short = client.completions.create(model="demo", prompt="The", temperature=0, extra_body={"ignore_eos": True})
    assert short.usage.completion_tokens == 16, "as in OpenAI's"


def test_the_last_tokens_of_a_long_prompt_are_read_where_a_client_asks_for_it(client, demo):
    """As in vLLM: so many of each prompt, or all that there is room for beside the new tokens."""
    ids = (demo.encode(PROMPT) * 300)[:1400]
    for most, kept, n in ((7, 7, 4), (-1, 1020, 4), (1020, 1020, 4), (-1, 1023, 1)):
        how = dict(model="demo", max_tokens=n, temperature=0)
        told = client.completions.create(prompt=[ids, [5]], extra_body={"truncate_prompt_tokens": most}, **how)
        assert told.usage.prompt_tokens == kept + 1
        expected = client.completions.create(prompt=ids[-kept:], **how)
        assert told.choices[0].text == expected.choices[0].text and expected.usage.prompt_tokens == kept
    with pytest.raises(openai.BadRequestError, match="1,400 tokens"):
        client.completions.create(prompt=ids, model="demo")


def test_what_marks_the_beginning_of_words_stays_where_they_are_cut():
    card = SimpleNamespace(tokenizer=SimpleNamespace(marks=[1, 2]))  # one at each end
    front = SimpleNamespace(card=card, name="it")
    assert last_of(front, "words", [1, 5, 6, 7, 2], 4) == [1, 6, 7, 2]
    assert last_of(front, [1, 5, 6, 7, 2], [1, 5, 6, 7, 2], 3) == [6, 7, 2], "a list is what it is"
    assert last_of(front, "words", [1, 5, 2], 1) == [1] and last_of(front, "words", [1, 5, 2], 3) == [1, 5, 2]
    assert most_of(front, 3, 9, [[4], "words"], "prompt") == 3 and most_of(front, 2, 9, [[4]], "prompt") == 2
    with pytest.raises(ApiError, match="is 2, but it reads 3 to 9 tokens of a prompt, of which 2 mark"):
        most_of(front, 2, 9, [[4], "words"], "prompt")


def test_prompts_of_a_list_draw_on_their_own_unless_a_seed_is_given(client):
    how = dict(model="demo", prompt=[PROMPT] * 4, max_tokens=16, temperature=1.5)
    assert len({choice.text for choice in client.completions.create(**how, n=2).choices}) == 8
    assert len({choice.text for choice in client.completions.create(**how, seed=3).choices}) == 1


def test_a_stream_is_the_same_text_in_pieces(client, greedy):
    how = dict(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
    chunks = list(client.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert "".join(chunk.choices[0].text for chunk in pieces) == greedy(PROMPT, 24)
    assert [chunk.choices[0].finish_reason for chunk in pieces if chunk.choices[0].finish_reason] == ["stop"]
    assert last.choices == [] and all(chunk.usage is None for chunk in pieces)
    assert last.usage == client.completions.create(**how).usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_in_done(served):
    body = {"prompt": "The", "max_tokens": 2, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
        assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    assert '"usage"' not in "".join(lines), "nobody asked for it"


def test_several_prompts_are_choices_in_their_order(client, greedy):
    told = client.completions.create(model="demo", prompt=[PROMPT, "The", "If"], max_tokens=6, temperature=0)
    assert [choice.text for choice in told.choices] == [greedy(prompt, 6) for prompt in (PROMPT, "The", "If")]
    assert [choice.index for choice in told.choices] == [0, 1, 2]


def test_a_seed_repeats_its_draws_and_n_are_rows_of_a_batch(client, demo):
    how = dict(model="demo", prompt=PROMPT, max_tokens=8, temperature=1.0, seed=7, n=3)
    told = client.completions.create(**how)
    texts = [choice.text for choice in told.choices]
    assert texts == [choice.text for choice in client.completions.create(**how).choices]
    batch = eet_lab.generate(demo, [PROMPT] * 3, max_new_tokens=8, temperature=1.0, seed=7)
    assert texts == list(batch.texts) and len(set(texts)) > 1
    streamed = [""] * 3
    for chunk in client.completions.create(**how, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    others = client.completions.create(**(how | {"seed": 8}))
    assert [choice.text for choice in others.choices] != texts


def test_without_a_seed_choices_and_calls_differ(client):
    how = dict(model="demo", prompt=PROMPT, max_tokens=16, temperature=1.5, n=2)
    texts = [choice.text for _ in range(2) for choice in client.completions.create(**how).choices]
    assert len({*texts}) == 4


def test_requests_choose_tokens_in_their_own_ways(client, demo, slowed):
    stream = client.completions.create(model="demo", prompt="The", max_tokens=100, temperature=0, stream=True)
    next(iter(stream))
    drawn = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, temperature=1.0, seed=3, top_p=0.9)
    alone = eet_lab.generate(demo, [PROMPT], max_new_tokens=8, temperature=1.0, seed=3, top_p=0.9)
    assert drawn.choices[0].text == alone.texts[0]
    stream.close()


def test_a_stop_string_across_tokens_is_held_back(client, demo, scripted):
    text = "one two STOP three"
    tokens = demo.encode(text)
    assert not any(demo.decode([token]).strip() == "STOP" for token in tokens), "it must span tokens"
    script = scripted(tokens)
    how = dict(model="demo", prompt="a", max_tokens=50, temperature=0, stop=["STOP", "never"])
    told = client.completions.create(**how)
    assert (told.choices[0].text, told.choices[0].finish_reason) == ("one two ", "stop")
    assert told.usage.completion_tokens < len(tokens), "what follows is not counted"
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**how, stream=True)]
    assert "".join(pieces) == "one two " and not any("S" in piece for piece in pieces)
    assert all(request.finish_reason in ("cancelled", "length") for request in script.requests)
    told = client.completions.create(**(how | {"stop": "three more"}))
    assert told.choices[0].text == text, "what was only the beginning of a stop is shown in the end"


def test_half_a_character_is_not_streamed(client, demo, scripted):
    text = "a 😀 é b"
    scripted(demo.encode(text))
    assert any("\ufffd" in demo.decode([token]) for token in demo.encode(text))
    chunks = client.completions.create(model="demo", prompt="a", max_tokens=50, temperature=0, stream=True)
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)


def test_an_id_comes_back(client, served):
    told = client.completions.with_raw_response.create(
        model="demo", prompt="a", max_tokens=1, temperature=0, extra_headers={"x-request-id": "mine-1"}
    )
    assert told.headers["x-request-id"] == "mine-1" and told.parse().id == "cmpl-mine-1"
    ugly = httpx.get(f"{served.url}/health", headers={"x-request-id": "a b"})
    assert ugly.headers["x-request-id"] != "a b"


def test_an_upgrade_that_is_not_taken_leaves_the_body_a_body(served):
    """Java's client offers HTTP/2 with each first request, and what it posts is still HTTP/1.1."""
    raw = Raw(served.url)
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    raw.post("/v1/completions", {"prompt": "The", "max_tokens": 1}, f"content-type: application/json\r\n{offer}")
    assert raw.until(b'"total_tokens"').startswith(b"HTTP/1.1 200 ")
    raw.send(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    assert b" 200 " in raw.until(b'"demo"}')
    raw.close()


def test_models_and_health(client, served):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")
    assert httpx.get(f"{served.url}/health").json()["status"] == "ok"


@pytest.mark.parametrize(("prompt", "n", "sequences"), [(PROMPT, 1, 1), ([PROMPT, PROMPT], 3, 6)])
def test_metrics_have_vllms_names(client, served, prompt, n, sequences):
    """A prompt of a list, and each of its `n`, is a request of vLLM's engine, and all of its metrics count those."""
    before = numbers(served)
    client.completions.create(model="demo", prompt=prompt, n=n, max_tokens=4, temperature=0)
    time.sleep(0.05)
    after = numbers(served)
    label = '{model_name="demo"}'
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown[f"vllm:prompt_tokens_total{label}"] == 5 * sequences
    assert grown[f"vllm:generation_tokens_total{label}"] == 4 * sequences
    assert grown['vllm:request_success_total{finished_reason="length",model_name="demo"}'] == sequences
    assert grown[f"vllm:inter_token_latency_seconds_count{label}"] == 3 * sequences
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
    ):
        assert grown[f"vllm:{name}_count{label}"] == sequences, name
    assert grown[f"vllm:request_prompt_tokens_sum{label}"] == 5 * sequences
    assert grown[f"vllm:request_generation_tokens_sum{label}"] == 4 * sequences
    assert after[f"vllm:num_requests_running{label}"] == 0 and after[f"vllm:kv_cache_usage_perc{label}"] == 0


def test_a_prompt_that_comes_again_is_found_in_the_prefix_cache(demo):
    served = eet_lab.serve(demo, f"{PAGED},prefix_caching").wait_until_up(60)
    try:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
            prompt = [*range(40, 75)]
            told = [client.completions.create(model="demo", prompt=prompt, max_tokens=5, temperature=0) for _ in "ab"]
        assert told[0].choices[0].text == told[1].choices[0].text
        found = numbers(served)
        assert found['vllm:prefix_cache_queries_total{model_name="demo"}'] == 70
        assert found['vllm:prefix_cache_hits_total{model_name="demo"}'] == 32
    finally:
        served.stop()
