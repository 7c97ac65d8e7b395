"""A thread that owns an engine: others only put commands on its queue, and are told of what came on their own loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from operator import call
from queue import Empty, SimpleQueue

import torch

from eet_lab.engine.encode import EncoderEngine
from eet_lab.engine.engine import Engine
from eet_lab.progress import Progress
from eet_lab.serving.errors import ApiError
from eet_lab.threads import num_cpu_threads

PATIENCE_S = 10.0
"""A pass cannot be stopped: a thread that does not end in this time is left to end by itself."""
LOG = logging.getLogger("eet_lab.serving")

Command = Callable[[], None]


class Worker(ABC):
    """Commands run between two turns, in their order, on the one thread that touches the engine.

    `ready` is done once there is an engine, and fails where none could be built.
    """

    engine: Engine | EncoderEngine | None = None

    def __init__(self) -> None:
        self.ready: Future[None] = Future()
        self.progress: Progress | None = None
        """Told of what is built and run before the first request."""
        self.is_closing = threading.Event()
        """Ends what is built and run before the first request."""
        self.dead: ApiError | None = None
        """Why nothing can be served any more, once a new engine could not be built."""
        self.tell: Callable[[Command], object] = call
        """Runs what tells of what came: on the engine's own thread, which must not wait, or where `serve` says."""
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="eet-serving", daemon=True)

    def start(self) -> None:
        """Build the engine, on its thread."""
        self._thread.start()

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell what comes on this loop."""
        self.tell = partial(_on, loop)

    def close(self) -> None:
        """End after the present turn, and wait for it. One that was never started fails whoever waits for `ready`."""
        self.is_closing.set()
        self._commands.put(None)
        if self._thread.ident is None:
            self.ready.cancel()
        else:
            self._thread.join(PATIENCE_S)

    def command(self, command: Command) -> None:
        """Run this between two turns; from any thread."""
        self._commands.put(command)

    def failure(self, error: Exception) -> str:
        """Log an engine's error, and let go of the tensors in its frames; its number in the log."""
        number = f"error-{uuid.uuid4().hex[:12]}"
        LOG.error("%s: the engine failed and is built anew", number, exc_info=error)
        traceback.clear_frames(error.__traceback__)  # else a new engine might find no room beside them
        return number

    def rebuild(self) -> None:
        """A new engine over the same weights. Where there can be none, everything is refused from now on."""
        with suppress(Exception):
            self._close()
        try:
            self._build()
        except Exception as error:
            LOG.error("no engine can be built any more", exc_info=error)
            self.dead = ApiError(503, f"The engine is lost ({type(error).__name__}). Restart the server.", code="dead")

    def _run(self) -> None:
        self.ready.set_running_or_notify_cancel()  # whoever waits for it may leave, and cannot cancel it
        # torch keeps the setting per thread.
        torch.set_num_threads(min(torch.get_num_threads(), num_cpu_threads()))
        try:
            self._build()
        except BaseException as error:  # noqa: BLE001  told to whoever waits for `ready`
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        is_wanted = True
        while is_wanted:
            try:
                is_wanted = self._do_commands()
                if is_wanted and self._has_work:
                    self._turn()
            except Exception as error:  # noqa: BLE001  the clients are told, and the next ones are served
                self._fail(error)
        self._close()

    def _do_commands(self) -> bool:
        """All that wait; without work it waits for the first. False once it shall end."""
        try:
            command = self._commands.get(block=not self._has_work)
            while command is not None:
                command()
                command = self._commands.get(block=False)
        except Empty:
            return True
        return False

    @property
    @abstractmethod
    def _has_work(self) -> bool:
        """Whether a turn would do anything."""

    @abstractmethod
    def _build(self) -> None:
        """Make the engine, and let it take what it will need."""

    @abstractmethod
    def _turn(self) -> None:
        """One pass, and what it makes is told."""

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """Tell all that were served of an error at once, and go on with a new engine, whose building takes a while."""

    def _close(self) -> None:
        """Give the engine's memory back."""
        if self.engine is not None:
            self.engine.close()


def _on(loop: asyncio.AbstractEventLoop, command: Command) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(command)
