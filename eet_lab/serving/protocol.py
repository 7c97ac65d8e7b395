"""HTTP/1.1 that does not wait for ever: a connection that begins a request must bring its headers in time."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, which has a limit for idle connections and none for headers that come byte by byte.

    The time counts from the connection, or from the first byte of a later request on it.
    """

    def __init__(self, *args: Any, header_s: float, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._header_s = header_s
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _look(self) -> None:
        """The timer runs while headers are awaited that have begun."""
        if self.conn.their_state is not h11.IDLE:
            self._disarm()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_s, self._end)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end(self) -> None:
        """408 is what a client gets that is still there, and the connection ends."""
        self._header_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
