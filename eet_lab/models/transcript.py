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


class StoppedText:
    """A `Transcript` that ends before the first stop string.

    What may be the beginning of one is held back until the next characters tell. `num_tokens` are those that were read:
    what follows the token that completes a stop string is not.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._transcript, self._stops = Transcript(decode), stops
        self._held = ""
        self.is_stopped = False
        self.num_tokens = 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that is now certain."""
        if not self._stops:
            self.num_tokens += len(ids)
            return self._transcript.add(ids) if ids else ""
        text = ""
        for token in ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            text += self._certain(self._transcript.add([token]), is_last=False)
        return text

    def finish(self) -> str:
        """The text of what is held: nothing more comes."""
        return "" if self.is_stopped else self._certain(self._transcript.finish(), is_last=True)

    def _certain(self, more: str, is_last: bool) -> str:
        held = self._held + more
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return held[: min(found)]
        kept = 0 if is_last else self._beginning(held)
        certain = held[: len(held) - kept]
        self._held = held[len(certain) :]
        return certain

    def _beginning(self, text: str) -> int:
        """How many characters at its end may be the beginning of a stop string."""
        longest = min(max((len(stop) for stop in self._stops), default=1) - 1, len(text))
        ends = (length for length in range(longest, 0, -1) if any(s.startswith(text[-length:]) for s in self._stops))
        return next(ends, 0)
