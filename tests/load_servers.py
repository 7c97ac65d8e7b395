"""Servers that say what a test wants, on a thread of their own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from eet_lab.scheduling.traffic import Traffic


def due(*seconds: float, new_tokens: int = 3) -> Traffic:
    """Requests of five tokens at these times."""
    count = len(seconds)
    return Traffic(np.array(seconds) * 1e3, np.full(count, 5), np.full(count, new_tokens), "made up")


async def say_three(asked, first_s=0.0, between_s=0.0, usage=True):
    asked.stream()
    await asyncio.sleep(first_s)
    asked.text("a")
    for text in ("b", "c"):
        await asyncio.sleep(between_s)
        asked.text(text)
    if usage:
        asked.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
    asked.finish()


MODELS = {"data": [{"id": "made-up", "vocab_size": 50}, {"id": "small", "vocab_size": 7}, {"id": "untold"}]}


class Asked(NamedTuple):
    """One request, the place among all for its path, and how to answer it."""

    number: int
    path: str
    body: Any
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def whole(self, body: Any, status: int = 200, more: str = "") -> None:
        raw = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n{more}\r\n"
        self.send(head.encode() + raw)

    def stream(self) -> None:
        self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def event(self, data: Any) -> None:
        raw = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        self.send(b"%x\r\n%s\r\n" % (len(raw), raw))

    def text(self, text: str, **more: Any) -> None:
        self.event({"choices": [{"index": 0, "text": text}], **more})

    def finish(self) -> None:
        self.event("[DONE]")
        self.send(b"0\r\n\r\n")


@contextmanager
def serving(answer: Callable[[Asked], Awaitable[bool | None]], status: int = 200) -> Iterator[str]:
    """The URL of a server whose POSTs are answered so; False ends the connection. It tells its models with `status`."""
    loop, numbers = asyncio.new_event_loop(), iter(range(1_000_000))

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
                body = json.loads(await reader.readexactly(length) or b"null")
                asked = Asked(next(numbers) if length else -1, head.split()[1], body, writer)
                if asked.path.endswith("/models"):
                    asked.whole(MODELS, status)
                elif await answer(asked) is False:
                    break
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def start() -> str:
        server = await asyncio.start_server(client, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        return f"http://{host}:{port}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
