"""Answers that need no model: those of requests that were answered before, or are just being answered.

The idea is TurboTransformers' (Fang et al., PPoPP 2021), whose pipeline looks for a request's answer before it queues
it; its own was never released. A request is the same if its endpoint and all fields that matter are. Only what the
same request gets again is kept: what is greedy or drawn with a seed, embeddings, and classes. Errors are not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple

from eet_lab.serving.bodies import Body
from eet_lab.serving.jobs import COMPLETE, Reason

if TYPE_CHECKING:
    from eet_lab.serving.generating import Generating, Step

ENTRY_BYTES = 256
"""What an entry takes beside its answer: its key, and its places in the table."""
HIT = {"x-cache": "hit"}
"""The header of an answer that was kept."""


class ResponseCache:
    """The answers that were asked for last, in at most `max_bytes`; 0: none. All calls come from the server's loop.

    An answer is made once: whoever asks for it meanwhile waits for the one who makes it, and if that one fails or
    leaves, the next one makes it. Answers are kept as bytes, so that they are counted exactly and give the garbage
    collector nothing to walk.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept = OrderedDict[bytes, bytes]()  # the one that was asked for last is last
        self.making = dict[bytes, asyncio.Future[Any]]()
        """Each gives the answer that somebody makes now; None if that comes to nothing."""
        self.num_bytes = self.hits = self.misses = 0

    def key_of(self, path: str, body: Body) -> bytes | None:
        """What equal requests share; None for one whose answer is not kept."""
        if not self._max_bytes or (identity := body.identity()) is None:
            return None
        return hashlib.sha256(json.dumps([path, identity], sort_keys=True).encode()).digest()

    def get(self, key: bytes) -> Any | None:
        """The answer that was kept for it."""
        if (found := self._kept.get(key)) is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return pickle.loads(found)

    def put(self, key: bytes | None, answer: Any) -> None:
        """Keep it, unless it has no key or is too large, and let go of what was asked for longest ago."""
        if key is None:
            return
        self.done(key, answer)
        kept = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        if len(kept) + ENTRY_BYTES > self._max_bytes:
            return
        self._drop(key)
        self._kept[key] = kept
        self.num_bytes += len(kept) + ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def begin(self, key: bytes) -> None:
        """The caller makes this answer from now on: it will `put` it, or say that it is `done`."""
        self.making[key] = asyncio.get_running_loop().create_future()

    def done(self, key: bytes | None, answer: Any = None) -> None:
        """Whoever made this answer does so no more."""
        if key is not None and (making := self.making.pop(key, None)) is not None:
            making.set_result(answer)

    def _drop(self, key: bytes) -> None:
        if (found := self._kept.pop(key, None)) is not None:
            self.num_bytes -= len(found) + ENTRY_BYTES


class Finished(NamedTuple):
    """A choice that is complete."""

    number: int
    finish: Reason | None


class Recorded(NamedTuple):
    """All that a request was told."""

    steps: list[Step]
    choices: list[Finished]
    prompt_tokens: int


class Replay:
    """What `Generating` is for its form and its stream, without an engine. A stream has the events that it had."""

    is_abandoned = False

    def __init__(self, recorded: Recorded, deadline: float) -> None:
        self._steps, self.choices, self.prompt_tokens = recorded
        self._deadline = deadline

    async def steps(self) -> AsyncIterator[Step]:
        """What all choices say."""
        for step in self._steps:
            yield step

    @property
    def completion_tokens(self) -> int:
        """The tokens of all choices."""
        return self._steps[-1].num_tokens

    def close(self) -> None:
        """Nothing is held."""

    @property
    def left_s(self) -> float:
        """Seconds until the answer must be complete."""
        return self._deadline - time.perf_counter()


async def recorded(generating: Generating, cache: ResponseCache, key: bytes) -> AsyncIterator[Step]:
    """The steps of a request, which are kept under its key once all choices have come to their own ends.

    They are taken as they come: others wait for them, who shall not wait for a client that reads slowly.
    """
    steps: list[Step] = []
    found: asyncio.Queue[Step | Exception | None] = asyncio.Queue()

    async def record() -> None:
        try:
            async for step in generating.steps():
                steps.append(step)
                found.put_nowait(step)
            choices = [Finished(choice.number, choice.finish) for choice in generating.choices]
            if all(choice.finish in COMPLETE for choice in choices):
                cache.put(key, Recorded(steps, choices, generating.prompt_tokens))
            found.put_nowait(None)
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            found.put_nowait(error)
        finally:
            cache.done(key)

    recording = asyncio.create_task(record())  # it ends when the request does, whose choices then have theirs
    while (step := await found.get()) is not None:
        if isinstance(step, Exception):
            raise step
        yield step
    await recording
