"""The answer's sheet: four tiles, tabs, and on its stage the text, the figure or the race of the tab that is open."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

import plotly.graph_objects as go

from eet_lab.bench import Comparison, Run
from eet_lab.figures.results import SCALED, plot
from eet_lab.figures.timeline import caption, short_caption, timeline_figure
from eet_lab.workbench.memory import MemoryTab
from eet_lab.workbench.opened import SideBySide
from eet_lab.workbench.page import Page
from eet_lab.workbench.rows import Result
from eet_lab.workbench.views import answer

STAGE_PX = 258
"""The height of a figure: all of it is in view on the stage."""
BELOW_WORDS_PX = 222
"""The height of one with words above it, which take their room from the stage."""
LOG, OWN_WIDTH = "log", "own width"
NOTHING_ELSE: dict[str, Any] = {
    "note": None, "tabs": [], "picks": [], "tools": {"scale": None, "exports": []}, "tables": [], "words": [],
}  # fmt: skip
"""What the sheet shows beside the text that streams."""
KEPT = "Kept runs have no memory addresses: these are shown for the newest result only."


@dataclass(frozen=True)
class SheetContent:
    """What the answer is about. `pair` stands alone where two kept runs are side by side; `kept`: it was opened.

    `newest`: it is what was measured last, and so what is known of memory is of it.
    """

    result: Result | None = None
    timelines: Any = None
    pair: SideBySide | None = None
    kept: bool = False
    newest: bool = True
    can_race: bool = False
    running: bool = False
    partial: bool = False


class Sheet:
    """Which tab is open, and what it shows. Figures are drawn only when something has changed."""

    def __init__(self, page: Page, memory: MemoryTab) -> None:
        self._page, self._memory = page, memory
        self._wanted = ""
        self._scales: dict[str, bool] = {}  # as the reader asked for them; else as suits each figure
        self._is_log = False
        self._drawn: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None  # what the figures are of, and how

    def open(self, tab: str = "") -> None:
        """Open a tab; "" the first one."""
        self._wanted = tab

    def scale(self, name: str, on: bool) -> None:
        """Switch a scale, LOG or OWN_WIDTH, of the figures that have it."""
        self._scales[name] = on

    def show(self, subject: SheetContent) -> None:
        """Put up the tiles, the tabs and the stage."""
        running = subject.running
        state: dict[str, Any] = {
            "mode": self._mode(subject),
            "tab": self.tab(subject),
            "figure": self._draw(subject),
            "tiles": self._tiles(subject),
        }
        self._page.answer.show(state | (NOTHING_ELSE if running else self._sheet(subject, state["tab"])))

    def _tiles(self, subject: SheetContent) -> list[dict[str, Any]]:
        if subject.pair is not None:
            return subject.pair.tiles()
        if subject.result is None or (subject.running and not subject.partial):
            return []
        return answer.tiles(subject.result)

    def _sheet(self, subject: SheetContent, tab: str) -> dict[str, Any]:
        """What stands around the figure, unless something runs."""
        exports = [*answer.EXPORTS, *([answer.TRACE] if subject.timelines else [])] if subject.result else []
        return {
            "note": _note(subject, tab),
            "tabs": self._tabs(subject),
            "picks": self._memory.picks() if tab == "arena" else [],
            "tools": {"scale": self._scale(subject, tab), "exports": exports},
            "tables": self._tables(subject, tab),
            "words": self._words(subject, tab),
        }

    def _scale(self, subject: SheetContent, tab: str) -> dict[str, Any] | None:
        """The scale that the figure can be switched to."""
        if tab == "timeline" and subject.timelines:
            return {"name": OWN_WIDTH, "on": self._scales.get(OWN_WIDTH, False)}
        return {"name": LOG, "on": self._is_log} if tab in SCALED else None

    def _words(self, subject: SheetContent, tab: str) -> list[dict[str, str]]:
        """What stands above a figure, or on a tab without one."""
        if tab == "arena":
            return [{"text": self._memory.story, "kind": "dim"}]
        return [] if subject.result is None else answer.words(subject.result, tab)

    def tab(self, subject: SheetContent) -> str:
        """The tab that is open: the one that was asked for, if there is such a one."""
        names = [tab["name"] for tab in self._tabs(subject)]
        return self._wanted if self._wanted in names else next((name for name in names if name != "race"), "")

    def _tabs(self, subject: SheetContent) -> list[dict[str, str]]:
        if subject.pair is not None:
            return [{"name": "table", "title": "Side by side"}]
        has_arena = bool(self._memory.runs) and subject.newest
        has_timeline = bool(subject.timelines) or (isinstance(subject.result, Comparison) and not subject.kept)
        race = [{"name": "race", "title": "Race"}] if subject.can_race else []
        return [*race, *answer.tabs(subject.result, has_arena, has_timeline)]

    def _mode(self, subject: SheetContent) -> str:
        if subject.running:
            return "running"
        return "recording" if subject.kept else "empty" if subject.result is None else "result"

    def _draw(self, subject: SheetContent) -> bool:
        """Put the stage in order; whether anything stands on it."""
        tab = self.tab(subject)
        if subject.running or tab == "race":
            self._drawn = None
            self._page.stage("stream" if subject.running else "race")
            return True
        of, how = (subject.result, subject.timelines), (tab, dict(self._scales), *self._arena(tab))
        # Results are large and do not change, so they are compared as objects. Held on to, none can take another's id.
        if self._drawn is None or self._drawn[1] != how or not all(map(is_, of, self._drawn[0])):
            self._drawn = of, how
            self._page.figure.show(*self._figures(subject, tab))
        there = bool(self._page.figure.outputs)
        self._page.stage("figure" if there else "empty")
        return there

    def _arena(self, tab: str) -> tuple[Any, ...]:
        """What the figures of memory follow from."""
        picks = self._memory.picks() if tab == "arena" else []
        return tuple((pick["value"], len(pick["options"])) for pick in picks)

    def _figures(self, subject: SheetContent, tab: str) -> list[go.Figure]:
        result = subject.result
        if tab == "arena":
            return [self._memory.figure(BELOW_WORDS_PX)]
        if tab == "timeline":
            own_width = self._scales.get(OWN_WIDTH, False)
            return [timeline_figure(subject.timelines, STAGE_PX, own_width)] if subject.timelines else []
        if result is None or isinstance(result, Run) or tab in ("", "table", "texts", "planners"):
            return []
        figure = plot(result, tab, log=self._scales.get(LOG))
        assert isinstance(figure, go.Figure)  # one kind is one figure
        self._is_log = "log" in (figure.layout.xaxis.type, figure.layout.yaxis.type)
        return [figure.update_layout(height=BELOW_WORDS_PX if tab == "parity" else STAGE_PX)]

    def _tables(self, subject: SheetContent, tab: str) -> list[dict[str, Any]]:
        if subject.pair is not None:
            return [subject.pair.table()]
        if tab == "planners":
            return self._memory.tables()
        return [answer.table(subject.result)] if subject.result is not None and tab == "table" else []


def _note(subject: SheetContent, tab: str) -> dict[str, Any] | None:
    result = subject.result
    if isinstance(result, Comparison) and tab != "timeline" and (told := answer.grown(result)):
        return {"text": told, "kind": "plain"}
    if tab == "timeline" and subject.timelines:
        return {"text": short_caption(subject.timelines), "tip": caption(subject.timelines), "kind": "plain"}
    if tab != "timeline":
        return {"text": KEPT, "kind": "plain"} if subject.kept and subject.result and not subject.newest else None
    action = {"label": "Record the timeline", "command": "take_timeline"}
    return {"text": "This runs both recipes once more, under a profiler. ", "kind": "plain", "action": action}
