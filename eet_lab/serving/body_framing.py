"""Where the body of an HTTP/1.1 message ends: after so many bytes, or after its last chunk. For servers and clients."""

from __future__ import annotations

import re
from collections.abc import Callable

MOST_LINE = 65_536
"""Bytes of a chunk's size with what follows it, and of all that may follow the last chunk."""
LINE = b"\r\n"
CHUNK_HEAD = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?")


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
        end = data.find(LINE, at)
        if end < 0:
            return _more(data, at)
        if (found := CHUNK_HEAD.fullmatch(data, at, end)) is None:
            raise BadHttp(f"a chunk's size is {data[at:end][:40]!r}")
        self._left = int(found[1], 16)
        self._state = Body._chunk if self._left else Body._trailers
        return end + len(LINE)

    def _chunk(self, data: bytes, at: int) -> int:
        end = self._piece(data, at)
        if not self._left:
            self._state = Body._chunk_end
        return end

    def _chunk_end(self, data: bytes, at: int) -> int:
        if len(data) - at < len(LINE):
            return at
        if not data.startswith(LINE, at):
            raise BadHttp("a chunk does not end where it should")
        self._state = Body._chunk_head
        return at + len(LINE)

    def _trailers(self, data: bytes, at: int) -> int:
        mark = LINE if data.startswith(LINE, at) else LINE + LINE
        end = data.find(mark, at)
        if end < 0:
            return _more(data, at)
        self.is_complete = True
        return end + len(mark)

    def _piece(self, data: bytes, at: int) -> int:
        piece = data[at : at + self._left]
        self._left -= len(piece)
        self._got(piece)
        return at + len(piece)


def _more(data: bytes, at: int) -> int:
    """Wait for more of what begins there. Errors: BadHttp for what is too long to be awaited."""
    if len(data) - at > MOST_LINE:
        raise BadHttp(f"a chunk's size or what follows the last chunk has more than {MOST_LINE:,} bytes")
    return at
