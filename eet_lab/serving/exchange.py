"""The head of an HTTP/1.1 request, as llhttp reads it, and an ASGI app's answer to the request, as bytes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, HIGH_WATER_LIMIT

from eet_lab.serving.body_framing import LINE_END, BadHttp
from eet_lab.serving.gate import LOG
from eet_lab.words import told

if TYPE_CHECKING:
    from eet_lab.serving.connection import Connection

WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
PHRASES = {each.value: each.phrase for each in HTTPStatus}
STATUS_LINES = {status: f"HTTP/1.1 {status} {PHRASES.get(status, '')}".encode() for status in range(100, 600)}
CONTINUE = STATUS_LINES[HTTPStatus.CONTINUE] + LINE_END + LINE_END

Headers = list[tuple[bytes, bytes]]


class Head(NamedTuple):
    """The head of a request. No `length`: its body comes in chunks. Names of headers are in lower case.

    `asks_first`: the client waits to be told that it may send the body.
    """

    method: str
    url: bytes
    version: str
    headers: Headers
    length: int | None
    keeps_alive: bool
    asks_first: bool

    @classmethod
    def read(cls, data: bytes) -> Head:
        """Read a whole head. Errors: BadHttp."""
        noted = _Noted()
        parser = httptools.HttpRequestParser(noted)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an upgrade is an offer: the request is answered as it is
        except httptools.HttpParserError as error:
            raise BadHttp(str(error)) from None
        line = data.partition(LINE_END)[0]
        if not line.endswith((b" HTTP/1.1", b" HTTP/1.0")):  # llhttp reads other protocols, too
            raise BadHttp("its request line does not end in HTTP/1.1")
        version, named = line[-3:].decode(), defaultdict[bytes, list[bytes]](list)
        for name, value in noted.headers:
            named[name].append(value.lower())
        if len(named[b"host"]) != 1 and (version == "1.1" or named[b"host"]):
            raise BadHttp("it has no Host header, or several")
        codings, length = named[b"transfer-encoding"], named[b"content-length"]
        if codings and (codings != [b"chunked"] or version == "1.0"):
            raise BadHttp("its Transfer-Encoding is not chunked")
        # llhttp forgets it with the end of the head where no body follows.
        closes = any(word.strip() == b"close" for value in named[b"connection"] for word in value.split(b","))
        return cls(
            parser.get_method().decode(),
            b"".join(noted.url),
            version,
            noted.headers,
            None if codings else int(length[0]) if length else 0,
            version == "1.1" and not closes,
            version == "1.1" and named[b"expect"] == [b"100-continue"],
        )

    def place(self) -> dict[str, Any]:
        """Where it goes, as an ASGI scope tells it. Errors: BadHttp."""
        try:
            url = httptools.parse_url(self.url)
        except httptools.HttpParserError:
            raise BadHttp("its URL cannot be read") from None
        path = url.path or b"/"
        return {"path": unquote(path.decode("ascii")), "raw_path": path, "query_string": url.query or b""}


class _Noted:
    """What the parser tells."""

    def __init__(self) -> None:
        self.url, self.headers = list[bytes](), Headers()
        self.on_url = self.url.append

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(b" \t")))  # llhttp leaves what may stand behind a value


class Exchange:
    """A request, and an app's answer to it: what ASGI calls `receive` and `send`."""

    def __init__(self, connection: Connection, scope: dict[str, Any], head: Head) -> None:
        self.scope, self.keeps_alive, self.has_begun = scope, head.keeps_alive, False
        self._connection, self._head = connection, head
        self._come, self._has_news = bytearray(), asyncio.Event()
        self._is_whole = head.length == 0
        if self._is_whole:
            self._has_news.set()
        self._waits_to_send = head.asks_first
        self._has_left = self._is_complete = False
        self._framed: Callable[[bytes, bool], bytes] = _no_body
        self._length: int | None = None

    async def run(self, app: ASGIApp) -> None:
        """Have it answered. A connection ends whose answer does not come to its end."""
        try:
            with suppress(Exception):  # the gate has logged it
                await app(self.scope, self.receive, self.send)
        finally:
            if not self._is_complete and not self._has_left:
                LOG.warning("The answer to %s was cut short.", told(self.scope["path"]))
                self._connection.transport.abort()  # a client that does not read would hold it open

    def got(self, data: bytes) -> None:
        """A piece of the body."""
        self._waits_to_send = False
        if self._is_complete:
            return
        self._come += data
        if len(self._come) > HIGH_WATER_LIMIT:
            self._connection.flow.pause_reading()
        self._has_news.set()

    def end_body(self) -> None:
        """The body has come to its end."""
        self._is_whole = True
        self._has_news.set()

    def leave(self) -> None:
        """Nobody reads the answer any more."""
        self._has_left = True
        self._has_news.set()

    async def receive(self) -> Message:
        """More of the body, or that nothing more will come: the client has left, or has its answer."""
        if not self._has_left and not self._is_complete:
            if self._waits_to_send and not self.has_begun:
                self._waits_to_send = False
                self._connection.transport.write(CONTINUE)
            self._connection.read_on()
            await self._has_news.wait()
            self._has_news.clear()
        if self._has_left or self._is_complete:
            return {"type": "http.disconnect"}
        come, self._come = bytes(self._come), bytearray()
        return {"type": "http.request", "body": come, "more_body": not self._is_whole}

    async def send(self, message: Message) -> None:
        """Write a part of the answer, once the client has read enough of those before it."""
        if self._connection.flow.write_paused and not self._has_left:
            await self._connection.flow.drain()
        if self._has_left:
            return
        is_start = message["type"] == "http.response.start"
        if is_start == self.has_begun or self._is_complete:
            raise RuntimeError("An answer is one start, and then its body.")
        if is_start:
            self._begin(message["status"], [(name.lower(), value) for name, value in message.get("headers", ())])
        else:
            self._go_on(message.get("body", b""), message.get("more_body", False))

    def _begin(self, status: int, headers: Headers) -> None:
        self.has_begun = True
        is_timeout = status == HTTPStatus.REQUEST_TIMEOUT
        if self._connection.has_body_to_come and (is_timeout or self._is_not_worth_waiting()):
            self.keeps_alive = False
        lines = [*self._connection.headers(), *headers]
        length = dict(headers).get(b"content-length")
        if self._head.method != "HEAD" and status not in WITHOUT_BODY:
            self._framed = _as_it_is
            if length is not None:
                self._length = int(length)
            elif self._head.version == "1.1":
                self._framed = _in_chunks
                lines.append((b"transfer-encoding", b"chunked"))
            else:
                self.keeps_alive = False
        if CLOSE_HEADER in headers:
            self.keeps_alive = False
        elif not self.keeps_alive:
            lines.append(CLOSE_HEADER)
        self._connection.transport.write(head_of(status, lines))

    def _is_not_worth_waiting(self) -> bool:
        """Whether the rest of the body shall not be read for nothing: it is long, or the client may leave it out."""
        length = self._head.length
        return self._waits_to_send or length is None or length > HIGH_WATER_LIMIT

    def _go_on(self, body: bytes, more: bool) -> None:
        if self._length is not None:
            self._length -= len(body)
            if self._length < 0 or (self._length and not more):
                raise RuntimeError("The answer has another length than its header says.")
        if data := self._framed(body, more):
            self._connection.transport.write(data)
        if not more:
            self._is_complete = True
            self._has_news.set()
            self._connection.answered(self.keeps_alive)


def head_of(status: int, headers: Headers) -> bytes:
    """The head of an answer. Errors: ValueError for a header that would be two."""
    lines = [STATUS_LINES[status], *(b"%b: %b" % header for header in headers), b"", b""]
    head = LINE_END.join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
        raise ValueError("A header's name or value has an end of a line.")
    return head


def _no_body(body: bytes, more: bool) -> bytes:
    return b""


def _as_it_is(body: bytes, more: bool) -> bytes:
    return body


def _in_chunks(body: bytes, more: bool) -> bytes:
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return chunk if more else chunk + b"0\r\n\r\n"
