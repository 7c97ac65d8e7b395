"""Conversations, by the checkpoint's own template."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import transformers

import eet_lab
from eet_lab.models.loading import DEMO
from eet_lab.serving import front

from .conftest import Script, eventually

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Return a list of"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo model with a template, and with a token that ends a turn."""
    folder = tmp_path_factory.mktemp("chat") / "demo"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    return folder


@pytest.fixture(scope="module")
def served(folder):
    served = eet_lab.serve(eet_lab.load(folder, device="cpu"), served_model_name="chat").wait_until_up(60)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder):
    """What the model says after the prompt that transformers makes of the conversation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    model = eet_lab.load(folder, device="cpu")
    out = eet_lab.generate(model, [ids], max_new_tokens=12, stop=(7,))
    return len(ids), out.texts[0]


def test_the_templates_prompt_is_continued(client, expected):
    told = client.chat.completions.create(model="chat", messages=HELLO, max_tokens=12, temperature=0)
    assert (told.usage.prompt_tokens, told.choices[0].message.content) == expected
    assert told.object == "chat.completion" and told.choices[0].message.role == "assistant"
    parts = [
        HELLO[0],
        {"role": "user", "content": [{"type": "text", "text": "Return "}, {"type": "text", "text": "a list of"}]},
    ]
    again = client.chat.completions.create(model="chat", messages=parts, max_completion_tokens=12, temperature=0)
    assert again.choices == told.choices


def test_a_stream_of_a_chat(client, expected):
    how = dict(model="chat", messages=HELLO, max_tokens=12, temperature=0, n=2)
    chunks = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    texts, *rest = ["", ""], chunks[-1].usage
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == [expected[1]] * 2 and rest[0].prompt_tokens == expected[0]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    assert sum(chunk.choices[0].finish_reason is not None for chunk in chunks[:-1]) == 2
    assert chunks[0].object == "chat.completion.chunk" and chunks[0].id.startswith("chatcmpl-")


def test_an_answer_may_be_as_long_as_there_is_room(client, served, expected, monkeypatch):
    service = served._server.service
    script = Script(service.model.encode("It is.\nNo more"))
    monkeypatch.setattr(service.generator, "engine", script)
    told = client.chat.completions.create(model="chat", messages=HELLO, temperature=0, stop="\n")
    assert (told.choices[0].message.content, told.choices[0].finish_reason) == ("It is.", "stop")
    [settings] = script.settings
    assert settings.max_new_tokens == 1024 - expected[0]
    assert settings.stop == (0, 7), "the config's end, and that of a turn"


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        ([], "messages", "at least one entry"),
        ("hello", "messages", "'hello'"),
        (["hello"], "messages.0", "'hello'"),
        ([{"content": "a"}], "messages.0.role", "must be a text"),
        ([{"role": "user"}], "messages.0.content", "None"),
        ([{"role": "user", "content": 5}], "messages.0.content", "5"),
        ([*HELLO, {"role": "user", "content": [{"type": "image_url"}]}], "messages.2.content", "parts of text"),
        ([{"role": "user", "content": "\ud800"}], "messages.0.content", "surrogate"),
        ([{"role": "tool", "content": "a"}], "messages", "template refuses these messages: no tools here"),
        ([{"role": "user", "content": "word " * 1500}], "messages", "Shorten"),
    ],
)
def test_conversations_that_cannot_be_continued(served, messages, param, said):
    head = {"content-type": "application/json"}
    body = json.dumps({"model": "chat", "messages": messages})
    answer = httpx.post(f"{served.url}/v1/chat/completions", content=body, headers=head)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and said in error["message"], error


def test_the_template_is_read_while_the_server_starts_and_once(folder, monkeypatch):
    """transformers takes seconds to import, for which the first conversation would wait."""
    read, asked = front.template_of, []

    def slowly(folder):
        asked.append(folder)
        time.sleep(0.2)
        return read(folder)

    monkeypatch.setattr(front, "template_of", slowly)
    served = eet_lab.serve(eet_lab.load(folder, device="cpu"), front="thread", served_model_name="chat")
    try:
        served.wait_until_up(60)
        assert eventually(lambda: asked) == [folder]
        body = {"model": "chat", "messages": HELLO, "max_tokens": 1}
        with ThreadPoolExecutor(3) as pool:
            sent = [pool.submit(httpx.post, f"{served.url}/v1/chat/completions", json=body) for _ in range(3)]
            assert [each.result().status_code for each in sent] == [200] * 3 and asked == [folder]
    finally:
        served.stop()
