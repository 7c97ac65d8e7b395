"""Names of sizes, such as `gpt2-xl/b8/p16-512/n128` or `t1/n4800/c1600`: one form reads, writes and shows them.

A form is text with fields: `b<B rows>/p<low tokens>[-<high tokens>][/packed]{/rms}`. A field has a name, and words that
tell people what it is. Square brackets hold what may be missing, and braces what may be missing and is not shown. In
either, text without a field is a flag, named by that text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

FIELD = re.compile(r"<(\w+)(?: ([^>]+))?>")
PIECE = re.compile(r"\[([^]]+)\]|\{([^}]+)\}|([^[{]+)")

TEXT = "[^/]*"
"""The pattern of a field that is no whole number."""

MOST_DIGITS = 20
"""The digits of a number that are read: one with more is beyond every limit, as are its first digits."""


class Piece(NamedTuple):
    """A part of a form that is in a name as a whole, or not at all."""

    text: str
    is_optional: bool
    is_shown: bool

    @property
    def names(self) -> list[str]:
        """The names of its fields, or the flag's."""
        return [name for name, _ in FIELD.findall(self.text)] or [self.text.strip("/")] * self.is_optional

    def pattern(self, patterns: Mapping[str, str]) -> str:
        """What reads it."""
        found = FIELD.sub(lambda field: f"(?P<{field[1]}>{patterns.get(field[1], r'[0-9]+')})", self.text)
        if not self.is_optional:
            return found
        return f"(?:{found})?" if FIELD.search(self.text) else f"(?P<{self.names[0]}>{found})?"


class Form:
    """Reads and writes the names of a kind; `patterns` are those of the fields that are no whole numbers."""

    def __init__(self, text: str, **patterns: str) -> None:
        self._text, self._patterns = text, patterns
        found = PIECE.findall(text)
        self._pieces = [Piece(shown or hidden or always, not always, not hidden) for shown, hidden, always in found]
        self._reader = re.compile("".join(piece.pattern(patterns) for piece in self._pieces))
        self.words = dict(FIELD.findall(text))

    def plus(self, text: str, **patterns: str) -> Form:
        """The form of names that go on with more."""
        return Form(self._text + text, **self._patterns, **patterns)

    def read(self, text: str) -> dict[str, Any] | None:
        """The value of each field, and whether each flag is there; None for what is missing. None for another form."""
        found = self._reader.fullmatch(text)
        return None if found is None else {name: self._value(name, told) for name, told in found.groupdict().items()}

    def write(self, values: Mapping[str, Any]) -> str:
        """The name of these values; an optional piece is left out where one of its values is None, False or 0."""
        kept = (p.text for p in self._pieces if not p.is_optional or all(values[name] for name in p.names))
        return FIELD.sub(lambda field: _written(values[field[1]]), "".join(kept))

    def __str__(self) -> str:
        """As people read it: `b<rows>/p<tokens>[-<tokens>][/packed]`; a field without words is shown as its pattern."""
        shown = (f"[{each.text}]" if each.is_optional else each.text for each in self._pieces if each.is_shown)
        return FIELD.sub(lambda field: f"<{field[2]}>" if field[2] else self._patterns[field[1]], "".join(shown))

    def label(self, name: str) -> str:
        """What an error calls a field: `b (rows)`."""
        letters = re.search(rf"([\w|]*)<{self.words[name]}>", re.sub(r"[][]", "", str(self)))
        return f"{letters[1].replace('|', ' or ')} ({self.words[name]})" if letters else name

    def _value(self, name: str, told: str | None) -> Any:
        if told is None or name in self._patterns:
            return told
        return int(told[:MOST_DIGITS]) if name in self.words else True


def _written(value: Any) -> str:
    return str(value).removesuffix(".0")
