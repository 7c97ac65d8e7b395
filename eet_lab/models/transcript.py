"""Token ids in, text out, while they come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

MAX_PENDING = 3
"""A character of UTF-8 has four bytes at most, and a token one at least: so many tokens may wait for the last one."""

BROKEN = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


def ended_by(stop: Collection[int], decode: Decode) -> Decode:
    """`decode` for rows that end at one of `stop`: it ends a text, and is no part of it."""
    return (lambda ids: decode([token for token in ids if token not in stop])) if stop else decode


class Transcript:
    """Text a piece at a time: a character that spans tokens waits for its last one, and only that one waits.

    A piece is read together with the one before it: some tokenizers drop the space in front of a text's first word.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._pending: list[int] = []
        self._before: list[int] = []
        self._before_length = 0

    def add(self, ids: Iterable[int]) -> str:
        """The text that is now certain. Bytes that cannot become a character any more are shown as broken."""
        self._pending += ids
        most, least = len(self._pending), max(len(self._pending) - MAX_PENDING, 0)
        for end in range(most, least, -1):
            alone = self._decode(self._pending[:end])
            if not alone.endswith(BROKEN):
                return self._take(end, alone)
        return self._take(least)

    def finish(self) -> str:
        """The text of what still waits: nothing more comes."""
        return self._take(len(self._pending))

    def _take(self, num_tokens: int, alone: str = "") -> str:
        """The text of so many tokens; `alone`: what they are without those before, where that ends well."""
        taken, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        if not taken:
            return ""
        is_begun = bool(self._before) or not alone
        text = self._decode(self._before + taken)[self._before_length :] if is_begun else alone
        # Half a character that was given up would be whole again with what follows.
        self._before, self._before_length = (taken, len(alone)) if alone else ([], 0)
        return text
