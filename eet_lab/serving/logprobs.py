"""Log-probabilities beside a text, in OpenAI's two shapes.

They are those of the raw logits, before temperature, top-k and top-p, as vLLM's are.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from eet_lab.scheduling import TokenLogprobs

LEAST = -9999.0
"""What stands for less: JSON has no infinity (vLLM's number)."""


class Alternative(NamedTuple):
    """A token that might stand there, as the bytes of its text."""

    raw: bytes
    logprob: float


class Scored(NamedTuple):
    """A token of a text, and the likeliest in its place; `offset` is the character at which its text begins."""

    raw: bytes
    logprob: float
    top: tuple[Alternative, ...]
    offset: int


class Scores:
    """The tokens of one text as they come. `bytes_of` tells the bytes of a token."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of, self._offset = bytes_of, 0
        self._characters = getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[int], told: Sequence[TokenLogprobs]) -> tuple[Scored, ...]:
        """The next tokens, with what was told of each. A character counts with the token that completes it."""
        found = []
        for token, (logprob, top) in zip(tokens, told, strict=True):
            raw, begin = self._bytes_of(token), self._offset
            self._offset += len(self._characters.decode(raw))
            likeliest = tuple(Alternative(self._bytes_of(other), max(value, LEAST)) for other, value in top)
            found.append(Scored(raw, max(logprob, LEAST), likeliest, begin))
        return tuple(found)


def of_completion(scored: Sequence[Scored]) -> dict[str, Any]:
    """The four lists of /v1/completions, of the same length. The chosen token is always among the likeliest."""
    return {
        "tokens": [_shown(each.raw) for each in scored],
        "token_logprobs": [each.logprob for each in scored],
        "top_logprobs": [_likeliest(each) for each in scored],
        "text_offset": [each.offset for each in scored],
    }


def of_chat(scored: Sequence[Scored]) -> dict[str, Any]:
    """The objects of /v1/chat/completions, one for each token."""
    content = [{**_told(each), "top_logprobs": [_told(other) for other in each.top]} for each in scored]
    return {"content": content, "refusal": None}


def _likeliest(scored: Scored) -> dict[str, float]:
    # The first of two tokens that look alike is the likelier one.
    found = {_shown(other.raw): other.logprob for other in reversed(scored.top)}
    return {**dict(reversed(found.items())), _shown(scored.raw): scored.logprob}


def _told(each: Scored | Alternative) -> dict[str, Any]:
    return {"token": each.raw.decode(errors="replace"), "logprob": each.logprob, "bytes": [*each.raw]}


def _shown(raw: bytes) -> str:
    """The text of a token; OpenAI writes half a character as its bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
