"""How a server starts and ends, wherever its front runs."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from eet_lab.serving.front import Front


class Lifecycle(ABC):
    """Serves until `drain`: the engine is built first, and who connects meanwhile waits.

    `run` is for one loop, of the main thread or of one of its own.
    """

    service: Front
    place: ClassVar[str]
    """Where its front is."""

    def __init__(self) -> None:
        self.is_up = threading.Event()
        """Whether requests are answered."""
        self.has_process = False
        """Whether the process is here for it alone."""
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
            self._drain_up()
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
        self.is_up.set()

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


def freeze_heap() -> None:
    """Let Python's collector leave alone what is there now, for good: modules, above all. Only for a process of ours.

    To walk all of them takes it 100 ms and more, in which nothing is answered, again and again under load.
    """
    gc.collect()
    gc.freeze()
