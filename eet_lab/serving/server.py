"""A front on a socket, in this process: it listens, drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator
from functools import partial

import uvicorn

from eet_lab.serving.app import app_of
from eet_lab.serving.connection import Connection
from eet_lab.serving.errors import ApiError
from eet_lab.serving.front import Front
from eet_lab.serving.lifecycle import Lifecycle

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
            http=partial(Connection, options=service.options, refused=service.metrics.refused),
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
