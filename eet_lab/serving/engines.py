"""The engines of all replicas, as one front sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from eet_lab.serving.errors import ApiError
from eet_lab.serving.front_process import RemoteEngine
from eet_lab.serving.jobs import Job, Load, News
from eet_lab.words import counted

LOST = "The replica is lost, and this request with it. Send it again."
NONE = "No replica is up. Send this again later."
RETRY_S = 5.0
"""When a client shall come again that finds none: a new one loads its weights first."""
LOG = logging.getLogger("eet_lab.serving")


class Engines:
    """Gives each job to the engine that has the fewest, and the one after the other where several do.

    `changed` is called with the number of engines that take jobs, whenever that changes.
    """

    def __init__(self) -> None:
        self.ready: Future[None] = Future()
        self.ready.set_result(None)
        self.changed: Callable[[int], object] = lambda num: None
        self._taking: list[RemoteEngine] = []
        self._all: list[RemoteEngine] = []
        self._past = Load()  # what those counted that are gone

    @property
    def dead(self) -> ApiError | None:
        """Why nothing can be served now."""
        return None if self._alive() else ApiError(503, NONE, code="unavailable", retry_after_s=RETRY_S)

    def start(self) -> None:
        """Nothing: replicas start theirs."""

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing: each engine has its loop."""

    def close(self) -> None:
        """Nothing: the end of this process tells them."""

    def add(self, engine: RemoteEngine) -> None:
        """It takes jobs from now on."""
        self._all.append(engine)
        self._taking.append(engine)
        self.changed(len(self._taking))

    def spare(self, engine: RemoteEngine) -> None:
        """It gets no more jobs, and finishes those that it has."""
        if engine in self._taking:
            self._taking.remove(engine)
            self.changed(len(self._taking))

    def lose(self, engine: RemoteEngine, receive: Callable[[list[News]], None]) -> None:
        """It is gone: what has no token yet goes to others, once, for it may be what ends engines; else it is told."""
        self.spare(engine)
        self._all.remove(engine)
        self._past = _together(self._past, engine.load()._replace(running=0, waiting=0, kv_usage=0.0))
        if self._alive() and (jobs := engine.give_up()):
            LOG.warning("a replica is lost; others are given %s without a token", counted(len(jobs), "request"))
            for job in jobs:
                self._give(job, is_retried=True)
        engine.lose(ApiError(500, LOST, code="replica_lost"), receive)

    def join(self, job: Job) -> None:
        """Queue it. Errors: ApiError where there is no engine; those of `RemoteEngine.join`."""
        if (why := self.dead) is not None:
            raise why
        self._give(job)

    def _give(self, job: Job, is_retried: bool = False) -> None:
        engine = min(self._alive(), key=lambda each: each.num_inside)
        engine.join(job, is_retried)
        self._taking.remove(engine)  # the next one of those that have as few goes to another
        self._taking.append(engine)

    def leave(self, answer: Hashable) -> None:
        """End it before the next step, if it is there."""
        for engine in self._all:
            engine.leave(answer)

    def load(self) -> Load:
        """That of all together, as it was told last; of the KV caches' use the mean. No count ever falls."""
        sums = _together(self._past, *(engine.load() for engine in self._all))
        return sums._replace(kv_usage=sums.kv_usage / max(len(self._all), 1))

    async def refresh(self) -> None:
        """Ask all for their load."""
        await asyncio.gather(*(engine.refresh() for engine in self._all))

    def _alive(self) -> list[RemoteEngine]:
        return [engine for engine in self._taking if engine.dead is None]


def _together(*loads: Load) -> Load:
    return Load(*map(sum, zip(*loads, strict=True)))
