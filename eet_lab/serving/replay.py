"""A generated text that is kept in the response cache, and said again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from eet_lab.serving.answer import Reason
from eet_lab.serving.generating import Generating, Step
from eet_lab.serving.response_cache import ResponseCache


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
    steps, found = list[Step](), asyncio.Queue[Step | Exception | None]()

    async def record() -> None:
        try:
            async for step in generating.steps():
                steps.append(step)
                found.put_nowait(step)
            choices = [Finished(choice.number, choice.finish) for choice in generating.choices]
            if all(choice.finish in ("stop", "length") for choice in choices):
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
