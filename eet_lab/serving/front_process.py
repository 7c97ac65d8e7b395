"""A front's process: `python -m eet_lab.serving.front_process CHANNEL LISTENING`, by file descriptors it inherits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

from eet_lab.serving.errors import ApiError
from eet_lab.serving.front import Front
from eet_lab.serving.remote import RemoteEngine
from eet_lab.serving.server import Server
from eet_lab.serving.wire import HELLO, TO_FRONT, Channel, Hello, ToEngine, ToFront

GONE = "The process with the model has ended, and this request with it. Restart the server."
FAILED = "The server's front has failed, and this request with it. Its log has the reason. Restart the server."


async def serve(channel: Channel, listening: socket.socket) -> None:
    """Serve until the engine's process says so, or is gone: then whoever waits is told.

    Errors: what kept a frame from being taken, which ends all too.
    """
    frames = channel.frames()
    hello: Hello | None = None
    async for frame in frames:
        hello = HELLO.decode(frame)
        break
    if hello is None:
        return
    engine = RemoteEngine(channel)
    server = Server(Front(hello.card, hello.options, engine, engine), listening)
    server.has_process = True

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
    channel, listening = (socket.socket(fileno=int(word)) for word in words)
    with contextlib.suppress(asyncio.CancelledError):  # ended before it was up
        asyncio.run(serve(Channel(channel), listening))


if __name__ == "__main__":
    main(sys.argv[1:])
