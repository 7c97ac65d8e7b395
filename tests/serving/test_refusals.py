"""Bad requests: the status, the reason and the field, in OpenAI's shape; and none of them reaches the engine."""

from __future__ import annotations

import json
import re
import time
from http import HTTPStatus

import httpx
import pytest

import eet_lab
from eet_lab.errors import ModelError, RecipeError, SetupError
from eet_lab.serving.bodies import MOST_STOPS, ChatBody, parsed
from eet_lab.serving.errors import ApiError
from eet_lab.serving.options import Options

from .conftest import PAGED, Raw, eventually, numbers

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


@pytest.fixture
def post(served, generator, monkeypatch):
    """`post(path, body)` is the answer to a request that must not come to the engine."""
    monkeypatch.setattr(generator, "join", lambda job: pytest.fail("the engine was asked"))

    def post(path, body, **how):
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(f"{served.url}{path}", content=sent, headers={"content-type": "application/json", **how})

    return post


def checked(answer: httpx.Response, status: int, param: str | None) -> str:
    """The message of an error in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param and error["message"]
    assert answer.headers["x-request-id"]
    return error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": -0.5}, "temperature", "-0.5"),
        ({"temperature": 1e-9}, "temperature", "1e-09.*from 0.0001 to"),
        ({"temperature": 1e300}, "temperature", r"1e\+300.*0\.0001 to 10,000"),
        ({"temperature": "1"}, "temperature", "'1'"),
        ({"top_p": 0}, "top_p", "0"),
        ({"top_p": 1.5}, "top_p", "1.5"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_tokens": 10**9}, "max_tokens", "1,000,000,000.*a prompt of 1 token there is room for 1,023"),
        ({"prompt": [5] * 1014}, "max_tokens", "16 where a request gives none.* Give max_tokens=10 or less"),
        ({"max_tokens": 10**4000}, "max_tokens", r"^max_tokens is 1.{,60}, but .{,120}room for 1,023.{,80}$"),
        ({"top_k": 10**4000}, "top_k", r"^.{,200}$"),
        ({"min_tokens": 10**4000}, "min_tokens", r"^.{,200}$"),
        ({"n": 10**4000}, "n", r"^.{,200}$"),
        ({"seed": 10**4000}, "seed", r"^.{,200}$"),
        ({"temperature": 10**4000}, "temperature", r"^.{,200}$"),
        ({"prompt": [10**4000]}, "prompt", r"^.{,200}$"),
        ({"max_tokens": 1.5}, "max_tokens", "1.5"),
        ({"n": 0}, "n", "0"),
        ({"n": 1000}, "n", "1000"),
        ({"n": 100, "prompt": ["a", "b"]}, "n", "200 texts"),
        ({"prompt": "word " * 2000}, "prompt", "2,000 tokens|Shorten"),
        ({"prompt": 5}, "prompt", "5"),
        ({"prompt": []}, "prompt", r"\[\]"),
        ({"prompt": [[]]}, "prompt", "list of token ids"),
        ({"prompt": [1.5]}, "prompt", "1.5"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        ({"prompt": [-1]}, "prompt", "holds the token -1, but the model's vocabulary ends at"),
        ({"prompt": [[1], [2**40]]}, "prompt", f"holds the token {2**40}, but the model's vocabulary ends at"),
        ({"prompt": [2**70]}, "prompt", f"holds the token {2**70}, but the model's vocabulary ends at"),
        ({"stop": ["x"] * 5000}, "stop", f"5,000 texts, but at most {MOST_STOPS}"),
        ({"stop": ["x" * 999]}, "stop", "999 characters"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": 3}, "stop", "3"),
        ({"stop": False}, "stop", "False"),
        ({"stop": ["a", "\ud800"]}, "stop", r"'\\ud800'.*surrogate"),
        ({"seed": "a"}, "seed", "'a'"),
        ({"seed": 2**80}, "seed", f"{2**80}.*less than or equal to {2**63 - 1}"),
        ({"seed": -(2**80)}, "seed", f"{-(2**80)}.*greater than or equal to -{2**63}"),
        ({"prompt": None}, "prompt", "missing"),
        ({"stream": "yes"}, "stream", "'yes'"),
        (
            {"stream_options": {"usage": True}},
            "stream_options.usage",
            r"no field.*usage'\. Did you mean 'include_usage'\?$",
        ),
        ({"temprature": 1}, "temprature", "Did you mean 'temperature'"),
        ({"\ud800": 1}, None, r"field's name.*'\\ud800'.*surrogate"),
        ({"stream_options": {"\ud800": True}}, None, r"field's name.*'\\ud800'.*surrogate"),
        ({"prompt": [[{"\ud800": 1}]]}, None, r"field's name.*'\\ud800'.*surrogate"),
        ({"logprobs": 6}, "logprobs", "6.*less than or equal to 5"),
        ({"logprobs": -1}, "logprobs", "-1"),
        ({"logprobs": True}, "logprobs", "True"),
        ({"best_of": 2}, "best_of", "not supported yet"),
        ({"echo": True}, "echo", "not supported yet"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported yet"),
        ({"min_tokens": 5}, "min_tokens", r"is 5, .*ignore_eos=true.*max_tokens \(16\)"),
        ({"stop_token_ids": [-5]}, "stop_token_ids.0", "-5.*greater than or equal to 0"),
        ({"stop_token_ids": [10**4000]}, "stop_token_ids.0", r"^.{,200}$"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "Add stream=true"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0, but demo reads 1 to 1,008.*16 new ones.*-1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens", "True"),
        ({"truncate_prompt_tokens": 1000, "max_tokens": 25}, "truncate_prompt_tokens", "1,000, but.*1 to 999 .*25 new"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1024}, "max_tokens", "1,024.*room for 1,023"),
        ({"truncate_prompt_tokens": 10**4000}, "truncate_prompt_tokens", r"^.{,200}$"),
        ({"truncate_prompt_tokens": 5, "max_tokens": 10**4000, "prompt": [5] * 1400}, "max_tokens", "room for 1,023"),
    ],
)
def test_a_field_that_is_wrong_is_named(post, fields, param, said):
    message = checked(post(TEXT, {"model": "demo", "prompt": "a", **fields}), 400, param)
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"logprobs": 1}, "logprobs", "boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21.*less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "without logprobs=true"),
    ],
)
def test_log_probabilities_that_a_chat_cannot_have(fields, param, said):
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()
    with pytest.raises(ApiError, match=said) as error:
        parsed(body, ChatBody).num_logprobs()
    assert error.value.param == param


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_temperature_that_is_no_number(post, value):
    answer = post(TEXT, b'{"prompt": "a", "temperature": %s}' % value.encode())
    assert re.search("finite", checked(answer, 400, "temperature"))


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (b'{"prompt": [NaN], "temperature": 1e999}', "prompt", r"^prompt has NaN.*no number of JSON\. Give a finite"),
        (b'{"metadata": {"a": [-Infinity]}}', "metadata", "^metadata has -Infinity"),
        (b'{"%s": NaN}' % (b"\\u00e9" * 999), "\u00e9" * 60, r"^(\\xe9){60} has NaN"),
        (b"[NaN]", None, "no JSON: NaN"),
        (b'{"prompt": NaN, "prompt": "a"}', None, "no JSON: NaN"),
    ],
)
def test_the_field_of_what_json_has_not(post, body, param, said):
    message = checked(post(TEXT, body), 400, param)
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[]", "JSON object"),
        (b'"a"', "JSON object"),
        (b'{"prompt": "\xff"}', "no UTF-8"),
        (b"[" * 60000, "nests too deeply|no JSON"),  # as deep as Python goes
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", r"cannot be read: a number has more than 4,300 digits.*fewer\.$"),
    ],
)
def test_a_body_that_is_none(post, body, said):
    message = checked(post(TEXT, body), 400, None)
    assert re.search(said, message) and "sys." not in message, message


@pytest.mark.parametrize("name", ["gpt-4", "", "\ud800", "demo/../x"])
def test_an_unknown_model(post, name):
    assert checked(post(TEXT, {"model": name, "prompt": "a"}), 404, "model")


def test_a_model_without_a_chat_template(post):
    said = checked(post(CHAT, {"model": "demo", "messages": [{"role": "user", "content": "a"}]}), 400, "messages")
    assert "no chat template" in said and TEXT in said
    assert checked(post(CHAT, {"messages": []}), 400, "messages").endswith("it must have at least one entry.")
    checked(post(CHAT, {}), 400, "messages")


def test_what_a_decoder_does_not_serve(post):
    for path, lacks in (("/v1/embeddings", "makes no vectors"), ("/v1/classify", "tells no classes")):
        assert re.search(f"a decoder, which {lacks}. Use /v1/comp", checked(post(path, {"input": "a"}), 400, "model"))


def test_routes_and_methods_that_do_not_exist(served, post):
    assert re.search("'/v1/images': Not Found.*POST is for .*/v1/classify", checked(post("/v1/images", {}), 404, None))
    wrong = httpx.get(f"{served.url}{TEXT}")
    assert wrong.headers["allow"] == "POST" and "GET for /health" in checked(wrong, 405, None)
    assert len(checked(httpx.get(f"{served.url}/{'x' * 9999}"), 404, None)) < 400


def test_a_body_that_is_too_large(served, post):
    assert "64 KiB" in checked(post(TEXT, {"prompt": "a" * 70_000}), 413, None)
    raw = Raw(served.url)  # one that does not say how long it will be
    raw.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    chunk = b"4000\r\n" + b"a" * 0x4000 + b"\r\n"
    for _ in range(5):
        raw.send(chunk)
    assert b" 413 " in raw.until(b"\r\n")
    raw.close()


def refused_early(raw: Raw, length: int, body: bytes, more: bytes = b"") -> bytes:
    """The head of a refusal that came before the body of so many bytes was complete."""
    raw.send(HEAD.replace(b"json", b"xml") + more + b"content-length: %d\r\n\r\n" % length + body)
    head, _, _ = raw.until(b"}}").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 415 ")
    return head.lower()


HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


def test_a_body_that_is_refused_while_it_comes(served):
    """Its rest is no request, and the next request on the connection is answered."""
    raw = Raw(served.url)
    assert b"connection: close" not in refused_early(raw, 5000, b"a" * 100)
    raw.send(HEALTH)
    raw.send(b"a" * (4900 - len(HEALTH)) + HEALTH[:9])
    raw.send(HEALTH[9:])
    assert raw.until(b'"demo"}').startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" not in refused_early(raw, 10, b"a")
    raw.send(b"a" * 9)
    time.sleep(0.7)  # longer than headers may take: none has begun
    raw.send(HEALTH)
    assert raw.until(b'"demo"}').startswith(b"HTTP/1.1 200 ")
    raw.close()


@pytest.mark.parametrize("more", [b"expect: 100-continue\r\n", b"connection: close\r\n"])
def test_a_body_that_may_come_or_not_ends_the_connection(served, more):
    """A client that was refused before it was told to go on need not send it: what comes then may be a request."""
    raw = Raw(served.url)
    assert b"connection: close" in refused_early(raw, 20, b"", more)
    raw.send(HEALTH)  # would be refused as HTTP, or awaited as a body
    raw.send(HEALTH)  # and this would be reset
    assert raw.until(b"") == b""
    raw.close()


def taken(raw: Raw, data: bytes, most: int, pause: float = 0) -> int:
    """The bytes that a server takes before it ends the connection or reads no more."""
    sent = 0
    try:
        while sent < most:
            sent += raw.socket.send(data)
            time.sleep(pause)
    except OSError:
        pass
    raw.close()
    return sent


def test_the_rest_of_a_refused_body_is_not_waited_for(served):
    raw = Raw(served.url)
    assert b"connection: close" not in refused_early(raw, 5000, b"a")
    start = time.monotonic()
    assert taken(raw, b"a", 100, pause=0.05) < 100
    assert time.monotonic() - start > 0.3


def test_a_body_that_is_much_too_large_is_not_read(served):
    raw = Raw(served.url)
    assert b"connection: close" in refused_early(raw, 10**9, b"a" * 10_000)
    raw.socket.settimeout(0.2)
    assert taken(raw, b"a" * 2**20, 2**28) < 2**25


def test_only_json_is_read(post):
    """A page of another site may send other types to this machine without being asked."""
    checked(post(TEXT, {"prompt": "a"}, **{"content-type": "text/plain"}), 415, None)
    checked(post(TEXT, {"prompt": "a"}, **{"content-encoding": "gzip"}), 415, None)


def ended(raw: Raw, status: int) -> str:
    """The message of an error after which the connection ends, whoever noticed it."""
    head, _, body = raw.until(b"").partition(b"\r\n\r\n")
    assert (
        head.startswith(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode())
        and b"connection: close" in head.lower()
    ), head
    headers = dict(line.lower().split(": ", 1) for line in head.decode().splitlines()[1:])
    return checked(httpx.Response(status, headers=headers, content=body), status, None)


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"\x16\x03\x01\r\n\r\n", 400, "no valid HTTP.*unencrypted"),
        (b"GET / HTTP/1.1\r\nhost\r\n\r\n", 400, "no valid HTTP.*header"),
        (b"POST /v1\r\n\r\n", 400, "no valid HTTP.*request line"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "no valid HTTP.*Host"),
        (HEAD + b"content-length: -5\r\n\r\n", 400, "no valid HTTP.*Content-Length"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "no valid HTTP"),
        (HEAD + b"x: " + b"y" * 70_000, 431, "headers have more than 64 KiB. Send fewer"),
    ],
)
def test_what_is_no_http(served, sent, status, said):
    def refused():
        return {name: value for name, value in numbers(served).items() if name.startswith("eet:requests_refused_total")}

    raw, before = Raw(served.url), refused()
    raw.send(sent)
    message = ended(raw, status)
    assert re.search(said, message), message
    grown = {name: value - before.get(name, 0) for name, value in refused().items()}
    assert {name: more for name, more in grown.items() if more} == {
        f'eet:requests_refused_total{{model_name="demo",status="{status}"}}': 1
    }, "once, also where the app had the request already"


def test_headers_that_come_too_slowly_are_not_waited_for(served):
    raw, start = Raw(served.url), time.monotonic()
    raw.send(b"GET /health HTTP/1.1\r\nhost: a\r\n")
    for _ in range(3):
        time.sleep(0.1)
        raw.send(b"x-slow: 1\r\n")
    assert "longer than 0.5 s" in ended(raw, 408)
    assert time.monotonic() - start < 5
    again = Raw(served.url)
    again.send(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    assert b" 200 " in again.until(b"}")
    again.send(b"GET /hea")  # the second request on a connection is not waited for either
    assert b" 408 " in again.until(b"")
    silent = Raw(served.url)
    assert b" 408 " in silent.until(b"")


def test_a_body_that_comes_too_slowly(demo):
    served = eet_lab.serve(demo, PAGED, front="thread", body_s=0.3).wait_until_up(60)
    admission, raw = served._server.service.admission, Raw(served.url)
    try:
        raw.send(HEAD + b'content-length: 99\r\n\r\n{"a')
        eventually(lambda: admission.num_inside == 1)
        assert b" 408 " in raw.until(b"\r\n")
        assert eventually(lambda: admission.num_inside == 0)
    finally:
        raw.close()
        served.stop()


def test_a_key_is_asked_for(demo):
    served = eet_lab.serve(demo, api_key="sécret", served_model_name="mine").wait_until_up(60)
    try:
        for key in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s"}):
            answer = httpx.get(f"{served.url}/v1/models", headers=key)
            checked(answer, 401, None)
            assert answer.headers["www-authenticate"] == "Bearer"
        fine = httpx.get(f"{served.url}/v1/models", headers={"authorization": "Bearer sécret".encode()})
        assert fine.json()["data"][0]["id"] == "mine"
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert httpx.get(f"{served.url}/metrics").status_code == 401
    finally:
        served.stop()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_queued_requests": 0}, "max_queued_requests is 0"),
        ({"max_queued": 1}, "Did you mean 'max_queued_"),
        ({"drain_s": float("nan")}, "drain_s is nan"),
        ({"drain_s": 10**400}, "drain_s is 1000.*, but it must be seconds above 0"),
        ({"request_s": -1}, "request_s is -1"),
        ({"api_key": ""}, "api_key is ''"),
        *(({"api_key": key}, "^api_key must be one line, without a space at") for key in ("secret\n", " secret")),
        ({"pool": "max"}, "pool is 'max'"),
        ({"max_model_len": 1}, "max_model_len is 1"),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(SetupError, match=said):
        Options.of(**options)


def test_servers_that_cannot_be(demo, served):
    taken = int(served.url.rsplit(":", 1)[1])
    with pytest.raises(SetupError, match=f"127.0.0.1:{taken} cannot be listened on.*Choose another port"):
        eet_lab.serve(demo, port=taken)
    with pytest.raises(SetupError, match="port is 70000"):
        eet_lab.serve(demo, port=70000)
    for host, said in (("a..b", "'a..b'"), ("a" * 64, "'aaa.*'"), (5, "5")):
        with pytest.raises(SetupError, match=f"host is {said}, but it must be a name or an address"):
            eet_lab.serve(demo, host=host)
    with pytest.raises(RecipeError, match="no requests that join"):
        eet_lab.serve(demo, "all")
    with pytest.raises(ModelError, match="loaded model"):
        eet_lab.serve("demo")
    with pytest.raises(SetupError, match="max_model_len is 5,000"):
        eet_lab.serve(demo, max_model_len=5000)
