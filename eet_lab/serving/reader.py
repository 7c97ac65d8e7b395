"""The thread that reads texts with an encoder: what waits together is read together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from eet_lab.engine.encode import EncoderEngine, Run
from eet_lab.engine.tasks import TextTask
from eet_lab.errors import EETError
from eet_lab.models import Model
from eet_lab.parts.passes import Batching, Readable
from eet_lab.serving.errors import ApiError, failed, of_engine
from eet_lab.serving.worker import Worker
from eet_lab.technique import Recipe

BATCHING = Batching()


class Reading(NamedTuple):
    """Texts that one request brings, and who waits for them."""

    texts: Sequence[Readable]
    task: TextTask
    result: asyncio.Future[Tensor]

    @property
    def num_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)


class Reader(Worker):
    """Reads the oldest that waits, together with what follows for the same task, up to a pass of tokens."""

    def __init__(self, model: Model, recipe: Recipe) -> None:
        super().__init__("eet-serving")
        self._model, self._recipe = model, recipe
        self._waiting: deque[Reading] = deque()
        self._batch: Sequence[Reading] = ()
        self.engine: EncoderEngine | None = None

    def join(self, reading: Reading) -> None:
        """Queue it; from any thread."""
        self.command(partial(self._waiting.append, reading))

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting)

    def _build(self) -> None:
        self.engine = EncoderEngine(self._model.encoder, self._recipe.parts)
        self.engine.prepare(self.progress)

    def _turn(self) -> None:
        batch = self._batch = self._taken()
        if not batch:
            return
        if self.dead is not None:
            self._end(batch, self.dead)
            return
        assert self.engine is not None
        try:
            run = self.engine.read([text for reading in batch for text in reading.texts], batch[0].task, BATCHING)
        except EETError as error:
            self._end(batch, of_engine(error, "input"))
        else:
            self._tell_all(batch, run)

    def _taken(self) -> list[Reading]:
        """What is read next; whoever has left is left out."""
        batch, tokens = list[Reading](), 0
        while self._waiting:
            first = self._waiting[0]
            if first.result.done():
                self._waiting.popleft()
                continue
            is_alike = not batch or first.task is batch[0].task
            if not is_alike or (batch and tokens + first.num_tokens > BATCHING.batch_tokens):
                break
            batch.append(self._waiting.popleft())
            tokens += first.num_tokens
        return batch

    def _tell_all(self, batch: Sequence[Reading], run: Run) -> None:
        begin, parts = 0, list[tuple[Reading, Tensor]]()
        for reading in batch:
            end = begin + len(reading.texts)
            parts.append((reading, run.values[begin:end]))  # type: ignore[arg-type]  # served tasks make a row each
            begin = end
        self.tell(partial(_put_all, parts))

    def _fail(self, error: Exception) -> str:
        number = self.failure(error)
        self.rebuild()
        self._end(self._batch, failed(error, number))
        return number

    def _end(self, batch: Sequence[Reading], error: ApiError) -> None:
        self.tell(partial(_end_all, [reading.result for reading in batch], error))

    def _close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def _put_all(parts: Sequence[tuple[Reading, Tensor]]) -> None:
    for reading, values in parts:
        if not reading.result.done():
            reading.result.set_result(values)


def _end_all(results: Sequence[asyncio.Future[Tensor]], error: ApiError) -> None:
    for result in results:
        if not result.done():
            result.set_exception(error)
