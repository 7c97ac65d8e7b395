"""A front's process, and the engine in another one as it sees it: `python -m eet_lab.serving.front_process CHANNEL
LISTENING`, by file descriptors that it inherits.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count

import msgspec

from eet_lab.collector import collect_rarely
from eet_lab.serving.errors import ApiError
from eet_lab.serving.front import Front
from eet_lab.serving.jobs import Job, Load, News
from eet_lab.serving.server import Server
from eet_lab.serving.wire import ENCODER, HELLO, TO_FRONT, Channel, ToEngine, ToFront

PATIENCE_S = 1.0
"""The time to wait for the engine's load."""


class RemoteEngine:
    """Sends jobs over a channel, those of one turn of the loop as one frame, and tells what comes back.

    `ahead_s`: by how much the engine's clock is ahead of this process's.
    """

    def __init__(self, channel: Channel, ahead_s: float = 0.0) -> None:
        self.ready: Future[None] = Future()
        self.dead: ApiError | None = None
        self._channel, self._ahead_s, self._others = channel, ahead_s, 0
        self._answers: dict[int, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}
        self._unbegun: dict[int, Job] = {}  # of which nothing has come
        self._count = count()
        self._next = ToEngine()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False
        self._load, self._is_told = Load(), asyncio.Event()

    def start(self) -> None:
        """Nothing: the other process has started its engine."""

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send from this loop."""
        self._loop = loop

    def close(self) -> None:
        """Nothing: the end of this process tells the other one."""

    def join(self, job: Job, is_retried: bool = False) -> None:
        """Queue it. `is_retried`: an engine that had it is lost, and after this one no other takes it.

        Errors: those of msgspec for what no frame can have, after which nothing has changed.
        """
        number = next(self._count)
        sent = job._replace(answer=number, deadline=job.deadline + self._ahead_s)
        written = msgspec.Raw(ENCODER.encode(sent))
        self._answers[number], self._numbers[job.answer] = job.answer, number
        if not is_retried:
            self._unbegun[number] = job
        self._soon().jobs.append(written)

    def leave(self, answer: Hashable) -> None:
        """End it before the next step, if it is there."""
        number = self._numbers.pop(answer, None)
        if number is not None:
            del self._answers[number]
            self._unbegun.pop(number, None)
            self._soon().leaves.append(number)

    @property
    def num_inside(self) -> int:
        """The jobs that it has: those of this front, and of others as it has told."""
        return len(self._answers) + self._others

    def load(self) -> Load:
        """The load as it was told last."""
        return self._load

    async def refresh(self) -> None:
        """Ask for the load; an engine that is busy with something else has told it before."""
        self._is_told.clear()
        self._soon().wants_load = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_told.wait(), PATIENCE_S)

    def send_no_more(self) -> None:
        """Say, behind all jobs until now, that there are no more."""
        self._soon().sends_no_more = True

    def take(self, told: ToFront, receive: Callable[[list[News]], None]) -> None:
        """What a frame says of the engine; `receive` is given what concerns answers that are still waited for."""
        self.dead = told.dead or self.dead
        if told.load is not None:
            self._load = told.load
            self._is_told.set()
        if told.others is not None:
            self._others = told.others
        news = []
        for each in told.news:
            answer = self._answers.get(each.answer)
            if answer is None:
                continue
            self._unbegun.pop(each.answer, None)
            if each.reason is not None or each.error is not None:
                del self._answers[each.answer], self._numbers[answer]
            each.answer = answer
            each.at -= self._ahead_s
            news.append(each)
        if news:
            receive(news)

    def give_up(self) -> list[Job]:
        """Let go of the jobs that another engine may take: nothing has come of them, and they are not retried ones."""
        jobs, self._unbegun = self._unbegun, {}
        for number, job in jobs.items():
            del self._answers[number], self._numbers[job.answer]
        return [*jobs.values()]

    def lose(self, error: ApiError, receive: Callable[[list[News]], None]) -> None:
        """It is gone: whoever waits for it is told."""
        now = time.perf_counter()
        self.take(ToFront([News(number, (), None, error, now) for number in self._answers], error), receive)

    def _soon(self) -> ToEngine:
        """The frame that is sent when the loop has done what it is about."""
        if not self._is_due:
            assert self._loop is not None
            self._is_due = True
            self._loop.call_soon(self._send)
        return self._next

    def _send(self) -> None:
        self._is_due, frame, self._next = False, self._next, ToEngine()
        self._channel.send(frame)


GONE = "The process with the model has ended, and this request with it. Restart the server."
FAILED = "The server's front has failed, and this request with it. Its log has the reason. Restart the server."


async def serve(channel: Channel, listening: socket.socket, has_process: bool = False) -> None:
    """Serve until the engine's process says so, or is gone: then whoever waits is told.

    `has_process`: this one is here for nothing else. Errors: what kept a frame from being taken, which ends all too.
    """
    frames = channel.frames()
    first = await anext(frames, None)
    if first is None:
        return
    hello = HELLO.decode(first)
    engine = RemoteEngine(channel)
    server = Server(Front(hello.card, hello.options, engine, engine), listening)
    server.has_process = has_process

    def take(told: ToFront) -> None:
        engine.take(told, server.service.receive)
        if told.order == "start":
            engine.ready.set_result(None)
            channel.send(ToEngine(is_up=True))
        elif told.order == "drain":
            server.drain()

    def end(message: str) -> None:
        engine.dead = ApiError(503, message, code="dead")
        server.end(engine.dead)
        server.drain()  # where it is not up yet

    async def read() -> None:
        try:
            async for frame in frames:
                take(TO_FRONT.decode(frame))
        except Exception:
            end(FAILED)
            raise
        end(GONE)

    reading = asyncio.create_task(read())
    try:
        await server.run()
    finally:
        reading.cancel()
        [error] = await asyncio.gather(reading, return_exceptions=True)
        if isinstance(error, Exception):  # or it was cancelled, or has come to its end
            raise error


def main(words: list[str]) -> None:
    """Serve on the two sockets."""
    collect_rarely()
    channel, listening = (socket.socket(fileno=int(word)) for word in words)
    with suppress(asyncio.CancelledError):  # ended before it was up
        asyncio.run(serve(Channel(channel), listening, has_process=True))


if __name__ == "__main__":
    main(sys.argv[1:])
