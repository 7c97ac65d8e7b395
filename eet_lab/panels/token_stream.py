"""Streamed text, one pane a prompt: the page gets only what is new, and a snapshot once a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets as T

HERE = Path(__file__).parent
MAX_UNDECIDED = 8
"""Tokens held back at most, while their bytes are not a whole character yet."""

Decode = Callable[[Sequence[int]], str]


class Transcript:
    """Token ids in, text out, a piece at a time; a character that spans tokens waits for its last one."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._undecided: list[int] = []

    def add(self, ids: Iterable[int]) -> str:
        """The text that is now certain."""
        self._undecided += ids
        text = self._decode(self._undecided)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._undecided) < MAX_UNDECIDED:
            return ""
        self._undecided = []
        return text


class TokenStream(anywidget.AnyWidget):
    """Panes of streamed text. Text is set as text, never as HTML, so a model cannot write markup into the page."""

    _esm = (HERE / "token_stream.js").read_text(encoding="utf-8")
    _css = (HERE / "token_stream.css").read_text(encoding="utf-8")
    snapshot = T.Unicode("{}").tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.prompts: list[str] = []
        self.texts: list[str] = []
        self.counts: list[int] = []
        self._transcripts: list[Transcript] = []
        self._fresh = False

    def begin(self, prompts: Sequence[str], decode: Decode) -> None:
        """Empty panes for these prompts."""
        self.prompts, self.texts = list(prompts), [""] * len(prompts)
        self.counts = [0] * len(prompts)
        self._transcripts = [Transcript(decode) for _ in prompts]
        self._fresh = True
        self.snapshot_now()
        self.send({"kind": "begin", "prompts": self.prompts})

    def push(self, tokens: Iterable[tuple[int, int]]) -> None:
        """More (row, token id) pairs, in order."""
        by_row: dict[int, list[int]] = {}
        for row, token in tokens:
            by_row.setdefault(row, []).append(token)
        news = []
        for row, ids in by_row.items():
            text = self._transcripts[row].add(ids)
            self.texts[row] += text
            self.counts[row] += len(ids)
            news.append([row, text, self.counts[row]])
        if news:
            self._fresh = True
            self.send({"kind": "append", "news": news})

    def snapshot_now(self) -> None:
        """Bring the snapshot up to date, if anything is new."""
        if self._fresh:
            self._fresh = False
            self.snapshot = json.dumps({"prompts": self.prompts, "texts": self.texts, "counts": self.counts})
