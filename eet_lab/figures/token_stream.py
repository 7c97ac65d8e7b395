"""Streamed text, one pane a prompt: the page gets only what is new, and a snapshot once a second."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets as T

from eet_lab.figures.script import compact
from eet_lab.models.transcript import Decode, Transcript

HERE = Path(__file__).parent


class TokenStream(anywidget.AnyWidget):
    """Panes of streamed text. Text is set as text, never as HTML, so a model cannot write markup into the page."""

    _esm = compact(HERE / "token_stream.js")
    _css = compact(HERE / "token_stream.css")
    snapshot = T.Unicode("{}").tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.instead = ""
        self.prompts: list[str] = []
        self.texts: list[str] = []
        self.counts: list[int] = []
        self._transcripts: list[Transcript] = []
        self._fresh = False

    def begin(self, prompts: Sequence[str], decode: Decode, instead: str = "") -> None:
        """Empty panes for these prompts; `instead`: what stands there where there are none."""
        self.instead = instead
        self.prompts, self.texts = list(prompts), [""] * len(prompts)
        self.counts = [0] * len(prompts)
        self._transcripts = [Transcript(decode) for _ in prompts]
        self._fresh = True
        self.snapshot_now()
        self.send({"kind": "begin", "prompts": self.prompts, "instead": instead})

    def push(self, tokens: Iterable[tuple[int, int]]) -> None:
        """More (row, token id) pairs, in order."""
        by_row: dict[int, list[int]] = {}
        for row, token in tokens:
            by_row.setdefault(row, []).append(token)
        for row, ids in by_row.items():
            self.counts[row] += len(ids)
        self._append({row: self._transcripts[row].add(ids) for row, ids in by_row.items()})

    def finish(self) -> None:
        """Nothing more comes: show what still waits for the rest of a character."""
        rest = {row: transcript.finish() for row, transcript in enumerate(self._transcripts)}
        self._append({row: text for row, text in rest.items() if text})

    def _append(self, texts: Mapping[int, str]) -> None:
        for row, text in texts.items():
            self.texts[row] += text
        if texts:
            self._fresh = True
            self.send({"kind": "append", "news": [[row, text, self.counts[row]] for row, text in texts.items()]})

    def snapshot_now(self) -> None:
        """Bring the snapshot up to date, if anything is new."""
        if self._fresh:
            self._fresh = False
            names = ("prompts", "instead", "texts", "counts")
            self.snapshot = json.dumps({name: getattr(self, name) for name in names})
