"""Requests that are sent when they are due, whatever has become of those before."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from eet_lab.files import raise_file_limit
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.scheduling.traffic import Traffic
from eet_lab.serving.load.exchange import OUTCOMES, Exchange
from eet_lab.serving.load.http1 import Connection
from eet_lab.serving.load.pool import AskedModel, Pool
from eet_lab.serving.load.target import Prompt, Target
from eet_lab.words import plain

LOOK_S = 0.05
"""How often it looks at Stop and at requests whose time is over."""
REPORT_S = 0.5
"""How often progress is told."""
SOON_S = 0.001
"""What is due within this time is sent now: a timer is no finer."""

clock = time.perf_counter


class Job(NamedTuple):
    """What shall be sent. A request that has no answer `timeout_s` after it was due is lost.

    `prompts` None: they are drawn with `seed`, as long as the traffic says.
    """

    target: Target
    traffic: Traffic
    prompts: Sequence[Prompt] | None
    seed: int
    timeout_s: float
    keep_text: bool

    def requests(self, asked: AskedModel) -> Iterator[bytes]:
        """The bytes of each request, made when they are asked for."""
        drawn = self.target.prompts(self.traffic.lengths, self.seed, asked.vocab_size)
        prompts: Iterable[Prompt] = drawn if self.prompts is None else self.prompts
        for prompt, new_tokens in zip(prompts, self.traffic.new_tokens.tolist(), strict=True):
            yield self.target.request(asked.name, prompt, new_tokens)


class OpenLoop:
    """One run of a job. Each request has a connection of its own while it lasts."""

    def __init__(self, job: Job, progress: Progress | None, cancel: Cancel | None) -> None:
        self._job, self._progress, self._cancel = job, progress, cancel
        self._pool = Pool(job.target)
        self._open = dict[Exchange, Connection | None]()  # None: it is being connected
        self._connecting = set[asyncio.Task[None]]()
        self._counts = Counter[str]()
        self._waiting = deque[tuple[float, Exchange]]()  # with the time by which each must have ended
        self._looked_at = self._reported_at = 0.0

    async def run(self) -> tuple[float, list[Exchange]]:
        """When it began, and what became of each request. Errors: SetupError; Cancelled."""
        raise_file_limit()
        try:
            await self._pool.find()
            begin, exchanges = await self._send_all(await self._pool.model())
            while self._open:
                await asyncio.sleep(LOOK_S)
                self._look()
            return begin, exchanges
        finally:
            for connection in filter(None, self._open.values()):
                connection.close()
            for task in self._connecting:
                task.cancel()
            self._pool.close()

    async def _send_all(self, model: AskedModel) -> tuple[float, list[Exchange]]:
        job, exchanges = self._job, list[Exchange]()
        requests = job.requests(model)
        begin = clock() + SOON_S
        for number, at_ms in enumerate(job.traffic.arrival_ms.tolist()):
            request, due = next(requests), begin + at_ms / 1e3
            while (wait_s := due - clock()) > SOON_S:
                await asyncio.sleep(min(wait_s, LOOK_S))
                self._look()
            exchange = Exchange(number, self._ended, clock, job.keep_text)
            exchanges.append(exchange)
            self._waiting.append((due + job.timeout_s, exchange))
            self._send(exchange, request)
            await asyncio.sleep(0)  # answers are read as they come, also where many requests are due
            self._look()
        return begin, exchanges

    def _send(self, exchange: Exchange, request: bytes) -> None:
        connection = self._pool.idle()
        self._open[exchange] = connection
        if connection is None:
            self._connect(exchange, request)
        else:
            exchange.retry = lambda exchange: self._connect(exchange, request)
            connection.ask(request, exchange)

    def _connect(self, exchange: Exchange, request: bytes) -> None:
        self._open[exchange] = None
        task = asyncio.create_task(self._ask_anew(exchange, request))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _ask_anew(self, exchange: Exchange, request: bytes) -> None:
        try:
            connection = await self._pool.connect()
        except OSError as error:
            exchange.end("lost", f"cannot connect: {error.strerror or type(error).__name__}")
            return
        if exchange.is_over:
            connection.close()
            return
        self._open[exchange] = connection
        connection.ask(request, exchange)

    def _ended(self, exchange: Exchange) -> None:
        connection = self._open.pop(exchange)
        self._counts[exchange.outcome] += 1
        if connection is not None:
            connection.leave(exchange)

    def _look(self) -> None:
        """Now and then: Stop, time that is over, and progress."""
        if (now := clock()) < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        raise_if_cancelled(self._cancel, "The load")
        while self._waiting and (self._waiting[0][1].is_over or self._waiting[0][0] <= now):
            self._waiting.popleft()[1].end("lost", f"no answer within {plain(self._job.timeout_s)} s")
        if self._progress is not None and now >= self._reported_at + REPORT_S:
            self._reported_at = now
            said = [f"{self._counts[name]:,} {name}" for name in OUTCOMES]
            shown = ", ".join([*filter(lambda text: not text.startswith("0 "), said), f"{len(self._open):,} open"])
            self._progress(self._counts.total(), len(self._job.traffic), shown)
