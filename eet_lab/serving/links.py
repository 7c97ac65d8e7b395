"""A replica's ends of its links to fronts: jobs come in, and what each step made goes to whoever asked for it.

The replica connects, so that it listens nowhere. A front takes only who brings its token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial

from eet_lab.errors import SetupError
from eet_lab.serving.generator import Generator
from eet_lab.serving.jobs import News
from eet_lab.serving.reach import Reach, clock, connected
from eet_lab.serving.wire import JOB, TO_ENGINE, Channel, Hello, ToEngine, ToFront

PATIENCE_S = 60.0
"""The time for a front to be up, which imports its modules first."""
LOOK_S = 0.02
"""How often a replica that leaves looks whether all is done."""
LOG = logging.getLogger("eet_lab.serving")


class Link:
    """A link to one front, which knows its jobs by `numbers`."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.numbers, self.told_others = channel, set[int](), 0
        self.sends_no_more = False


class Links:
    """All links of an engine. `error` is what broke one of them, unless its front has ended.

    Jobs are taken on the loop, and news come on the engine's thread: what both touch is one operation each.
    """

    def __init__(self, generator: Generator) -> None:
        self.error: Exception | None = None
        self._generator, self._links = generator, tuple[Link, ...]()
        self._reading = set[asyncio.Task[None]]()
        generator.receive = self._tell

    @property
    def num_inside(self) -> int:
        """The jobs that the engine has, those that wait in it too."""
        return sum(len(link.numbers) for link in self._links)

    async def open(self, reach: Reach, hello: Hello) -> None:
        """Be known to every front that there is. Errors: SetupError where there is none."""
        hello.clock = clock()
        opening = (self._open(address, reach.token, hello) for address in reach.addresses)
        errors = await asyncio.gather(*opening, return_exceptions=True)
        for address, error in zip(reach.addresses, errors, strict=True):
            if error is not None:
                LOG.error("the front at %s:%s gives this replica no jobs", *address, exc_info=error)
        if not self._links:
            raise SetupError(f"No front of the server takes this replica: {errors[0]!r}. Serve the model again.")

    async def leave(self) -> None:
        """Get no more jobs, and wait until those that came are finished."""
        for link in self._links:
            link.channel.send(ToFront(order="leave"))
        while any(link.numbers or not link.sends_no_more for link in self._links):
            await asyncio.sleep(LOOK_S)

    async def _open(self, address: tuple[str, int], token: bytes, hello: Hello) -> None:
        async with asyncio.timeout(PATIENCE_S):
            end = await connected(address)
            channel = Channel(end)
            try:
                await asyncio.get_running_loop().sock_sendall(end, token)
                channel.send(hello)
                frames = channel.frames()
                first = await anext(frames, None)
                if first is None or not TO_ENGINE.decode(first).is_up:
                    raise ConnectionError(f"the front at {address} has ended")
            except BaseException:
                channel.close()
                raise
        link = Link(channel)
        self._links += (link,)
        task = asyncio.create_task(self._read(link, frames))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _read(self, link: Link, frames: AsyncIterator[bytes]) -> None:
        try:
            async for frame in frames:
                self._do(link, TO_ENGINE.decode(frame))
        except Exception as error:  # the replica's health tells it
            LOG.error("a link to a front broke", exc_info=error)
            self.error = error
        finally:
            self._links = tuple(each for each in self._links if each is not link)
            link.channel.close()
            for number in [*link.numbers]:
                self._generator.leave((link, number))
            self._fewer()

    def _do(self, link: Link, asked: ToEngine) -> None:
        for raw in asked.jobs:
            job = JOB.decode(raw)
            link.numbers.add(job.answer)
            self._generator.join(job._replace(answer=(link, job.answer)))
        for number in asked.leaves:
            link.numbers.discard(number)
            self._generator.leave((link, number))
        if asked.leaves:
            self._fewer()
        if asked.wants_load:
            link.channel.send(ToFront(load=self._generator.load(), dead=self._generator.dead))
        link.sends_no_more |= asked.sends_no_more

    def _fewer(self) -> None:
        """Have fronts told that others have fewer inside: an engine that has nothing left would tell no more news."""
        if self._links:
            self._generator.command(partial(self._tell, []))

    def _tell(self, news: list[News]) -> None:
        """On the engine's thread: each front gets one frame of a step's news, or of what others have inside."""
        links, dead = self._links, self._generator.dead
        told: dict[Link, list[News]] = {link: [] for link in links}
        for each in news:
            link, each.answer = each.answer
            if each.reason is not None or each.error is not None:
                link.numbers.discard(each.answer)
            if link in told:
                told[link].append(each)
        inside = sum(len(link.numbers) for link in links)
        for link, its in told.items():
            others = inside - len(link.numbers)
            if its or dead is not None or others != link.told_others:
                link.told_others = others
                link.channel.send(ToFront(its, dead, others=others))
