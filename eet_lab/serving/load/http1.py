"""HTTP/1.1 from a client's side, for thousands of streams on one core: each piece of a body is passed on as it comes.

A general client takes some 50 us for an event of a stream, which is one token: 20,000 a second would fill a core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

MOST_HEAD = 65_536
LINE = b"\r\n"
FINAL = 200
"""Answers with a lower status come before the real one."""


class BadAnswer(ValueError):
    """What came is no HTTP/1.1."""


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
    """One answer, which is fed as it comes. Errors: BadAnswer."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._state: Callable[[bytes], bytes | None] = self._head
        self._held = b""
        self._left = 0
        self.is_begun = self.is_complete = False
        self.keeps_alive = True

    def feed(self, data: bytes) -> None:
        """Take what came."""
        self.is_begun = True
        rest: bytes | None = self._held + data
        self._held = b""
        while rest and not self.is_complete:
            before = rest
            rest = self._state(before)
            if rest is None:
                self._held = before
        if rest:
            raise BadAnswer("more came than the answer")

    def closed(self) -> bool:
        """Nothing more comes. Whether that is the end of an answer that said no length."""
        if self._state == self._until_closed:
            self._end()
        return self.is_complete

    def _head(self, data: bytes) -> bytes | None:
        head, mark, rest = data.partition(LINE + LINE)
        if not mark:
            if len(data) > MOST_HEAD:
                raise BadAnswer(f"its head has more than {MOST_HEAD:,} bytes")
            return None
        status_line, *lines = head.split(LINE)
        words = status_line.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise BadAnswer(f"it begins with {status_line[:40]!r}")
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        if (status := int(words[1])) >= FINAL:
            self._choose_body(status, words[0], headers)
            self._listener.headed(status, headers)
            if self._state == self._counted and not self._left:
                self._end()
        return rest

    def _choose_body(self, status: int, version: bytes, headers: Mapping[bytes, bytes]) -> None:
        connection = headers.get(b"connection", b"").lower()
        self.keeps_alive = connection != b"close" and (version == b"HTTP/1.1" or connection == b"keep-alive")
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._state = self._chunk_head
        elif status in (204, 304):
            self._state = self._counted
        elif (length := headers.get(b"content-length")) is not None:
            if not length.isdigit():
                raise BadAnswer(f"its length is {length[:40]!r}")
            self._left, self._state = int(length), self._counted
        else:
            self._state, self.keeps_alive = self._until_closed, False

    def _counted(self, data: bytes) -> bytes:
        piece, rest = data[: self._left], data[self._left :]
        self._left -= len(piece)
        self._listener.got(piece)
        if not self._left:
            self._end()
        return rest

    def _until_closed(self, data: bytes) -> bytes:
        self._listener.got(data)
        return b""

    def _chunk_head(self, data: bytes) -> bytes | None:
        size, mark, rest = data.partition(LINE)
        if not mark:
            _check_short(data)
            return None
        try:
            self._left = int(size.partition(b";")[0], 16)
        except ValueError:
            raise BadAnswer(f"a chunk's size is {size[:40]!r}") from None
        if self._left < 0:
            raise BadAnswer(f"a chunk's size is {size[:40]!r}")
        self._state = self._chunk if self._left else self._trailer
        return rest

    def _chunk(self, data: bytes) -> bytes:
        piece, rest = data[: self._left], data[self._left :]
        self._left -= len(piece)
        if not self._left:
            self._state = self._chunk_end
        self._listener.got(piece)
        return rest

    def _chunk_end(self, data: bytes) -> bytes | None:
        if len(data) < len(LINE):
            return None
        if not data.startswith(LINE):
            raise BadAnswer("a chunk does not end where it should")
        self._state = self._chunk_head
        return data[len(LINE) :]

    def _trailer(self, data: bytes) -> bytes | None:
        line, mark, rest = data.partition(LINE)
        if not mark:
            _check_short(data)
            return None
        if not line:
            self._end()
        return rest

    def _end(self) -> None:
        self.is_complete = True


def _check_short(data: bytes) -> None:
    """BadAnswer for a line that is too long to be awaited."""
    if len(data) > MOST_HEAD:
        raise BadAnswer(f"a line has more than {MOST_HEAD:,} bytes")


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
        except BadAnswer as error:
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
