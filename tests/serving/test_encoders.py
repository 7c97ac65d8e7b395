"""Embeddings and classes over HTTP, as `encode` and `classify` have them."""

from __future__ import annotations

import base64
import json
import re
import time
from concurrent.futures import Future as Waited
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from encoders import CONFIGS, Late, V, passes_that_are_late, theirs

import eet_lab
from eet_lab.encoding import as_texts
from eet_lab.engine.tasks import CLASSES, CLS, MEAN
from eet_lab.errors import PromptError, SetupError
from eet_lab.models import load
from eet_lab.parts.passes import Batching, Text
from eet_lab.scheduling.policies import NaivePadding
from eet_lab.scheduling.policy import BasePolicy, Plan
from eet_lab.serving.options import Options
from eet_lab.serving.reader import Reader, Reading
from eet_lab.serving.service import Service
from eet_lab.technique import Recipe

from .conftest import Raw, eventually, numbers

PLAIN = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11"]
LABELS = CONFIGS["bert-classes"][1]["id2label"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join([*PLAIN, *(f"w{number}" for number in range(V - len(PLAIN)))]) + "\n")
    return load(theirs("bert-classes"), device="cpu", tokenizer=transformers.BertTokenizerFast(str(path)))


@pytest.fixture(scope="module")
def served(bert):
    served = eet_lab.serve(bert, served_model_name="bert", max_queued_requests=3).wait_until_up(60)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def post(served):
    head = {"content-type": "application/json"}
    return lambda path, body: httpx.post(f"{served.url}{path}", content=json.dumps(body), headers=head)


@pytest.fixture
def reader(served):
    return served._server.service.reader


def test_vectors_are_those_of_encode(client, bert):
    expected = eet_lab.encode(bert, TEXTS).vectors
    for encoding in ("float", "base64"):
        told = client.embeddings.create(model="bert", input=TEXTS, encoding_format=encoding)
        for each, vector in zip(told.data, expected, strict=True):
            raw = each.embedding
            got = np.frombuffer(base64.b64decode(raw), "<f4") if isinstance(raw, str) else np.array(raw, np.float32)
            torch.testing.assert_close(torch.tensor(got), vector)
        assert told.usage.prompt_tokens == told.usage.total_tokens == 3 + 1 + 7 + 2 * 3
    [one] = client.embeddings.create(model="bert", input=TEXTS[0]).data  # base64, which the client reads by itself
    torch.testing.assert_close(torch.tensor(one.embedding), expected[0])
    ids = [bert.encode(text) for text in TEXTS]
    [_, second, _] = client.embeddings.create(model="bert", input=ids).data
    torch.testing.assert_close(torch.tensor(second.embedding), expected[1])


@pytest.mark.parametrize(("most", "tokens"), [(-1, 40), (40, 40), (5, 5)])
def test_texts_are_cut_where_a_client_asks_for_it(client, bert, most, tokens):
    """To so many tokens, special ones among them; the last one stays, as with `truncate=True`."""
    how = dict(model="bert", extra_body={"truncate_prompt_tokens": most})
    told = client.embeddings.create(input=["w1 " * 50, "w2"], **how)
    assert told.usage.prompt_tokens == tokens + 3
    expected = eet_lab.encode(bert, ["w1 " * (tokens - 2), "w2"]).vectors
    torch.testing.assert_close(torch.tensor([each.embedding for each in told.data]), expected)
    one = client.embeddings.create(input=[5, 6], model="bert", extra_body={"truncate_prompt_tokens": 1})
    assert one.usage.total_tokens == 1


def test_token_ids_of_a_pair_are_cut_at_their_end(client, bert):
    """Where the first text ends cannot be seen in ids. As texts, pairs are refused, as in vLLM."""
    ids, _ = bert.tokenizer.read("w1 w2 w3 w4 w5", "w6 w7 w8")
    told = client.embeddings.create(input=[ids], model="bert", extra_body={"truncate_prompt_tokens": 9})
    expected = eet_lab.encode(bert, [[*ids[:8], ids[-1]]]).vectors
    torch.testing.assert_close(torch.tensor([told.data[0].embedding]), expected)


def test_classes_are_those_of_classify(post, bert):
    told, expected = post("/v1/classify", {"model": "bert", "input": TEXTS}).json(), eet_lab.classify(bert, TEXTS)
    assert [each["label"] for each in told["data"]] == list(expected.labels)
    assert [each["probs"] for each in told["data"]] == [pytest.approx(row) for row in expected.scores.tolist()]
    assert told["data"][0]["num_classes"] == len(LABELS) and told["object"] == "list"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": []}, "input", r"\[\]"),
        ({"input": 5}, "input", "5"),
        ({"input": [["w1 w2", "w3"]]}, "input", "it must be a text, a list of token ids"),
        ({"input": [1, 2, V]}, "input", f"token {V}"),
        ({"input": "w1 " * 50}, "input", "reads at most 40.*truncate_prompt_tokens=-1"),
        ({"input": "w1", "truncate_prompt_tokens": 41}, "truncate_prompt_tokens", "41.*3 to 40 tokens.*-1"),
        ({"input": ["w1 w2"], "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "is 2,.*3 to 40.* 2 mark"),
        ({"input": [[5, 6]], "truncate_prompt_tokens": 41}, "truncate_prompt_tokens", "41.*1 to 40 tokens.*-1"),
        ({"input": "w1", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2"),
        ({"input": ["a"] * 3000}, "input", "3,000 texts"),
        ({"input": "\ud800"}, "input", "surrogate"),
        ({}, "input", "missing"),
        ({"input": "w1", "encoding_format": "base65"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "w1", "dimensions": 8}, "dimensions", "have 32, and are not cut. Leave"),
        ({"input": "w1", "model": "other"}, "model", "no model"),
    ],
)
def test_what_cannot_be_read_is_told(post, fields, param, said):
    answer = post("/v1/embeddings", fields)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param
    assert re.search(said, error["message"]), error


def test_a_server_warms_up_what_it_answers_with(bert, served, reader):
    """Its own pooling, and its classes; and texts as they come: without types, where they have but one."""
    assert reader._tasks == (MEAN, CLASSES)
    assert Service(bert, options=Options(pool="cls")).reader._tasks == (CLS, CLASSES)
    alone, pair = as_texts(bert, ["w1 w2", ("w1", "w2")])
    assert alone.types is None and pair.types == [0, 0, 0, 1, 1]


def test_an_encoder_generates_nothing(post):
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = post(path, {"prompt": "a"})
        assert answer.status_code == 400
        assert re.search("an encoder.*Use /v1/embeddings or /v1/classify", answer.json()["error"]["message"])


def noted(engine, monkeypatch, note):
    """`note` is told of the texts that are read together, before they are."""
    read_each = engine.read_each

    def reading(reads, *rest):
        read_each(((read and note(read[0]), read)[-1] for read in reads), *rest)

    monkeypatch.setattr(engine, "read_each", reading)


def test_what_waits_together_is_read_together(post, client, reader, bert, monkeypatch):
    may, sizes = Event(), []
    noted(reader.engine, monkeypatch, lambda texts: sizes.append(len(texts)) or may.wait(10))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(client.embeddings.create, model="bert", input="w1")
        eventually(lambda: sizes)
        others = [pool.submit(client.embeddings.create, model="bert", input=[text, text]) for text in TEXTS[:2]]
        eventually(lambda: reader._commands.qsize() == 2)
        full = post("/v1/embeddings", {"input": "w1"})
        assert full.status_code == 429 and full.headers["retry-after"]
        may.set()
        first.result()
        vectors = eet_lab.encode(bert, TEXTS[:2]).vectors
        for told, vector in zip(others, vectors, strict=True):
            for each in told.result().data:
                torch.testing.assert_close(torch.tensor(each.embedding), vector)
    assert sizes == [1, 4]


POLICIES = {
    "naive_padding:max_rows=3": lambda lengths: len(lengths) <= 3,
    "token_budget:budget=12": lambda lengths: sum(lengths) <= 12 or len(lengths) == 1,
    "dynamic_program:trigger=lazy:wait_ms=30": lambda lengths: True,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_says_who_is_read_together(bert, policy, monkeypatch):
    """Vectors are the same; a request whose texts are read in several passes gets them all, in its order."""
    served = eet_lab.serve(bert, served_model_name="bert", policy=policy).wait_until_up(60)
    try:
        groups = []
        noted(served._server.service.reader.engine, monkeypatch, groups.append)
        many = [text for _ in range(3) for text in TEXTS]
        with ThreadPoolExecutor() as pool, openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            asked = [many, TEXTS[:1], many[1:], TEXTS[2:]]
            told = [pool.submit(client.embeddings.create, model="bert", input=each) for each in asked]
            classes = pool.submit(httpx.post, f"{served.url}/v1/classify", json={"input": TEXTS[:2]})
            for texts, each in zip(asked, told, strict=True):
                vectors = eet_lab.encode(bert, texts).vectors
                got = torch.tensor([row.embedding for row in each.result().data])
                torch.testing.assert_close(got, vectors, atol=1e-5, rtol=1e-4)
            assert classes.result().status_code == 200
        lengths = [[len(text.ids) for text in group] for group in groups]
        assert sum(map(len, lengths)) == 21 and all(map(POLICIES[policy], lengths)) and max(map(len, lengths)) > 1
    finally:
        served.stop()


def test_policies_that_cannot_be(bert, demo):
    for words, told in (
        ("dynamic_progam", "dynamic_program"),
        ("continuous_batching", "rows=16"),
        (3, "must be words"),
        ("dynamic_program:max_rows=100000", "max_rows"),
    ):
        with pytest.raises(SetupError, match=told):
            eet_lab.serve(bert, policy=words).wait_until_up(60)
    with pytest.raises(SetupError, match="Leave policy out"):
        eet_lab.serve(demo, policy="naive_padding")


def test_a_reader_that_fails(post, served, reader, monkeypatch):
    def fail(*args):
        raise RuntimeError("no device")

    engine = reader.engine
    monkeypatch.setattr(engine, "read_each", fail)
    answer = post("/v1/embeddings", {"input": "w1"})
    assert answer.status_code == 500 and answer.json()["error"]["code"].startswith("error-")
    assert post("/v1/embeddings", {"input": "w1"}).status_code == 200 and reader.engine is not engine


class InGroups(BasePolicy):
    """Two by two, all that wait."""

    def next(self, waiting, now_ms, costs):
        taken = [*waiting]
        return Plan([taken[at : at + 2] for at in range(0, len(taken), 2)])


@pytest.fixture
def planned(bert):
    """A reader that is not started, of a policy that makes several groups of a plan; it tells at once."""
    reader = Reader(bert, Recipe.parse("pre_padding"))
    reader._build()
    reader._policy = InGroups()
    return reader


def asked(reader, *lengths):
    """Requests that come now, each of so many texts."""
    texts = [[Text([5 + at] * (2 + at)) for at in range(length)] for length in lengths]
    readings = [Reading(each, MEAN, Waited()) for each in texts]
    for each in readings:
        reader.join(each)
    reader._do_commands()
    return [each.result for each in readings]


def test_groups_of_a_plan_are_one_read(planned, monkeypatch):
    """The second is launched before the first one's vectors are there; who comes meanwhile is in the next plan."""
    seen = passes_that_are_late(monkeypatch)
    [first, second] = asked(planned, 3, 2)
    noted(planned.engine, monkeypatch, lambda texts: len(seen) == 2 and planned.join(Reading(texts, MEAN, Waited())))
    planned._turn()
    assert seen[:2] == [("launched", 0), ("launched", 1)] and len(seen) == 6
    assert first.result().shape == (3, 32) and second.result().shape == (2, 32)
    torch.testing.assert_close(first.result()[:2], second.result())
    assert planned._do_commands() and len(planned._waiting) == 1 and not planned._rows


@pytest.mark.parametrize("policy", [NaivePadding(max_rows=2), None])
def test_a_full_group_is_launched_while_those_before_it_are_computed(planned, monkeypatch, policy):
    """So are those who come meanwhile; a group that others may still join waits until all are there."""
    planned._policy = policy
    monkeypatch.setattr("eet_lab.serving.reader.BATCHING", Batching(6))  # without a policy two texts are full
    seen = passes_that_are_late(monkeypatch)
    early = asked(planned, 2, 2)
    late = Reading([Text([5, 6]), Text([5, 6, 7])], MEAN, Waited()), Reading([Text([5, 6])], MEAN, Waited())
    noted(planned.engine, monkeypatch, lambda texts: not seen and [*map(planned.join, late)])
    planned._turn()
    launched = [at for at, (what, _) in enumerate(seen) if what == "launched"]
    assert launched == [0, 1, 2] and len(seen) == 6 and not planned._in_flight
    assert all(each.done() for each in early) and late[0].result.done() and not late[1].result.done()
    planned._turn()
    assert late[1].result.result().shape == (1, 32)
    other = Reading([Text([5])], CLS, Waited())
    planned.join(other)
    assert asked(planned, 2)[0] and planned._turn() is None and other.result.done(), "another task, another read"


def test_a_read_does_not_wait_for_who_has_not_come(planned, monkeypatch):
    """Where a full group is there, and nobody else, the engine is free until somebody comes."""
    planned._policy, [two], asked_with_work = NaivePadding(max_rows=2), asked(planned, 2), []
    monkeypatch.setattr(planned, "_do_commands", lambda: asked_with_work.append(planned._has_work) or True)
    planned._turn()
    assert two.result().shape == (2, 32) and all(asked_with_work)


def test_who_leaves_while_a_plan_is_read_takes_nobody_along(planned, monkeypatch):
    seen = passes_that_are_late(monkeypatch)
    [left, stays] = asked(planned, 3, 2)
    noted(planned.engine, monkeypatch, lambda texts: left.cancel())
    planned._turn()
    assert len(stays.result()) == 2 and left.cancelled() and not planned._rows
    assert seen.count(("launched", 1)) == 1, "the second group has one who stays"


def test_an_error_ends_the_groups_that_do_not_come(planned, monkeypatch):
    """One of texts those of its group, one of the engine those in flight; the rest of the plan is read."""
    [whole, wrong, last] = asked(planned, 2, 2, 2)
    check = planned.engine._checked

    def checked(texts, *rest):
        if planned._in_flight[-1][0].reading.result is wrong:
            raise PromptError("text 1 is wrong")
        return check(texts, *rest)

    passes_that_are_late(monkeypatch)
    monkeypatch.setattr(planned.engine, "_checked", checked)
    planned._turn()
    assert len(whole.result()) == 2 and wrong.exception().status == 400 and not last.done()
    planned._turn()
    assert len(last.result()) == 2
    [first, second] = asked(planned, 2, 2)
    monkeypatch.setattr(Late, "synchronize", Event.wait)  # which fails, as a device that is lost
    with pytest.raises(AttributeError) as failed:
        planned._turn()
    planned._fail(failed.value)
    assert first.exception().status == second.exception().status == 500 and not planned._has_work


def test_a_server_that_ends_launches_no_more_of_a_plan(planned, monkeypatch):
    [first, second] = asked(planned, 2, 2)
    noted(planned.engine, monkeypatch, lambda texts: planned.is_closing.set())
    planned._turn()
    assert first.done() and not second.done()


def test_a_request_has_waited_since_it_came(planned):
    """Not since the thread had time for it, which a policy's clock would tell."""
    planned.join(Reading([Text([5])], MEAN, Waited()))
    time.sleep(0.02)
    planned._do_commands()
    assert time.perf_counter() * 1e3 - planned._waiting[0].arrival_ms >= 20


def test_each_text_counts_as_one_of_vllms_requests(client, served):
    before, admission = numbers(served), served._server.service.admission
    admission._mean_wait_s = 0.0
    client.embeddings.create(model="bert", input=TEXTS)
    assert admission._mean_wait_s > 0, "after which who finds the queue full may come again"
    grown = {name: number - before.get(name, 0) for name, number in numbers(served).items()}
    label = '{model_name="bert"}'
    assert grown['vllm:request_success_total{finished_reason="stop",model_name="bert"}'] == 3
    assert grown[f"vllm:prompt_tokens_total{label}"] == grown[f"vllm:request_prompt_tokens_sum{label}"] == 17
    assert grown[f"vllm:e2e_request_latency_seconds_count{label}"] == 3
    assert grown[f"vllm:time_to_first_token_seconds_count{label}"] == 0, "it has no tokens to come first"


@pytest.mark.parametrize("cache", [0, 1])
def test_who_still_waits_at_the_end_of_the_drain_is_told(bert, monkeypatch, cache):
    """Also who waits for an answer that is being made for another one."""
    served = eet_lab.serve(bert, drain_s=0.3, response_cache_mib=cache).wait_until_up(60)
    service = served._server.service
    monkeypatch.setattr(service.reader, "join", lambda reading: None)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(httpx.post, f"{served.url}/v1/embeddings", json={"input": "w1"}) for _ in range(2)]
        eventually(lambda: service.admission.num_inside == 2)
        served.stop()
        for each in asked:
            assert each.result().status_code == 503 and each.result().json()["error"]["code"] == "shutting_down"


def test_the_longest_text_is_what_the_server_says(bert):
    with eet_lab.serve(bert, max_model_len=8) as served:
        served.wait_until_up(60)
        assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["max_model_len"] == 8
        body = {"input": "w1 " * 30}
        answer = httpx.post(f"{served.url}/v1/embeddings", json=body)
        assert answer.status_code == 400 and "at most 8" in answer.json()["error"]["message"]
        answer = httpx.post(f"{served.url}/v1/embeddings", json=body | {"truncate_prompt_tokens": -1})
        assert answer.json()["usage"]["total_tokens"] == 8
    assert (Options().columns(8192, is_encoder=True), Options().columns(8192, is_encoder=False)) == (8192, 4096)


def test_a_client_that_leaves_is_not_read(served, reader, monkeypatch):
    monkeypatch.setattr(reader, "join", lambda reading: None)
    raw = Raw(served.url).post("/v1/embeddings", {"input": "w1"})
    eventually(lambda: served._server.service.admission.num_inside == 1)
    raw.close()
    eventually(lambda: served._server.service.admission.num_inside == 0)
    assert numbers(served)['vllm:request_success_total{finished_reason="abort",model_name="bert"}'] == 1
