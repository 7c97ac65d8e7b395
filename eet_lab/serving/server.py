"""A front on a socket, in this process: it listens, drains and ends, and waits for no client for ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from eet_lab.serving.app import app_of
from eet_lab.serving.errors import ApiError, bad
from eet_lab.serving.front import Front
from eet_lab.serving.gate import App, Receive, Scope, Send, new_id, written
from eet_lab.serving.lifecycle import Lifecycle
from eet_lab.serving.options import Options
from eet_lab.words import plain, sized

MOST_HEADERS = 65_536
"""Bytes of a request before its body, or between two chunks of that; and those read behind it until it is answered."""
LAST_S = 2
"""Seconds for answers that were ended to reach their clients, before connections are cut."""
LOOK_S = 0.02
"""How often a draining server looks whether all are done."""
LINGER_S = 2.0
"""Seconds for a client to stop sending once it has its connection's last answer. What it sends is read for nothing, but
not more than the longest body; a client that sends more before it reads waits meanwhile.
"""
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
            http=partial(PatientProtocol, options=service.options, refused=service.metrics.refused),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=LAST_S,
            h11_max_incomplete_event_size=MOST_HEADERS,
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
    """uvicorn's protocol, which waits for no client for ever, and ends connections without a reset.

    Headers have `header_s`, from the connection, or from the first byte of a later request on it. What is left of a
    body once it is answered has `body_s`: it is read for nothing where it is short, and else, or where the client may
    leave it out, that answer is the connection's last one.
    """

    app: App
    timeout_keep_alive_task: asyncio.TimerHandle | None

    def __init__(self, *args: Any, options: Options, refused: Counter[int], **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._options, self._refused = options, refused
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: object = None
        self._discarded: int | None = None
        self._served, self.app = self.app, self._serve

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        if self._discarded is None:
            super().data_received(data)
            self._look()
            # uvicorn stops reading at a request that came before the answer to the last one, and would not learn that
            # its client has left.
            if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < MOST_HEADERS:
                self.flow.resume_reading()
        else:
            self._discarded += len(data)
            if self._discarded > self._options.max_body_bytes:
                self.flow.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        self.app = self._served  # no cycle that only the collector would find

    def on_response_complete(self) -> None:
        self.cycle.transport = self.transport
        super().on_response_complete()
        if self._discarded is None:
            self._look()
        else:
            self._unset_keepalive_if_required()

    def _serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self.conn.their_state is not h11.SEND_BODY:
            return self._served(scope, receive, send)

        async def send_in_order(message: MutableMapping[str, Any]) -> None:
            is_head = message["type"] == "http.response.start"
            if is_head and self.conn.their_state is h11.SEND_BODY and not self.cycle.disconnected:
                self.cycle.transport = _LastAnswer(self.transport, self._linger)
                if message["status"] == 408 or self._ends(scope):
                    message["headers"] = [*message["headers"], CLOSE_HEADER]
            await send(message)

        return self._served(scope, receive, send_in_order)

    def _ends(self, scope: Scope) -> bool:
        """Whether the connection ends with this answer: its body's rest is long, or the client may leave it out."""
        length = dict(scope["headers"]).get(b"content-length")
        return self.cycle.waiting_for_100_continue or length is None or int(length) > HIGH_WATER_LIMIT

    def _look(self) -> None:
        """The timer runs while headers are awaited that have begun, or the rest of a body that was answered."""
        state = self.conn.their_state
        if state is h11.IDLE:
            is_awaited = self.cycle is None or bool(self.conn.trailing_data[0])
            if not is_awaited and self.timeout_keep_alive_task is None:  # an answered body has come to its end
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        else:
            is_awaited = state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if not is_awaited or self._awaited is not state:
            self._disarm()
        if is_awaited and self._timer is None:
            self._awaited = state
            self._timer = self.loop.call_later(
                self._options.header_s if state is h11.IDLE else self._options.body_s, self._end
            )

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        """408 is what a client gets that is still there and has no answer, and the connection ends."""
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            late = f"The request's headers took longer than {plain(self._options.header_s)} s. Send them at once."
            self._refuse(ApiError(408, late))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls where h11 cannot read what came, while it handles h11's error."""
        error = sys.exception()
        if getattr(error, "error_status_hint", 400) == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self._refuse(ApiError(431, f"The request's headers have more than {sized(MOST_HEADERS)}. Send fewer."))
        else:
            why = str(error).partition(":")[0]  # what follows quotes the client
            self._refuse(bad(f"What came is no valid HTTP/1.1 request ({why}). Send one, unencrypted."))

    def _refuse(self, error: ApiError) -> None:
        """Answer what no app can, unless an answer has begun, and end the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._refused[error.status] += 1
        if self.scope is not None:  # an app that waits for the body will say that the client has left
            self.scope["state"]["is_refused"] = True
        status, headers, body = written(error)
        headers += [CLOSE_HEADER, (b"x-request-id", new_id())]
        head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self._linger()

    def _linger(self) -> None:
        """End our side of the connection, and soon the whole: what came in between would reset it at once, and the
        client might lose the answer.
        """
        self._disarm()
        self._unset_keepalive_if_required()
        self._discarded = 0
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        try:
            self.transport.write_eof()
        except OSError:  # the client has left
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(LINGER_S, self.transport.abort)


class _LastAnswer:
    """What an answer is written to while its request's body may still come: instead of closing, it calls `end`."""

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, end
