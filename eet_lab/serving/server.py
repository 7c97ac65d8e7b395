"""A front on a socket, in this process: it listens, drains and ends, and waits for no client for ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from eet_lab.serving.app import app_of
from eet_lab.serving.errors import ApiError, bad
from eet_lab.serving.front import Front
from eet_lab.serving.gate import new_id, written
from eet_lab.serving.lifecycle import Lifecycle
from eet_lab.words import plain

LAST_S = 2
"""Seconds for answers that were ended to reach their clients, before connections are cut."""
LOOK_S = 0.02
"""How often a draining server looks whether all are done."""
SWITCH_S = 0.0005
"""How long this loop may keep the interpreter's lock from an engine's thread beside it, which gives it away many times
in a step. With Python's own 5 ms, a step of 256 rows took 8.0 ms in place of 5.7.
"""


class Server(Lifecycle):
    """Serves a front by uvicorn."""

    service: Front
    place = "here"

    def __init__(self, service: Front, listening: socket.socket) -> None:
        super().__init__()
        self.service, self._socket = service, listening
        self._draining: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            app_of(service),
            http=partial(PatientProtocol, header_s=service.options.header_s, refused=service.metrics.refused),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=LAST_S,
        )
        self._uvicorn = _Uvicorn(config)

    def end(self, error: ApiError) -> None:
        """Every answer that is waited for ends with this error, and then the server."""
        self.service.end_all(error)
        self._uvicorn.should_exit = True

    async def _serve(self) -> None:
        worker = self.service.worker
        worker.serve(asyncio.get_running_loop())
        worker.start()
        if not self.service.is_encoder:
            self.service.look_for_template()
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            await asyncio.wrap_future(worker.ready)
            self._set_up()
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            sys.setswitchinterval(before)

    async def _close(self) -> None:
        self._socket.close()
        await asyncio.to_thread(self.service.worker.close)

    def _drain_up(self) -> None:
        if self._draining is None:
            self.service.admission.is_draining = True
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._draining.cancel()
            self._end()

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.service.options.drain_s):
                while self.service.admission.num_inside:
                    await asyncio.sleep(LOOK_S)
        self._end()

    def _end(self) -> None:
        self.end(ApiError(503, "The server shuts down and waits no longer.", code="shutting_down"))


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would refuse connections at once, and clients would not be told why."""
        yield


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, which has a limit for idle connections and none for headers that come byte by byte.

    The time counts from the connection, or from the first byte of a later request on it.
    """

    def __init__(self, *args: Any, header_s: float, refused: Counter[int], **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._header_s, self._refused = header_s, refused
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
            late = f"The request's headers took longer than {plain(self._header_s)} s. Send them at once."
            self._refuse(ApiError(408, late))

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls where h11 cannot read what came."""
        self._refuse(bad("What came is no valid HTTP/1.1 request. Send one, unencrypted."))

    def _refuse(self, error: ApiError) -> None:
        """Answer what no app can, unless an answer has begun, and end the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._refused[error.status] += 1
        if self.scope is not None:  # an app that waits for the body will say that the client has left
            self.scope["state"]["is_refused"] = True
        status, headers, body = written(error)
        headers += [(b"connection", b"close"), (b"x-request-id", new_id())]
        head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()
