"""Where the body of an HTTP/1.1 message ends: after so many bytes, or after its last chunk. For servers and clients."""

from __future__ import annotations

import re
from collections.abc import Callable

MOST_HEAD = 65_536
"""Bytes of a message before its body, of a chunk's size with its extensions, and of all that follows the last chunk."""
LINE_END = b"\r\n"
CHUNK_HEAD = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
TRAILERS = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*")


class BadHttp(ValueError):
    """What came is no HTTP/1.1."""


class Body:
    """A body that is fed as it comes. `got` gets its pieces, however they were cut; no `length`: it comes in chunks."""

    def __init__(self, length: int | None, got: Callable[[bytes], None]) -> None:
        self._got = got
        self._left = length or 0
        # Not a bound method, with which it would hold itself: only the collector finds that.
        self._state: Callable[[Body, bytes, int], int] = Body._chunk_head if length is None else Body._counted
        self._held = b""
        self.is_complete = length == 0

    def feed(self, data: bytes) -> bytes:
        """Take what came; what of it lies behind the body's end. Errors: BadHttp."""
        data, at = self._held + data, 0
        while at < len(data) and not self.is_complete:
            if (end := self._state(self, data, at)) == at and not self.is_complete:  # it needs more at once
                break
            at = end
        self._held, rest = (b"", data[at:]) if self.is_complete else (data[at:], b"")
        return rest

    def _counted(self, data: bytes, at: int) -> int:
        end = self._piece(data, at)
        self.is_complete = not self._left
        return end

    def _chunk_head(self, data: bytes, at: int) -> int:
        end = data.find(LINE_END, at)
        if not _is_there(data, at, end):
            return at
        if (found := CHUNK_HEAD.fullmatch(data, at, end)) is None:
            raise BadHttp("a chunk's size is no hexadecimal number")
        self._left = int(found[1], 16)
        self._state = Body._chunk if self._left else Body._trailers
        return end + len(LINE_END)

    def _chunk(self, data: bytes, at: int) -> int:
        end = self._piece(data, at)
        if not self._left:
            self._state = Body._chunk_end
        return end

    def _chunk_end(self, data: bytes, at: int) -> int:
        if len(data) - at < len(LINE_END):
            return at
        if not data.startswith(LINE_END, at):
            raise BadHttp("a chunk does not end where it should")
        self._state = Body._chunk_head
        return at + len(LINE_END)

    def _trailers(self, data: bytes, at: int) -> int:
        end = at
        if not data.startswith(LINE_END, at) and (end := data.find(LINE_END + LINE_END, at)) >= 0:
            end += len(LINE_END)  # of the last trailer
        if not _is_there(data, at, end):
            return at
        if not TRAILERS.fullmatch(data, at, end):
            raise BadHttp("what follows the last chunk is no header")
        self.is_complete = True
        return end + len(LINE_END)

    def _piece(self, data: bytes, at: int) -> int:
        piece = data[at : at + self._left]
        self._left -= len(piece)
        self._got(piece)
        return at + len(piece)


def _is_there(data: bytes, at: int, end: int) -> bool:
    """Whether what begins at one place ends at the other. Errors: BadHttp for what is too long to be awaited."""
    if (end if end >= at else len(data)) - at > MOST_HEAD:
        raise BadHttp(f"a chunk's size or what follows the last chunk has more than {MOST_HEAD:,} bytes")
    return end >= at
