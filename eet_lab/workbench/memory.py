"""The tabs that show what a run did with memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from eet_lab.bench.run_memory import PASSES, RunMemory, fact_rows
from eet_lab.figures import theme
from eet_lab.figures.plans import HEAD, footprints, lines, packing
from eet_lab.memory import Plan
from eet_lab.memory.replays import Placed, side_by_side
from eet_lab.techniques.memory_reuse import PLANNER_WORDS
from eet_lab.workbench.threads import Answer, Background

AS_IT_RAN, AS_AN_ARENA = "as it ran", "as an arena would"
"""The run's own plan, and what one would be where it had none."""
SIDE_BY_SIDE = "What each planner would hold for the tensors of this pass. Pick one of them to see where it puts them."
TITLE_UP_PX = 5
"""How much closer to the edge its title stands than that of another figure: the stage is low."""
TITLE_AND_GAP_PX = 26
"""The plot begins so far below the edge, where the title has one line."""
LEGEND_BESIDE = {"x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top", "font": {"size": 10}, "tracegroupgap": 0}
ALL = "all, side by side"


class MemoryTab:
    """A run, a pass and a planner are picked; figures and tables follow. Only the ui thread calls it.

    Other planners than the run's own are asked in the background, since some take a while, and never during a run.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self.runs: Mapping[str, RunMemory] = {}
        """What each run did with memory; empty for a kept run, which has no plans."""
        self._placed: dict[tuple[str, str], list[Placed]] = {}
        self._num_results = 0  # in a question's key: another result's runs and passes have the same names
        self._asked: tuple[int, str, str] | None = None
        self._run, self._phase, self._planner = "", PASSES[0], ""
        self.open = False

    def put_up(self, runs: Mapping[str, RunMemory]) -> None:
        """Another result: its runs by name."""
        self.runs, self._placed, self._asked = dict(runs), {}, None
        self._num_results += 1
        self._run, self._planner = (list(runs)[-1] if runs else ""), ""

    def pick(self, what: str, name: str) -> None:
        """Another run, pass or planner: `what` is "run", "pass" or "planner"; what there is not is passed over."""
        if what == "run" and name in self.runs:
            self._run, self._planner = name, ""
        elif what == "pass" and name in PASSES:
            self._phase = name
        elif what == "planner":
            self._planner = name

    def turn(self, busy: bool) -> None:
        """Ask what other planners do, if somebody looks and nothing runs."""
        question = self._num_results, *self._key
        if self.open and self.runs and not busy and self._key not in self._placed and self._asked != question:
            self._asked, lifetimes = question, self._plan().lifetimes
            self._background.ask(self.answered, question, lambda: side_by_side(lifetimes))

    def answered(self, answer: Answer) -> None:
        """The planners' plans; late ones, of another result or pass, are dropped."""
        if answer.key != self._asked:
            return
        _, run, phase = answer.key
        self._placed[run, phase] = answer.value or []
        if answer.error is not None:
            raise answer.error

    def picks(self) -> list[dict[str, Any]]:
        """The lists to choose from, for the page."""
        planners = [{"value": name, "label": PLANNER_WORDS.get(name, name)} for name in self._planners()]
        lists: Sequence[tuple[str, str, list[Any], str]] = (
            ("run", "Run", list(self.runs), self._run),
            ("pass", "Pass", list(PASSES), self._phase),
            ("planner", "Placed by", planners, self._chosen()),
        )
        return [
            {"name": name, "label": label, "options": options, "value": value} for name, label, options, value in lists
        ]

    def figure(self, height: int) -> go.Figure:
        """Where the planner that was picked puts the tensors, or what each would hold."""
        if self._chosen() == ALL:
            return footprints(self._named()).update_layout(height=height)
        fig = packing(self._plan())
        top = TITLE_AND_GAP_PX + theme.TITLE_LINE_PX * fig.layout.title.text.count("<br>")
        fig.update_layout(height=height, margin={"t": top, "b": 40}, title_pad_t=fig.layout.title.pad.t - TITLE_UP_PX)
        fig.layout.legend = LEGEND_BESIDE
        if "maxheight" in fig.layout.legend:  # else it is as high as the plot, and has a scrollbar
            fig.layout.legend.maxheight = height - top
        fig.update_yaxes(nticks=4).update_yaxes(nticks=2, title="", row=2, col=1)
        return fig.update_xaxes(title_standoff=4)

    def tables(self) -> list[dict[str, Any]]:
        """Planners side by side, and what each run's KV cache was and how often it asked the driver."""
        placed = self._named()
        notes = [] if self._key in self._placed else ["Asking the other planners…"]
        facts = {"head": ["", *self.runs], "rows": fact_rows(self.runs.values()), "notes": []}
        return [{"head": list(HEAD), "rows": lines(placed), "notes": notes}, facts]

    @property
    def story(self) -> str:
        """What the picture is a picture of."""
        return SIDE_BY_SIDE if self._chosen() == ALL else self.runs[self._run].story

    @property
    def _key(self) -> tuple[str, str]:
        return self._run, self._phase

    def _planners(self) -> list[str]:
        run = self.runs[self._run]
        own = AS_IT_RAN if run.planned else AS_AN_ARENA
        placed = [each.name for each in self._placed.get(self._key, ()) if each.plan]
        return [own, *placed, *([ALL] if placed else [])]

    def _named(self) -> list[Placed]:
        """What other planners would do, as the knob calls them."""
        return [replace(each, name=PLANNER_WORDS.get(each.name, each.name)) for each in self._placed.get(self._key, ())]

    def _chosen(self) -> str:
        names = self._planners()
        return self._planner if self._planner in names else names[0]

    def _plan(self) -> Plan:
        """What is drawn: the run's own plan, or another planner's of the same lifetimes."""
        own = self.runs[self._run].plan(self._phase)
        others = {each.name: each.plan for each in self._placed.get(self._key, ()) if each.plan}
        return others.get(self._planner) or own
