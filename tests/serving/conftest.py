"""A server in this process, on a free port, and clients for it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

import eet_lab
from eet_lab.models import Model
from eet_lab.scheduling import Request
from eet_lab.serving.generator import Generator
from eet_lab.serving.handle import ServerHandle

PAGED = "all,memory_reuse:kv=paged,continuous_batching:rows=4"
PROMPT = "Raise an exception if"


@pytest.fixture(scope="session")
def demo() -> Model:
    return eet_lab.load("demo", device="cpu")


@pytest.fixture(scope="module")
def served(demo: Model) -> Iterator[ServerHandle]:
    """The demo model on four slots that take pages."""
    served = eet_lab.serve(demo, PAGED, header_s=0.5, body_s=0.5, max_body_bytes=65536).wait_until_up(60)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def client(served: ServerHandle) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def generator(served: ServerHandle) -> Generator:
    found = served._server.service.generator
    assert found is not None
    return found


def eventually(fact: Callable[[], Any], seconds: float = 10) -> Any:
    """What it answers once that is true."""
    end = time.monotonic() + seconds
    while not (found := fact()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)
    return found


def free_pages(generator: Generator) -> int:
    assert generator.engine is not None
    return generator.engine.cache.ledger.free  # type: ignore[attr-defined]


class Raw:
    """A client that sends what it likes, byte by byte."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        assert where.hostname and where.port
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(10)
        self.socket.connect((where.hostname, where.port))

    def post(self, path: str, body: dict[str, Any] | bytes, headers: str = "content-type: application/json\r\n") -> Raw:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send(f"POST {path} HTTP/1.1\r\nhost: a\r\n{headers}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        return self

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def until(self, mark: bytes) -> bytes:
        """All that comes, up to the mark; b"" marks the connection's end."""
        got = b""
        while not (mark and mark in got) and (more := self.socket.recv(65536)):
            got += more
        return got

    def close(self) -> None:
        self.socket.close()


class Script:
    """An engine that says what it is told to, a token a step."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self.requests: list[Request] = []
        self.settings: list[eet_lab.Settings] = []

    def add(self, prompt: list[int], settings: eet_lab.Settings, number: int = 0) -> Request:
        self.requests.append(Request(tuple(prompt) or (0,), settings.max_new_tokens))
        self.settings.append(settings)
        return self.requests[-1]

    def step(self) -> list[tuple[Request, int, float]]:
        told = []
        for request in self.requests:
            if not request.done:
                request.generated.append(self._tokens[len(request.generated)])
                if len(request.generated) == min(len(self._tokens), request.max_new_tokens):
                    request.finish_reason = "length"
                told.append((request, request.generated[-1], 0.0))
        return told

    def cancel(self, request: Request) -> None:
        request.finish_reason = "cancelled"

    def close(self) -> None:
        pass


@pytest.fixture
def scripted(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], Script]:
    """`scripted(tokens)` puts a script in the engine's place."""

    def scripted(tokens: list[int]) -> Script:
        eventually(lambda: not generator._has_work)  # what is in flight belongs to the other engine
        script = Script(tokens)
        monkeypatch.setattr(generator, "engine", script)
        return script

    return scripted


@pytest.fixture
def slowed(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 10 ms more."""
    slow_down(generator, monkeypatch)


def slow_down(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a step takes 10 ms more."""
    assert generator.engine is not None
    step = generator.engine.step

    def slow() -> Any:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(generator.engine, "step", slow)


def numbers(served: Any) -> dict[str, float]:
    """All that /metrics tells."""
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
