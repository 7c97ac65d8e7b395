"""HTTP/1.1 from a client's side, for thousands of streams on one core: each piece of a body is passed on as it comes.

A general client takes some 50 us for an event of a stream, which is one token: 20,000 a second would fill a core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from eet_lab.serving.body_framing import LINE_END, MOST_HEAD, BadHttp, Body

MOST_DIGITS = 15
"""A content-length with more digits is none."""
FINAL = 200
"""Answers with a lower status come before the real one."""


class Listener(Protocol):
    """Who waits for an answer."""

    def headed(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The status and the headers, whose names are in lower case."""

    def got(self, data: bytes) -> None:
        """A piece of the body, however it was cut."""

    def completed(self) -> None:
        """The body is complete."""

    def lost(self, reason: str, was_silent: bool) -> None:
        """The connection ended before; `was_silent` where nothing of an answer had come."""


class Answer:
    """One answer, which is fed as it comes. Errors: BadHttp."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._body: Body | None = None
        self._ends_with_connection = False
        self._held = b""
        self.is_begun = self.is_complete = False
        self.keeps_alive = True

    def feed(self, data: bytes) -> None:
        """Take what came."""
        self.is_begun = True
        rest = self._held + data
        self._held = b""
        while rest and self._body is None and not self._ends_with_connection:
            if (after := self._head(rest)) is None:
                self._held = rest
                return
            rest = after
        if self._body is None:
            if rest:
                self._listener.got(rest)
            return
        rest = self._body.feed(rest)
        self.is_complete = self._body.is_complete
        if rest:
            raise BadHttp("more came than the answer")

    def closed(self) -> bool:
        """Nothing more comes. Whether that is the end of an answer that said no length."""
        self.is_complete |= self._ends_with_connection
        return self.is_complete

    def _head(self, data: bytes) -> bytes | None:
        head, mark, rest = data.partition(LINE_END + LINE_END)
        if not mark:
            if len(data) > MOST_HEAD:
                raise BadHttp(f"its head has more than {MOST_HEAD:,} bytes")
            return None
        status_line, *lines = head.split(LINE_END)
        words = status_line.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit() or len(words[1]) != 3:
            raise BadHttp(f"it begins with {status_line[:40]!r}")
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        if (status := int(words[1])) >= FINAL:
            self._choose_body(status, words[0], headers)
            self._listener.headed(status, headers)
        return rest

    def _choose_body(self, status: int, version: bytes, headers: Mapping[bytes, bytes]) -> None:
        connection = headers.get(b"connection", b"").lower()
        self.keeps_alive = connection != b"close" and (version == b"HTTP/1.1" or connection == b"keep-alive")
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._body = Body(None, self._listener.got)
        elif status in (204, 304):
            self._body = Body(0, self._listener.got)
        elif (length := headers.get(b"content-length")) is not None:
            if not length.isdigit() or len(length) > MOST_DIGITS:
                raise BadHttp(f"its length is {length[:40]!r}")
            self._body = Body(int(length), self._listener.got)
        else:
            self._ends_with_connection, self.keeps_alive = True, False


class Connection(asyncio.Protocol):
    """Asks one thing after another; `released` is called when it can be asked again."""

    def __init__(self, released: Callable[[Connection], None]) -> None:
        self._released = released
        self._transport: asyncio.Transport | None = None
        self._listener: Listener | None = None
        self._answer: Answer | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def ask(self, request: bytes, listener: Listener) -> None:
        """Send a whole request."""
        assert self._transport is not None
        self._listener, self._answer = listener, Answer(listener)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Some of an answer; what comes without a question, such as a server's goodbye, ends the connection."""
        answer, listener = self._answer, self._listener
        if answer is None or listener is None:
            self.close()
            return
        try:
            answer.feed(data)
        except BadHttp as error:
            self._give_up(f"The answer is no HTTP: {error}.", was_silent=False)
            self.close()
            return
        if answer.is_complete:
            self._answer = self._listener = None
            if answer.keeps_alive and self.is_open:
                self._released(self)
            else:
                self.close()
            listener.completed()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self.is_open = False
        answer, listener = self._answer, self._listener
        if answer is not None and listener is not None and answer.closed():
            self._answer = self._listener = None
            listener.completed()
        elif answer is not None:
            why = type(exc).__name__ if exc else "closed"
            self._give_up(f"The connection broke before the answer was complete ({why}).", not answer.is_begun)

    def leave(self, listener: Listener) -> None:
        """This one waits no longer: a connection that still serves it ends."""
        if self._listener is listener:
            self.close()

    def close(self) -> None:
        """End it at once; who waits is told nothing."""
        self._answer = self._listener = None
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _give_up(self, reason: str, was_silent: bool) -> None:
        listener, self._answer, self._listener = self._listener, None, None
        if listener is not None:
            listener.lost(reason, was_silent)
