"""A server whose front is a process of its own: HTTP, JSON and texts never hold the engine's interpreter."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from eet_lab.errors import SetupError
from eet_lab.paths import PACKAGE
from eet_lab.serving.jobs import News
from eet_lab.serving.lifecycle import Lifecycle
from eet_lab.serving.service import Service
from eet_lab.serving.wire import JOB, TO_ENGINE, Channel, Hello, ToEngine, ToFront

PATIENCE_S = 5.0
"""The time for a front that has said all to end."""


class SplitServer(Lifecycle):
    """Runs the engine here, and `eet_lab.serving.front_process` beside it, until one of them ends.

    The front has the listening socket and all requests. Either one sees that the other is gone by the end of their
    channel, however it went: the front then answers with an error and ends, and this raises SetupError.
    """

    service: Service
    place = "in a process"

    def __init__(self, service: Service, listening: socket.socket) -> None:
        super().__init__()
        assert service.generator is not None
        self.service, self._socket, self._generator = service, listening, service.generator
        self._channel: Channel | None = None
        self._front: subprocess.Popen[bytes] | None = None

    async def _serve(self) -> None:
        self._channel, self._front = _started(self._socket)
        self._generator.receive = self._tell
        self._generator.start()
        self._channel.send(Hello(self.service.card, self.service.options))
        reading = asyncio.create_task(self._read(self._channel))
        ready = asyncio.wrap_future(self._generator.ready)
        try:
            await asyncio.wait({reading, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                self._channel.send(ToFront(order="start"))
            await reading
        finally:
            reading.cancel()
            ready.cancel()
        code = await asyncio.to_thread(ended, self._front)
        if code or not self._is_draining:
            raise SetupError(
                f"The server's front (process {self._front.pid}) has ended with {code}, and its requests with it. Its "
                "log is on the standard error of this process. Serve the model again."
            )

    async def _close(self) -> None:
        self._socket.close()
        if self._channel is not None:
            self._channel.close()
        if self._front is not None:
            self._front.terminate()
            await asyncio.to_thread(ended, self._front)
        await asyncio.to_thread(self._generator.close)

    def _drain_up(self) -> None:
        assert self._channel is not None
        self._channel.send(ToFront(order="drain"))

    def _tell(self, news: list[News]) -> None:
        """On the engine's thread: all of a step at once."""
        assert self._channel is not None
        self._channel.send(ToFront(news, self._generator.dead))

    async def _read(self, channel: Channel) -> None:
        async for frame in channel.frames():
            self._do(channel, TO_ENGINE.decode(frame))

    def _do(self, channel: Channel, asked: ToEngine) -> None:
        for job in asked.jobs:
            self._generator.join(JOB.decode(job))
        for answer in asked.leaves:
            self._generator.leave(answer)
        if asked.wants_load:
            channel.send(ToFront(load=self._generator.load(), dead=self._generator.dead))
        if asked.is_up:
            self._set_up()


def _started(listening: socket.socket) -> tuple[Channel, subprocess.Popen[bytes]]:
    """A front, which has this socket alone from now on, and the channel to it."""
    ours, its = socket.socketpair()
    try:
        front = start_front("eet_lab.serving.front_process", (its, listening))
    except SetupError as error:
        ours.close()
        raise SetupError(f"{error} Say front='thread'.") from error
    return Channel(ours), front


def start_front(module: str, sockets: Sequence[socket.socket], *words: str) -> subprocess.Popen[bytes]:
    """A process that runs this module, which has these sockets alone from now on. Errors: SetupError."""
    fds = tuple(each.fileno() for each in sockets)
    # By a command, not by multiprocessing: a fork would copy CUDA's threads' locks, and a spawn would run the script
    # or the notebook again. In a session of its own, for Ctrl+C is for the engine's process, which drains both.
    command = [sys.executable, "-P", "-m", module, *map(str, fds), *words]
    # It imports what this process would, but for what lies where this happens to run.
    paths = [*filter(None, sys.path), str(PACKAGE.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment, start_new_session=True
        )
    except OSError as error:
        raise SetupError(f"The server's front cannot be started: {error}.") from error
    finally:
        for each in sockets:
            each.close()


def ended(front: subprocess.Popen[bytes], patience_s: float = PATIENCE_S) -> int:
    """Its exit status, once it has ended; after the time it is killed."""
    try:
        return front.wait(patience_s)
    except subprocess.TimeoutExpired:
        front.kill()
        return front.wait()
