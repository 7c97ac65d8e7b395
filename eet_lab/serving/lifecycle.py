"""How a server starts and ends, wherever its front runs, and the socket on which it listens."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from eet_lab.collector import freeze_heap
from eet_lab.errors import SetupError
from eet_lab.files import raise_file_limit
from eet_lab.scheduling.whole import is_whole
from eet_lab.words import told

if TYPE_CHECKING:
    from eet_lab.serving.front import Front
    from eet_lab.serving.service import Service


LAST_PORT = 65535


class Lifecycle(ABC):
    """Serves until `drain`: the engine is built first, and who connects meanwhile waits.

    `run` is for one loop, of the main thread or of one of its own.
    """

    service: Front | Service
    place: ClassVar[str]
    """Where its front is."""

    def __init__(self) -> None:
        self.is_up = threading.Event()
        """Whether requests are answered."""
        self.told_up: Callable[[], None] = lambda: None
        """Called on the server's loop once requests are answered."""
        self.told_drain: Callable[[], None] = lambda: None
        """Called there when it begins to drain."""
        self.has_process = False
        """Whether the process is here for it alone."""
        self._is_draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Build the engine, serve, and give everything back. Errors: those of the engine's building."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            await self._serve()
        finally:
            self.is_up.clear()
            await self._close()

    def drain(self) -> None:
        """Refuse what comes, finish what was accepted within `drain_s`, and end; a second call ends at once.

        On the server's loop. Before the engine is there, it ends at once.
        """
        if self.is_up.is_set():
            is_first, self._is_draining = not self._is_draining, True
            self._drain_up()
            if is_first:
                with suppress(OSError):  # nobody may read what is told
                    self.told_drain()
        elif self._task is not None:
            self._task.cancel()

    def drain_soon(self) -> bool:
        """The same from any thread; False where it does not run (yet)."""
        if self._loop is None or self._loop.is_closed():
            return False
        self._loop.call_soon_threadsafe(self.drain)
        return True

    def _set_up(self) -> None:
        """From now on requests are answered."""
        if self.has_process:
            freeze_heap()
            raise_file_limit()  # who finds no file waits to be accepted, and is not refused
        self.is_up.set()
        self.told_up()

    def drain_on_signals(self) -> None:
        """SIGTERM and Ctrl+C drain; on the main thread's loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)

    @abstractmethod
    async def _serve(self) -> None:
        """Until the end; calls `_set_up` once requests are answered."""

    @abstractmethod
    async def _close(self) -> None:
        """Give everything back."""

    @abstractmethod
    def _drain_up(self) -> None:
        """What `drain` does of a server that is up."""


def listen(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """A socket that takes connections; port 0 is any that is free. Of several that share a port, each gets some.

    Errors: SetupError.
    """
    if not is_whole(port, 0, LAST_PORT):
        raise SetupError(f"port is {told(port)}, but it must be a whole number from 0 (any free one) to {LAST_PORT:,}.")
    try:
        [family, *_, address] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048, reuse_port=is_shared)
    except (TypeError, ValueError) as error:  # a name that cannot be encoded is the latter
        raise SetupError(f"host is {told(host)}, but it must be a name or an address, such as '127.0.0.1'.") from error
    except OSError as error:
        is_busy = isinstance(error, PermissionError) or error.errno == errno.EADDRINUSE
        remedy = "port, or 0 for a free one" if is_busy else "host, such as 127.0.0.1"
        raise SetupError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}. Choose another {remedy}."
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
