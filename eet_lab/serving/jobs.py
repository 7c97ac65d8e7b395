"""What a front and an engine tell each other, and what a front knows of a model. Nothing here needs torch."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from eet_lab.engine.settings import Settings, check_vocabulary
from eet_lab.models.tokenizer import Tokenizer, decoded, encoded
from eet_lab.serving.errors import ApiError


class Job(NamedTuple):
    """What an engine is asked for, and who is told of it."""

    prompt: Sequence[int]
    settings: Settings
    number: int  # among those of one seed
    answer: Any  # an Answer, or its number in another process
    deadline: float  # by time.perf_counter(), which all processes of a machine share


class Load(NamedTuple):
    """What the engine has at hand."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of the KV cache that holds tokens
    preempted: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0


@dataclass(frozen=True)
class Card:
    """What a front knows of a model: its name, how it reads and writes text, and which requests fit."""

    name: str
    recipe: str
    columns: int
    """The most tokens of a prompt and its answer."""
    ends: tuple[int, ...]
    """The tokens that end a text."""
    vocab_size: int
    is_encoder: bool
    tokenizer: Tokenizer | None
    folder: Path | None
    """Where its chat template is."""

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a text; a list of ids as it is. Errors: PromptError, also for other ids; ModelError."""
        ids = encoded(self.tokenizer, prompt, self.name)
        check_vocabulary("A prompt", ids, self.vocab_size)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special ones."""
        return decoded(self.tokenizer, ids, special=False)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of UTF-8 for which a token stands, which may be half a character."""
        return str(token).encode() if self.tokenizer is None else self.tokenizer.bytes_of(token)

    def why_not_sent(self) -> str:
        """Why no other process can be the front of this model; "" where one can."""
        if self.is_encoder:
            return f"{self.name} is an encoder, whose vectors its own process writes."
        if self.tokenizer is not None and self.tokenizer.written() is None:
            return f"the tokenizer of {self.name} is none of `tokenizers`, whose JSON another process reads."
        return ""


class EngineClient(Protocol):
    """The engine as a front sees it: a thread of its process (`Worker`), or a process of its own (`RemoteEngine`)."""

    ready: Future[None]
    """Done once there is an engine; fails where none could be built."""
    dead: ApiError | None
    """Why nothing can be served any more."""

    def start(self) -> None:
        """Build the engine, or see to it."""

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell what comes on this loop."""

    def close(self) -> None:
        """End after the present turn, and wait for it."""


class GeneratingClient(EngineClient, Protocol):
    """The same of an engine that generates."""

    def join(self, job: Job) -> None:
        """Queue it."""

    def leave(self, answer: Hashable) -> None:
        """End it before the next step, if it is there."""

    def load(self) -> Load:
        """The load as it was told last."""

    async def refresh(self) -> None:
        """Ask for the load."""
