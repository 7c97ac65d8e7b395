"""Several prompts: add, remove, paste many at once; each with its count of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import ipywidgets as W

from eet_lab.words import counted

Put = Callable[..., None]

LINE_CHARACTERS = 80
"""About what fits into one line of a prompt's text area."""
MAX_LINES = 3
"""A longer prompt scrolls."""


class PromptsEditor:
    """A row per prompt. It rebuilds its rows only when their number changes, so that typing is never disturbed."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self.rows: list[Row] = []
        self._list = W.VBox().add_class("eet-prompts")
        self.add = W.Button(description="+ Add prompt", tooltip="One more prompt, empty: it starts from BOS")
        self.paste = W.ToggleButton(description="Paste several…", tooltip="Each line becomes a prompt")
        self.pasted = W.Textarea(placeholder="Paste here; each line becomes a prompt", rows=4)
        self.take = W.Button(description="Add these lines")
        self._drawer = W.VBox([self.pasted, self.take], layout={"display": "none"})
        self.sum = W.HTML()
        for button in (self.add, self.paste, self.take):
            button.add_class("eet-quiet")
        self.add.on_click(lambda _: put("add_prompts", [""]))
        self.paste.observe(lambda change: put("open_paste", change.new), "value")
        self.take.on_click(lambda _: put("paste"))
        self.box = W.VBox(
            [
                W.HTML('<div class="eet-section">Prompts <span>one batch, ragged: lengths may differ</span></div>'),
                self._list,
                W.HBox([self.add, self.paste]),
                self._drawer,
                self.sum,
            ]
        ).add_class("eet-panel")

    def open_paste(self, wanted: bool) -> None:
        """Show or hide the place to paste into."""
        self.paste.value = wanted
        self._drawer.layout.display = "" if wanted else "none"

    def pasted_lines(self) -> list[str]:
        """The pasted lines, empty ones left out."""
        return [line for line in self.pasted.value.splitlines() if line.strip()]

    def empty_pasted(self) -> None:
        """Empty the place to paste into, and close it."""
        self.pasted.value = ""
        self.open_paste(False)

    def update(self, prompts: Sequence[str], lengths: Sequence[int] | None, new: int, context: int | None) -> None:
        """Show the prompts, their numbers of tokens, and the longest with the new ones beside the context."""
        if len(prompts) != len(self.rows):
            self.rows = [Row(i, text, self._put) for i, text in enumerate(prompts)]
            self._list.children = [row.box for row in self.rows]
        known: Sequence[int | None] = lengths or [None] * len(prompts)
        for row, text, length in zip(self.rows, prompts, known, strict=True):
            row.update(text, length, new, context)
        self.sum.value = _sum(lengths, new, context) if lengths and context else ""


class Row:
    """One prompt."""

    def __init__(self, index: int, text: str, put: Put) -> None:
        self.text = W.Textarea(value=text, rows=_num_lines(text), placeholder="(empty: starts from BOS)")
        self.text.observe(lambda change: put("prompt", index, change.new), "value")
        self._seen = text
        self.count = W.HTML()
        self.remove = W.Button(description="×", tooltip="Remove this prompt").add_class("eet-remove")
        self.remove.on_click(lambda _: put("remove_prompt", index))
        self.box = W.HBox([self.text, self.count, self.remove]).add_class("eet-prompt")

    def update(self, text: str, length: int | None, new: int, context: int | None) -> None:
        """Write the text only if someone else than the reader has changed it."""
        if text != self._seen and text != self.text.value:
            self.text.value = text
        self._seen = text
        self.text.rows = _num_lines(text)
        over = length is not None and context is not None and length + new > context
        self.count.value = (
            ""
            if length is None
            else f'<div class="eet-count{" eet-over" if over else ""}" title="tokens of this prompt">{length}</div>'
        )


def _num_lines(text: str) -> int:
    """Lines that a text area should show."""
    wrapped = sum(max(ceil(len(line) / LINE_CHARACTERS), 1) for line in text.split("\n"))
    return min(wrapped, MAX_LINES)


def _sum(lengths: Sequence[int], new: int, context: int) -> str:
    longest = max(lengths)
    pads = sum(longest - length for length in lengths)
    share, over = min((longest + max(new, 0)) / context, 1), longest + new > context
    tokens = counted(longest, "token")
    asked = f" Longest {longest} + {new} new = <b>{longest + new}</b> of {context}" if new > 0 else ""
    span = tokens if min(lengths) == longest else f"{min(lengths)} to {tokens}"
    text = f"{counted(len(lengths), 'prompt')}, {span}; as one rectangle {counted(pads, 'pad')}.{asked}"
    return (
        f'<div class="eet-sum{" eet-over" if over else ""}">'
        f'<div class="eet-meter"><i style="width:{share:.1%}"></i></div>{text}{" (too long)" if over else ""}</div>'
    )
