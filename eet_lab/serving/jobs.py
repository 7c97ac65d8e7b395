"""What a front and an engine tell each other, and what a front knows of a model. Nothing here needs torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from eet_lab.engine.settings import Settings, check_vocabulary
from eet_lab.models.tokenizer import Tokenizer, decoded, encoded
from eet_lab.scheduling import TokenLogprobs
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


Reason = Literal["stop", "length", "abort"]
"""Why nothing more comes: OpenAI's finish reasons, and vLLM's for a client that left."""
COMPLETE: tuple[Reason, ...] = ("stop", "length")
"""Those of an answer that has come to its own end."""


class Phases(NamedTuple):
    """Seconds of a request on its engine until its first token: it waits for a slot, then its prompt is read."""

    queue_s: float
    prefill_s: float


class News(msgspec.Struct, array_like=True, gc=False):
    """New tokens of an answer, and its end where they are the last; `at` is `time.perf_counter()` on the engine.

    There is one for each token of a server: a struct costs a quarter of a tuple with names.
    """

    answer: Any  # an Answer, or its number in another process
    tokens: Sequence[int]
    reason: Reason | None
    error: ApiError | None
    at: float
    logprobs: Sequence[TokenLogprobs] = ()  # of the tokens, if they were asked for
    phases: Phases | None = None  # with the first ones


class Answer:
    """Tokens until they are taken. Answers of one HTTP request share their wake, so that one wait is for all.

    Whoever takes them is woken for the first ones and for the end; `is_followed`: for those between too.
    """

    def __init__(self, wake: asyncio.Event, is_followed: bool) -> None:
        self.wake, self._is_followed = wake, is_followed
        self._new: list[int] = []
        self._new_logprobs: list[TokenLogprobs] = []
        self.first_at: float | None = None
        self.last_at: float | None = None
        """When its first and its newest tokens came."""
        self.phases: Phases | None = None
        self.reason: Reason | None = None
        self.error: ApiError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.reason is not None or self.error is not None

    def put(self, news: News) -> bool:
        """Take what came; whether somebody is still to be woken for it, by `wake`.

        After its end nothing counts: the engine may be a pass ahead of whoever ended it.
        """
        if self.is_over:
            return False
        is_first = self.first_at is None
        self._new += news.tokens
        self._new_logprobs += news.logprobs
        self.reason, self.error = news.reason, news.error
        self.phases = self.phases or news.phases
        if news.tokens:
            self.first_at, self.last_at = self.first_at or news.at, news.at
        if is_first or self.is_over:
            self.wake.set()
            return False
        return self._is_followed

    def end(self, reason: Reason) -> None:
        """Nothing more is wanted of it."""
        if not self.is_over:
            self.reason = reason
            self.wake.set()

    def take(self) -> list[int]:
        """The tokens that came since the last call; raises the error that ended it, once all are taken."""
        if self.error is not None:
            if not self._new:
                raise self.error
            self.wake.set()  # for the error, which is still to be raised
        new, self._new = self._new, []
        return new

    def take_logprobs(self) -> list[TokenLogprobs]:
        """What came beside the tokens that were just taken."""
        new, self._new_logprobs = self._new_logprobs, []
        return new
