"""A recorded comparison as a race: two lanes on one clock, played by the page alone. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import anywidget
import traitlets as T

from eet_lab.bench import Measurement
from eet_lab.figures.script import compact
from eet_lab.models.transcript import Decode, Transcript

HERE = Path(__file__).parent


class Race(anywidget.AnyWidget):
    """Lanes side by side with pause, scrub and one speed for all. `lanes` is plain data, so a reload shows it again."""

    _esm = compact(HERE / "race.js")
    _css = compact(HERE / "race.css")
    race = T.Dict().tag(sync=True)

    def show(self, title: str, prompts: Sequence[str], lanes: Sequence[dict[str, Any]], begin: bool = True) -> None:
        """Put lanes at the start line, as `lane` makes them; `begin`: they start by themselves."""
        self.race = {"title": title, "prompts": list(prompts), "lanes": list(lanes), "begin": begin}

    def stop(self) -> None:
        """Take the lanes down."""
        self.race = {}


def lane(name: str, color: str, m: Measurement, prompt_lengths: Sequence[int], decode: Decode) -> dict[str, Any]:
    """One run as it went: when each step ended (ms), how many tokens there were, and each row's pieces of text."""
    ends = [round(t, 3) for t in accumulate(m.step_ms)]
    transcripts = [Transcript(decode) for _ in m.tokens]
    pieces = [
        [step, row, transcripts[row].add([token])]
        for step, tokens in enumerate(tokens_by_step(m, prompt_lengths))
        for row, token in tokens
    ]
    last = len(ends) - 1
    pieces += [[last, row, rest] for row, transcript in enumerate(transcripts) if (rest := transcript.finish())]
    return {"name": name, "color": color, "ends_ms": ends, "tokens": list(accumulate(m.step_tokens)), "pieces": pieces}


def tokens_by_step(m: Measurement, prompt_lengths: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Which (row, token) pairs each step gave: rows begin in order of their prompts' lengths, the shortest first."""
    waiting = sorted(range(len(m.tokens)), key=lambda row: prompt_lengths[row])
    given = [0] * len(m.tokens)
    active: list[int] = []
    for count in m.step_tokens:
        active = [row for row in active if given[row] < len(m.tokens[row])]
        while len(active) < count and waiting:
            active.append(waiting.pop(0))
        new = tuple((row, m.tokens[row][given[row]]) for row in sorted(active))
        for row in active:
            given[row] += 1
        yield new
