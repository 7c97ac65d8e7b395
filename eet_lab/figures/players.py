"""Runs as lanes on one clock, played by the page alone: a recorded comparison as a race, policies on one traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets as T

from eet_lab.bench import Measurement
from eet_lab.bench.measured import tokens_by_step
from eet_lab.figures import theme
from eet_lab.figures.live import packed
from eet_lab.figures.script import compact, script, style
from eet_lab.figures.serving import LINES
from eet_lab.models.transcript import Decode, Transcript
from eet_lab.scheduling.served import Served

HERE = Path(__file__).parent
MOST_PASSES = 6000
"""Passes of a film's lane: it is to load at once, and be saved with a notebook."""
COLORS = {"prompts": theme.SELECTION, "decodes": theme.GAIN, "waste": theme.BASELINE}


class Race(anywidget.AnyWidget):
    """Lanes side by side with pause, scrub and one speed for all. `lanes` is plain data, so a reload shows it again."""

    _esm = script("Make", "Counted", "Ends", "Player", "Race")
    _css = style("Player", "Race")
    race = T.Dict().tag(sync=True)

    def show(self, title: str, prompts: Sequence[str], lanes: Sequence[dict[str, Any]], begin: bool = True) -> None:
        """Put lanes at the start line, as `race_lane` makes them; `begin`: they start by themselves."""
        self.race = {"title": title, "prompts": list(prompts), "lanes": list(lanes), "begin": begin}

    def stop(self) -> None:
        """Take the lanes down."""
        self.race = {}


def race_lane(name: str, color: str, m: Measurement, prompt_lengths: Sequence[int], decode: Decode) -> dict[str, Any]:
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


class ServingFilm(anywidget.AnyWidget):
    """Lanes one above the other on one clock, with pause, scrub and one speed for all; a box is a pass.

    `film` is plain data, so a page that is reloaded shows it again, and it plays when the kernel is gone.
    """

    _esm = script("Words", "Canvas", "Make", "Player", module=compact(HERE / "serving_film.js"))
    _css = style("Player", "ServingFilm")
    film = T.Dict().tag(sync=True)

    def show(self, runs: Mapping[str, Served], title: str = "", begin: bool = True) -> None:
        """Put runs at their start; `begin`: they play by themselves."""
        lanes = [film_lane(name, LINES[at % len(LINES)], served) for at, (name, served) in enumerate(runs.items())]
        self.film = {"title": title, "lanes": lanes, "colors": COLORS, "begin": begin}

    def stop(self) -> None:
        """Take the lanes down."""
        self.film = {}


def film_lane(name: str, color: str, served: Served) -> dict[str, Any]:
    """One run, in milliseconds; each list is packed as float32.

    `passes` are [begin, end, decode tokens, prompt tokens, pads, rows] of each. `came`, `begun` and `ended` are when
    requests were, each in its own order, and `took` is what those took that ended, in the order of `ended`.
    """
    passes = served.passes
    columns = (passes.begin_ms, passes.end_ms, passes.decoded, passes.prompt_tokens, passes.pads, passes.rows)
    order = np.argsort(served.last_ms, kind="stable")
    return {
        "name": name,
        "color": color,
        "passes": packed(np.stack(columns, axis=1)[:MOST_PASSES]),
        "came": packed(served.traffic.arrival_ms),
        "begun": packed(np.sort(served.start_ms)),
        "ended": packed(served.last_ms[order]),
        "took": packed(served.e2e_ms[order]),
        "cut": len(passes) > MOST_PASSES,
    }
