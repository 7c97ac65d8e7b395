"""A service on a socket: it listens, drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial

import uvicorn

from eet_lab.errors import SetupError
from eet_lab.serving.app import app_of
from eet_lab.serving.errors import ApiError
from eet_lab.serving.protocol import PatientProtocol
from eet_lab.serving.service import Service
from eet_lab.words import told

LAST_S = 2
"""Seconds for answers that were ended to reach their clients, before connections are cut."""
LOOK_S = 0.02
"""How often a draining server looks whether all are done."""
LAST_PORT = 65535
SWITCH_S = 0.0005
"""How long this loop may keep the interpreter's lock from the engine's thread, which gives it away many times in a
step. With Python's own 5 ms, a step of 256 rows took 8.0 ms in place of 5.7.
"""


class Server:
    """Serves until `drain`: the engine is built first, and who connects meanwhile waits.

    `run` is for one loop, of the main thread or of one of its own.
    """

    def __init__(self, service: Service, listening: socket.socket) -> None:
        self.service, self._socket = service, listening
        self.is_up = threading.Event()
        """Whether requests are answered."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            app_of(service),
            http=partial(PatientProtocol, header_s=service.options.header_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=LAST_S,
        )
        self._uvicorn = _Uvicorn(config)

    async def run(self) -> None:
        """Build the engine, serve, and give everything back. Errors: those of the engine's building."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        worker = self.service.worker
        worker.serve(self._loop)
        worker.start()
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            await asyncio.wrap_future(worker.ready)
            self.is_up.set()
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            sys.setswitchinterval(before)
            self.is_up.clear()
            self._socket.close()
            await asyncio.to_thread(worker.close)

    def drain(self) -> None:
        """Refuse what comes, finish what was accepted within `drain_s`, and end; a second call ends at once.

        On the server's loop. Before the engine is there, it ends at once.
        """
        if not self.is_up.is_set():
            if self._task is not None:
                self._task.cancel()
        elif self._draining is None:
            self.service.admission.is_draining = True
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._draining.cancel()
            self._end()

    def drain_soon(self) -> bool:
        """The same from any thread; False where it does not run (yet)."""
        if self._loop is None or self._loop.is_closed():
            return False
        self._loop.call_soon_threadsafe(self.drain)
        return True

    def drain_on_signals(self) -> None:
        """SIGTERM and Ctrl+C drain; on the main thread's loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.service.options.drain_s):
                while self.service.admission.num_inside:
                    await asyncio.sleep(LOOK_S)
        self._end()

    def _end(self) -> None:
        self.service.end_all(ApiError(503, "The server shuts down and waits no longer.", code="shutting_down"))
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would refuse connections at once, and clients would not be told why."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 is any that is free. Errors: SetupError."""
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= LAST_PORT:
        raise SetupError(f"port is {told(port)}, but it must be a whole number from 0 (any free one) to {LAST_PORT:,}.")
    try:
        [family, *_, address] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise SetupError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}. Choose another port, or 0 for a free one."
        ) from error
    # Connections inherit it. asyncio sets it only where a socket names its protocol, which this one does not; without
    # it, the second piece of an answer waits 40 ms for the client's acknowledgement of the first.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setblocking(False)
    return listening


def url_of(listening: socket.socket) -> str:
    """Where a client finds it: the address that OpenAI's client calls `base_url` is this with /v1."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
