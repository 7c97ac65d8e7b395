"""A process that answers clients for all replicas: `python -m eet_lab.serving.replicas_front CONTROL LISTENING LINKS
FRONTS`, three sockets that it inherits, and how many such processes share the port.

So does vLLM: API servers before engines that run on data-parallel ranks (vllm/v1/engine/core_client.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import sys
from contextlib import suppress
from typing import Any

from eet_lab.collector import collect_rarely
from eet_lab.serving.engines import Engines
from eet_lab.serving.errors import ApiError
from eet_lab.serving.front import Front
from eet_lab.serving.front_process import RemoteEngine
from eet_lab.serving.reach import TOKEN_BYTES, ahead_s, as_link, received
from eet_lab.serving.server import Server
from eet_lab.serving.wire import HELLO, TO_FRONT, Channel, Hello, ToEngine

TOKEN_S = 5.0
"""The time for who connects to bring the token."""
RETRY_S = 1.0
"""Seconds to the next try to take who connects."""
DRAIN = b"d"
GONE = "The process that serves replicas has ended, and this request with it. Serve the model again."
LOG = logging.getLogger("eet_lab.serving")


class ReplicasFront:
    """Takes replicas. The first one says which model it is, and with it the server begins."""

    def __init__(self, token: bytes, num_fronts: int) -> None:
        self.engines = Engines()
        self.first: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._token, self._num_fronts = token, num_fronts
        self._front: Front | None = None
        self._is_up = asyncio.Event()
        self._tasks = set[asyncio.Task[None]]()

    def serve(self, hello: Hello, listening: socket.socket) -> Server:
        """A server for clients. Its bounds are those of a replica, by its share in the replicas that there are."""
        self._front = Front(hello.card, hello.options, self.engines, self.engines)
        admission = self._front.admission

        def share(num_replicas: int) -> None:
            admission.share = num_replicas / self._num_fronts

        self.engines.changed = share
        server = Server(self._front, listening)
        server.has_process, server.told_up = True, self._is_up.set
        return server

    async def accept(self, links: socket.socket) -> None:
        """Take replicas until the end."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                end, _ = await loop.sock_accept(links)
            except OSError as error:  # clients may have as many files open as there may be: one will leave
                LOG.error("no replica can connect now", exc_info=error)
                await asyncio.sleep(RETRY_S)
                continue
            task = asyncio.create_task(self._take(end))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take(self, end: socket.socket) -> None:
        try:
            as_link(end)
            async with asyncio.timeout(TOKEN_S):
                brought = await received(end, len(self._token))
        except OSError:  # a timeout is one
            brought = b""
        if not secrets.compare_digest(brought, self._token):
            end.close()
            return
        channel = Channel(end)
        try:
            await self._link(channel)
        except Exception as error:  # such as of a machine that is gone: its replica is lost
            LOG.error("a link to a replica broke", exc_info=error)
        finally:
            channel.close()

    async def _link(self, channel: Channel) -> None:
        frames = channel.frames()
        first = await anext(frames, None)
        if first is None:
            return
        hello = HELLO.decode(first)
        ahead = ahead_s(hello.clock)  # now, for the wait below would count as on the way
        if not self.first.done():
            self.first.set_result(hello)
        await self._is_up.wait()
        assert self._front is not None
        engine = RemoteEngine(channel, ahead)
        engine.serve(asyncio.get_running_loop())
        self.engines.add(engine)
        try:
            channel.send(ToEngine(is_up=True))
            async for frame in frames:
                told = TO_FRONT.decode(frame)
                engine.take(told, self._front.receive)
                if told.order == "leave":
                    self.engines.spare(engine)
                    engine.send_no_more()
        finally:
            self.engines.lose(engine, self._front.receive)


async def serve(control: socket.socket, listening: socket.socket, links: socket.socket, num_fronts: int) -> None:
    """Serve until told to drain, or until whoever started this is gone."""
    for each in (control, links):
        each.setblocking(False)
    token = await received(control, TOKEN_BYTES)
    if len(token) < TOKEN_BYTES:
        return  # whoever started this has ended: an empty token would let everybody in
    front = ReplicasFront(token, num_fronts)
    accepting = asyncio.create_task(front.accept(links))
    ordered = asyncio.create_task(asyncio.get_running_loop().sock_recv(control, 1))
    waited: set[asyncio.Future[Any]] = {front.first, ordered}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not front.first.done():
        return  # ended before there was a replica
    server = front.serve(front.first.result(), listening)

    async def obey() -> None:
        order = await ordered
        while order == DRAIN:
            server.drain()
            order = await asyncio.get_running_loop().sock_recv(control, 1)
        server.end(ApiError(503, GONE, code="dead"))
        server.drain()  # where it is not up yet

    obeying = asyncio.create_task(obey())
    try:
        await server.run()
    finally:
        for task in (obeying, accepting):
            task.cancel()


def main(words: list[str]) -> None:
    """Serve on the three sockets."""
    collect_rarely()
    control, listening, links = (socket.socket(fileno=int(word)) for word in words[:3])
    with suppress(asyncio.CancelledError):  # ended before it was up
        asyncio.run(serve(control, listening, links, int(words[3])))


if __name__ == "__main__":
    main(sys.argv[1:])
