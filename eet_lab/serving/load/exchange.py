"""One request under way: when its first token came, when its last, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from eet_lab.words import visible

Outcome = Literal["answered", "refused", "failed", "lost"]
"""Refused: with 429 or 503, as a server does that has no room; failed: with another error; lost: without an answer."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
REFUSALS = (429, 503)
MOST_REASON = 200
MOST_BODY = 64 * 2**20
DATA, DONE = b"data:", b"[DONE]"


class Exchange:
    """Reads an answer as it comes. Times are those of `clock`, in seconds; `ended` is called once.

    A token counts as told when a piece of text comes: a chat's first event has none.
    """

    def __init__(
        self, number: int, ended: Callable[[Exchange], None], clock: Callable[[], float], keep_text: bool = False
    ) -> None:
        self.number, self.outcome, self.reason = number, "lost", ""
        self.sent_at = self.ended_at = clock()
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.num_told = self.prompt_tokens = 0
        self.texts: list[str] = []
        self.retry: Callable[[Exchange], None] | None = None
        """What to do where a connection that was used before turns out to be closed."""
        self._ended, self._clock, self._keep_text = ended, clock, keep_text
        self.is_over = False
        self._status, self._is_stream, self._is_done = 0, False, False
        self._held, self._num_held = list[bytes](), 0
        self._usage: Mapping[str, Any] | None = None

    def headed(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The answer begins."""
        self._status = status
        self._is_stream = status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream")

    def got(self, data: bytes) -> None:
        """Some of the body: whole lines of a stream are read at once."""
        if self.is_over:
            return
        if self._is_stream:
            *lines, rest = (b"".join(self._held) + data).split(b"\n") if self._held else data.split(b"\n")
            self._held, self._num_held = [rest] if rest else [], len(rest)
            for line in lines:
                if line.startswith(DATA):
                    self._event(line[len(DATA) :].strip())
        else:
            self._held.append(data)
            self._num_held += len(data)
        if self._num_held > MOST_BODY:
            self.end("failed", f"more than {MOST_BODY:,} bytes came")

    def completed(self) -> None:
        """The body is complete."""
        if self.is_over:
            return
        if self._is_stream:
            if self._is_done:
                self._answered()
            else:
                self.end("lost", "the stream ended without [DONE]")
        elif self._status == 200:
            self._read_whole()
        else:
            is_refused = self._status in REFUSALS
            self.end("refused" if is_refused else "failed", f"{self._status} {self._error(in_full=not is_refused)}")

    def lost(self, reason: str, was_silent: bool) -> None:
        """The connection ended before."""
        if was_silent and self.retry is not None:
            retry, self.retry = self.retry, None
            retry(self)
        else:
            self.end("lost", reason)

    def end(self, outcome: Outcome, reason: str = "") -> None:
        """Nothing more is wanted; a second call does nothing."""
        if not self.is_over:
            self.is_over, self._held = True, []
            self.outcome, self.reason = outcome, visible(reason)[:MOST_REASON]
            self.ended_at = self._clock()
            self._ended(self)

    def _event(self, data: bytes) -> None:
        """An event of a stream. Most are one more token, and are not parsed: text cannot hold a bare quote."""
        if data == DONE:
            self._is_done = True
            return
        is_plain = self.first_at is not None and b'"error"' not in data
        has_usage = b'"usage":' in data and b'"usage":null' not in data and b'"usage": null' not in data
        if is_plain and not has_usage and not self._keep_text:
            self.last_at = self._clock()
            self.num_told += 1
            return
        try:
            found = json.loads(data)
            choices = found.get("choices") or []
            texts = [_text_of(choice) for choice in choices]
            is_last = bool(choices) and all(choice.get("finish_reason") for choice in choices)
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.end("failed", "an event is no JSON object, or its choices are none")
            return
        if found.get("error"):
            self.end("failed", f"in the stream: {_said(found)}")
            return
        self._usage = found.get("usage") or self._usage
        # transformers serve sends no [DONE]: its last event tells why the answer ended, and the usage.
        self._is_done |= is_last and self._usage is not None
        if text := "".join(texts):
            self.last_at = self._clock()
            self.first_at = self.first_at or self.last_at
            self.num_told += 1
            if self._keep_text:
                self.texts.append(text)

    def _answered(self) -> None:
        """It is complete. Where nothing could be seen of it, its only token came with its end."""
        self.ended_at = self._clock()
        self.first_at = self.first_at or self.ended_at
        self.last_at = self.last_at or self.ended_at
        self.num_told, self.prompt_tokens = _counts(self._usage, self.num_told)
        self.end("answered")

    def _read_whole(self) -> None:
        """Vectors, or a text that was not streamed."""
        try:
            found = json.loads(b"".join(self._held))
            self._usage = found.get("usage")
            is_answer = bool(found.get("data") or found.get("choices"))
        except (ValueError, AttributeError, RecursionError):
            is_answer = False
        if is_answer:
            self._answered()
        else:
            self.end("failed", "the answer is no JSON object with data or choices")

    def _error(self, in_full: bool) -> str:
        try:
            return _said(json.loads(b"".join(self._held)), in_full)
        except (ValueError, RecursionError):
            return "without a reason"


def _text_of(choice: Any) -> str:
    """What a choice of a chunk says."""
    delta = choice.get("delta") or {}
    said = [choice.get("text"), delta.get("content"), delta.get("reasoning_content")]
    return "".join(text for text in said if isinstance(text, str))


def _said(found: Any, in_full: bool = False) -> str:
    """The reason in OpenAI's error object: its code, which is the same for all of a kind, else its message; or both."""
    error = found.get("error", found) if isinstance(found, dict) else found
    if not isinstance(error, dict):
        return str(error)
    words = [str(error[name]) for name in ("code", "message") if error.get(name)]
    return ": ".join(words if in_full else words[:1]) or "without a reason"


def _counts(usage: Mapping[str, Any] | None, num_events: int) -> tuple[int, int]:
    """Tokens of the answer and of the prompt, as the server counted them; without its count, an event is a token."""
    told = usage if isinstance(usage, dict) else {}
    counts = [told.get("completion_tokens"), told.get("prompt_tokens")]
    new, read = (count if isinstance(count, int) and count >= 0 else None for count in counts)
    return num_events if new is None else new, read or 0
