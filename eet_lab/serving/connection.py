"""A client's connection over HTTP/1.1: one request after the other, each answered by an ASGI app.

uvicorn accepts connections. Its own protocols are not used: here every wait for a client has a limit, a connection ends
after an answer without a reset where that is possible, a client that leaves is noticed even when it has sent its next
request, and a body may follow an offered upgrade.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from eet_lab.serving.body_framing import LINE_END, MOST_HEAD, BadHttp, Body
from eet_lab.serving.errors import ApiError, bad
from eet_lab.serving.exchange import Exchange, Head, Headers, head_of
from eet_lab.serving.gate import new_id, written
from eet_lab.serving.options import Options
from eet_lab.words import plain, sized

LINGER_S = 2.0
"""Seconds for a client to stop sending once its connection's last answer is written. What it sends is read for nothing,
but not more bytes than the longest body may have: nothing is read beyond those.
"""
HEAD_END = re.compile(rb"\n\r?\n")
FIRST_VISIBLE = 0x21
"""No request begins with a lower byte. A client that encrypts sends one, and no end of a head to wait for."""


class Connection(asyncio.Protocol):
    """Reads requests one after the other, and has them answered. Every wait for the client has a limit.

    Headers have `header_s`, from the connection, or from the first byte of a later request on it. What is left of a
    body once it is answered has `body_s`: it is read for nothing where the body is short, and else, or where the client
    may leave it out, that answer is the connection's last one. A client that does not read its answers has `request_s`,
    and on a connection that ends `body_s`.
    """

    transport: asyncio.Transport
    flow: FlowControl

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        options: Options,
        refused: Counter[int],
    ) -> None:
        self._config, self._server, self._app_state = config, server_state, app_state
        self._options, self._refused = options, refused
        self._loop = _loop or asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._held, self._searched = b"", 0
        self._is_idle = False
        self._exchange: Exchange | None = None
        self._body: Body | None = None
        self._discarded: int | None = None
        self._addresses: dict[str, Any] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        assert isinstance(transport, asyncio.Transport)
        self._server.connections.add(self)
        self.transport, self.flow = transport, FlowControl(transport)
        self._addresses = {"server": get_local_addr(transport), "client": get_remote_addr(transport)}
        self._arm(self._options.header_s, self._refuse_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, whoever ended it."""
        self._disarm()
        self._server.connections.discard(self)
        self.resume_writing()
        self._leave()
        self._body = None

    def eof_received(self) -> None:
        """The client sends no more: it has left."""
        self._leave()
        self._close()

    def shutdown(self) -> None:
        """End once what is under way is answered, as uvicorn asks for."""
        if self._exchange is not None:
            self._exchange.keeps_alive = False
        elif self._body is not None:
            self._linger()
        elif self._discarded is None:
            self._close()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        self.flow.pause_writing()
        self._unread = self._loop.call_later(self._options.request_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        self.flow.resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self._discarded is None:
            self._held += data
            self._read()
        else:
            self._discarded += len(data)
            if self._discarded > self._options.max_body_bytes:
                self.flow.pause_reading()

    def _read(self) -> None:
        """Take what is held as far as it goes: a body to its end, and the next request once this one is answered."""
        try:
            while self._held and self._discarded is None:
                if self._body is not None:
                    self._held = self._body.feed(self._held)
                    if self._body.is_complete:
                        self._end_body()
                elif self._exchange is not None:
                    if len(self._held) > MOST_HEAD:
                        self.flow.pause_reading()
                    return
                elif (head := self._head()) is not None:
                    self._begin(head)
                else:
                    return
        except BadHttp as error:
            self._refuse(bad(f"What came is no valid HTTP/1.1 request ({error}). Send one, unencrypted."))

    def _head(self) -> Head | None:
        """The next head, once all of it is there."""
        self._held = self._held.lstrip(LINE_END)
        if not self._held:
            return None
        if self._held[0] < FIRST_VISIBLE:
            raise BadHttp("it does not begin with a method")
        if self._is_idle:
            self._is_idle = False
            self._arm(self._options.header_s, self._refuse_late)
        end = HEAD_END.search(self._held, self._searched)
        if (end.end() if end else len(self._held)) > MOST_HEAD:
            self._refuse(ApiError(431, f"The request's headers have more than {sized(MOST_HEAD)}. Send fewer."))
            return None
        if end is None:
            self._searched = max(len(self._held) - len(LINE_END + LINE_END), 0)
            return None
        head, self._held, self._searched = self._held[: end.end()], self._held[end.end() :], 0
        return Head.read(head)

    def _begin(self, head: Head) -> None:
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": self._config.asgi_version, "spec_version": "2.3"},
            "http_version": head.version,
            "scheme": "http",
            "method": head.method,
            "root_path": "",
            "headers": head.headers,
            "state": self._app_state.copy(),
            **self._addresses,
            **head.place(),
        }
        self._disarm()
        self._exchange = exchange = Exchange(self, scope, head)
        self._body = Body(head.length, exchange.got) if head.length != 0 else None
        task = self._loop.create_task(exchange.run(self._config.loaded_app))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _end_body(self) -> None:
        self._body = None
        if self._exchange is not None:
            self._exchange.end_body()
        else:
            self._await_next()

    @property
    def has_body_to_come(self) -> bool:
        """Whether the client has not sent the whole request yet."""
        return self._body is not None

    def read_on(self) -> None:
        """The app waits for what the client sends: more of the body, or that it leaves."""
        if self._body is not None or len(self._held) <= MOST_HEAD:
            self.flow.resume_reading()

    def answered(self, keeps_alive: bool) -> None:
        """The answer is complete; what becomes of the connection."""
        self._exchange = None
        self._server.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if not keeps_alive and (self._body is not None or self._held.strip(LINE_END)):
            self._linger()
        elif not keeps_alive:
            self._close()
        elif self._body is not None:
            self._arm(self._options.body_s, self._close)
        else:
            self._await_next()
            self._read()

    def headers(self) -> Headers:
        """What every answer has, such as the date."""
        return self._server.default_headers

    def _await_next(self) -> None:
        self._is_idle = True
        self._arm(self._config.timeout_keep_alive, self._close)

    def _arm(self, seconds: float, then: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, then)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_late(self) -> None:
        if not self.transport.is_closing():
            late = f"The request's headers took longer than {plain(self._options.header_s)} s. Send them at once."
            self._refuse(ApiError(408, late))

    def _refuse(self, error: ApiError) -> None:
        """Answer what no app can, unless an answer has begun, and end the connection."""
        exchange = self._exchange
        if exchange is not None:
            if exchange.has_begun:
                self.transport.abort()
                return
            exchange.scope["state"]["is_refused"] = True  # the app will answer 499, which is not to be counted
        self._refused[error.status] += 1
        status, headers, body = written(error)
        headers += [CLOSE_HEADER, (b"x-request-id", new_id())]
        self.transport.write(head_of(status, headers) + body)
        self._linger()

    def _close(self) -> None:
        """End the connection once the client has read what is written, if it reads at all."""
        self.transport.close()
        self._arm(self._options.body_s, partial(self._cut, self.transport.get_write_buffer_size()))

    def _cut(self, unread: int) -> None:
        """End the connection, unless the client has read since so many bytes waited for it."""
        left = self.transport.get_write_buffer_size()
        if 0 < left < unread:
            self._arm(self._options.body_s, partial(self._cut, left))
        else:
            self.transport.abort()

    def _linger(self) -> None:
        """End our side of the connection, and soon the whole: what came in between would reset it at once, and the
        client might lose the answer.
        """
        self._discarded, self._held, self._body = 0, b"", None
        self._leave()
        self.flow.resume_reading()
        try:
            self.transport.write_eof()
        except OSError:  # the client has left
            self.transport.abort()
        else:
            self._arm(LINGER_S, partial(self._cut, self.transport.get_write_buffer_size() + 1))

    def _leave(self) -> None:
        """Tell who answers that nobody reads it."""
        if self._exchange is not None:
            self._exchange.leave()
            self._exchange = None
