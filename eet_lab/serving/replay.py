"""A generated text that is kept in the response cache, and said again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from eet_lab.serving.answer import Reason
from eet_lab.serving.generating import Generating, Piece
from eet_lab.serving.response_cache import ResponseCache


class Finished(NamedTuple):
    """A choice that is complete."""

    number: int
    finish: Reason | None


class Recorded(NamedTuple):
    """All that a request was told: pieces that came together, and how many tokens all choices had by then."""

    steps: list[tuple[list[Piece], int]]
    choices: list[Finished]
    prompt_tokens: int


class Replay:
    """What `Generating` is for its form and its stream, without an engine. A stream has the events that it had."""

    is_abandoned = False

    def __init__(self, recorded: Recorded, deadline: float) -> None:
        self._steps, self.choices, self.prompt_tokens = recorded
        self._deadline = deadline
        self.completion_tokens = 0

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What all choices say."""
        for pieces, num_tokens in self._steps:
            self.completion_tokens = num_tokens
            yield pieces

    def close(self) -> None:
        """Nothing is held."""

    @property
    def left_s(self) -> float:
        """Seconds until the answer must be complete."""
        return self._deadline - time.perf_counter()


async def recorded(generating: Generating, cache: ResponseCache, key: bytes | None) -> AsyncIterator[list[Piece]]:
    """The pieces of a request, which are kept under its key once all choices have come to their own ends."""
    steps = []
    async for pieces in generating.pieces():
        if key is not None:
            steps.append((pieces, generating.completion_tokens))
        yield pieces
    choices = [Finished(choice.number, choice.finish) for choice in generating.choices]
    if all(choice.finish in ("stop", "length") for choice in choices):
        cache.put(key, Recorded(steps, choices, generating.prompt_tokens))
