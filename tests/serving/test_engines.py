"""The engines of replicas as one front sees them: who gets which job, and what becomes of it. In one process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps

import pytest

import eet_lab
from eet_lab.serving.engines import Engines
from eet_lab.serving.errors import ApiError
from eet_lab.serving.front_process import RemoteEngine
from eet_lab.serving.jobs import Job, Load, News
from eet_lab.serving.wire import JOB, TO_ENGINE, Channel, ToFront


class Replica:
    """A replica whose engine does nothing: what a front has of it, and what reaches it."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self._channel, self._theirs = map(Channel, socket.socketpair())
        self.engine = RemoteEngine(self._channel, ahead_s)
        self.engine.serve(asyncio.get_running_loop())

    async def deadlines(self) -> list[float]:
        """Those of the jobs in the next frame."""
        frame = TO_ENGINE.decode(await asyncio.wait_for(anext(self._theirs.frames()), 10))
        return [JOB.decode(raw).deadline for raw in frame.jobs]

    def close(self) -> None:
        self._channel.close()
        self._theirs.close()


@asynccontextmanager
async def replicas(*ahead_s: float) -> AsyncIterator[list[Replica]]:
    made = [*map(Replica, ahead_s)]
    yield made
    for each in made:
        each.close()


def on_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    return wraps(test)(lambda: asyncio.run(test()))


def job(name: str, deadline: float = 2.5) -> Job:
    return Job([1], eet_lab.Settings(4), 0, name, deadline)


def codes(news: list[News]) -> list[tuple[str, str]]:
    return [(each.answer, each.error.code) for each in news]


@on_a_loop
async def test_what_other_fronts_have_inside_counts_and_clocks_of_machines_differ():
    async with replicas(0.0, 100.0) as (near, far):
        engines, news = Engines(), list[News]()
        with pytest.raises(ApiError, match="No replica is up"):
            engines.join(job("none"))
        for each in (near, far):
            engines.add(each.engine)
        near.engine.take(ToFront(others=3), news.extend)
        for name in "abc":
            engines.join(job(name))
        assert (near.engine.num_inside, far.engine.num_inside) == (3, 3)
        assert await far.deadlines() == [102.5] * 3
        far.engine.take(ToFront([News(0, [1], None, None, 101.0)]), news.extend)
        assert (news[0].answer, news[0].at) == ("a", 1.0)


@on_a_loop
async def test_engines_that_have_as_few_get_jobs_in_turn():
    async with replicas(0.0, 0.0) as both:
        engines = Engines()
        for each in both:
            engines.add(each.engine)
        for name in "abcd":
            engines.join(job(name, ord(name)))
            engines.leave(name)
        assert [await each.deadlines() for each in both] == [[*map(ord, "ac")], [*map(ord, "bd")]]


@on_a_loop
async def test_only_what_has_no_token_yet_goes_from_a_lost_replica_to_another_one_and_only_once():
    async with replicas(0.0, 100.0, 0.0) as (near, far, third):
        engines, news = Engines(), list[News]()
        engines.add(far.engine)
        for name in "abc":
            engines.join(job(name))
        engines.add(near.engine)
        far.engine.take(ToFront([News(0, [1], None, None, 101.0)]), news.extend)
        engines.lose(far.engine, news.extend)
        assert codes(news[1:]) == [("a", "replica_lost")]
        assert await near.deadlines() == [2.5] * 2
        engines.leave("b")
        engines.add(third.engine)
        engines.lose(near.engine, news.extend)
        assert codes(news[2:]) == [("c", "replica_lost")] and third.engine.num_inside == 0


@on_a_loop
async def test_jobs_of_the_last_replica_are_told_that_it_is_lost():
    async with replicas(0.0, 0.0) as (one, spared):
        engines, news, told = Engines(), list[News](), list[int]()
        engines.changed = told.append
        for each in (one, spared):
            engines.add(each.engine)
        engines.spare(spared.engine)
        engines.join(job("a"))
        engines.lose(one.engine, news.extend)
        assert codes(news) == [("a", "replica_lost")] and engines.dead is not None
        engines.lose(spared.engine, news.extend)
        assert told == [1, 2, 1, 0], "once for each change"


@on_a_loop
async def test_no_count_falls_when_a_replica_is_lost():
    """Prometheus takes a counter that falls for one that began anew."""
    async with replicas(0.0, 0.0) as (one, other):
        engines = Engines()
        assert engines.load() == Load()
        for each, load in ((one, Load(1, 2, 0.5, 5, 60, 7)), (other, Load(3, 4, 0.1, 1, 20, 1))):
            engines.add(each.engine)
            each.engine.take(ToFront(load=load), lambda news: None)
        assert engines.load() == Load(4, 6, 0.3, 6, 80, 8)
        for each, left in ((one, Load(3, 4, 0.1, 6, 80, 8)), (other, Load(0, 0, 0.0, 6, 80, 8))):
            engines.lose(each.engine, lambda news: None)
            assert engines.load() == left
