"""Text as it comes, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from eet_lab.models.transcript import Decode, Transcript


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
