"""Whom load is put on: an OpenAI-compatible URL, and what a request for it looks like."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np

from eet_lab.errors import SetupError
from eet_lab.scheduling.traffic import FIRST_TOKEN
from eet_lab.scheduling.whole import check_choice, check_whole
from eet_lab.words import told

PATHS = {"completions": "completions", "chat": "chat/completions", "embeddings": "embeddings"}
VOCABULARY = 1000
"""Ids below are ordinary words in the vocabulary of any model that is served."""
WORDS = (
    "time", "people", "year", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area",
)  # fmt: skip
"""Words of one token each in most vocabularies."""

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Target:
    """A server's URL, with /v1 or without, and how it is asked. Errors: SetupError.

    `endpoint` is "completions" or "chat", whose answers are streamed, or "embeddings". `model` None: the first one
    that the server tells. `as_text`: prompts are words, about one a token, instead of token ids; a chat's always are.
    `ignore_eos` asks for all tokens of an answer, and is vLLM's field, which OpenAI's own API refuses. `vocab_size`:
    prompts are drawn from ids below; None: below `VOCABULARY`, and below what the server tells of the model.
    """

    url: str
    endpoint: str = "completions"
    model: str | None = None
    api_key: str | None = None
    as_text: bool = False
    ignore_eos: bool = True
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_choice(SetupError, "endpoint", self.endpoint, PATHS)
        if self.vocab_size is not None:
            check_whole(SetupError, "vocab_size", self.vocab_size, FIRST_TOKEN + 1, 2**31)
        for name in ("model", "api_key"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value or not value.isprintable()):
                raise SetupError(f"{name} must be a text of one character at least, on one line, or None.")
        self.address  # noqa: B018  a wrong URL is told now

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and whether it is HTTPS; SetupError for what is no URL of a server."""
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
            fine = (
                parts.scheme in ("http", "https")
                and bool(host)
                and not (parts.query or parts.fragment or parts.username)
            )
            fine = fine and self.url.isascii() and self.url.isprintable() and " " not in self.url
        except (ValueError, TypeError, AttributeError):
            fine = False
        if not fine or host is None:
            raise SetupError(f"The URL is {told(self.url)}, but it must be such as http://127.0.0.1:8000.")
        is_safe = parts.scheme == "https"
        return host, port or (443 if is_safe else 80), is_safe

    def models(self) -> bytes:
        """A request for the names of the models that there are."""
        return self._head("GET", "models") + b"\r\n"

    def request(self, model: str, prompt: Prompt, new_tokens: int) -> bytes:
        """A request for so many new tokens, or for a vector."""
        body: dict[str, object] = {"model": model}
        if self.endpoint == "embeddings":
            body |= {"input": prompt, "encoding_format": "base64"}
        else:
            body |= {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {"prompt": prompt}
            body |= {"max_tokens": new_tokens, "temperature": 0, "stream": True}
            body |= {"stream_options": {"include_usage": True}}
            body |= {"ignore_eos": True} if self.ignore_eos else {}
        raw = json.dumps(body, separators=(",", ":")).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw)
        return self._head("POST", PATHS[self.endpoint]) + head + raw

    def prompts(self, lengths: np.ndarray, seed: int, told: int | None = None) -> Iterator[Prompt]:
        """A random prompt of each length, in their order; the same for the same seed. The server has `told` ids."""
        most = self.vocab_size or max(min(VOCABULARY, told or VOCABULARY), FIRST_TOKEN + 1)
        draw = np.random.default_rng([seed, len("prompts")])  # a stream beside those of the traffic
        for length in lengths.tolist():
            if self.as_text or self.is_chat:
                yield " ".join(WORDS[at] for at in draw.integers(0, len(WORDS), length).tolist())
            else:
                yield draw.integers(FIRST_TOKEN, most, length).tolist()

    @property
    def draws_below_told(self) -> bool:
        """Whether prompts depend on the vocabulary that the server tells."""
        return self.vocab_size is None and not (self.as_text or self.is_chat)

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages."""
        return self.endpoint == "chat"

    def _head(self, method: str, path: str) -> bytes:
        parts = urlsplit(self.url)
        base = parts.path.rstrip("/").removesuffix("/v1")
        key = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return f"{method} {base}/v1/{path} HTTP/1.1\r\nhost: {parts.netloc}\r\n{key}".encode()
