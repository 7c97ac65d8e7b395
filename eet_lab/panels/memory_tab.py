"""The results' tab on memory: where a run's tensors lay, what other planners would have done, and its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets as W

from eet_lab.memory import Plan
from eet_lab.panels import theme
from eet_lab.panels.aside import Answer, Aside
from eet_lab.panels.outputs import rendered
from eet_lab.panels.packing import packing
from eet_lab.panels.run_memory import PASSES, RunMemory
from eet_lab.panels.side_by_side import HEAD, Placed, footprints, lines, side_by_side

Put = Callable[..., None]

QUESTION = "planners"
AS_IT_RAN, AS_AN_ARENA = "as it ran", "as an arena would"
"""The run's own plan, and what one would be where it had none."""


class MemoryTab:
    """Pick a run, a pass and a planner, and see the strip. Only the ui thread calls it.

    Other planners than the run's own are asked beside the page, since some take a while, and never during a run.
    """

    def __init__(self, put: Put, aside: Aside) -> None:
        self._aside, self._setting = aside, False
        self._runs: Mapping[str, RunMemory] = {}
        self._placed: dict[tuple[str, str], list[Placed]] = {}
        self._num_results = 0  # in a question's key: another result's runs and passes have the same names
        self._asked: tuple[int, str, str] | None = None
        self._open = False

        def pick(widget: Any, command: str) -> Any:
            widget.observe(lambda change: None if self._setting else put(command, change.new), "value")
            return widget

        self.run = pick(W.ToggleButtons(options=["selection"]), "memory_run").add_class("eet-pick")
        self.phase = pick(W.ToggleButtons(options=PASSES), "memory_pass").add_class("eet-pick")
        self.planner = pick(W.Dropdown(options=[AS_IT_RAN], tooltip="Whose plan is drawn"), "memory_planner")
        whose = W.HTML('<span class="eet-dim">placed by</span>')
        picks = W.HBox([self.run, self.phase, whose, self.planner]).add_class("eet-buttons")
        self._words, self._facts = W.HTML(), W.HTML()
        self.picture = W.Output().add_class("eet-figure").add_class("eet-packing")
        self.box = W.VBox([self._words, picks, self.picture, self._facts]).add_class("eet-memory")
        self.close()

    def put_up(self, runs: Mapping[str, RunMemory]) -> None:
        """Another result: its runs by name; none of a recording, which keeps no plans."""
        self._runs, self._placed, self._asked = runs, {}, None
        self._num_results += 1
        self._set(self.run, list(runs) or ["selection"], list(runs)[-1] if runs else "selection")
        self._set(self.planner, [self._own], self._own)

    def open(self) -> None:
        """The reader looks here."""
        self._open = True
        self.box.layout.display = "" if self._runs else "none"
        self._show()

    def close(self) -> None:
        """The reader looks elsewhere; a figure that is not looked at is not kept."""
        self._open = False
        self.box.layout.display = "none"
        self.picture.outputs = ()

    def turn(self, busy: bool) -> None:
        """Ask what other planners do, if somebody looks and nothing runs."""
        question = self._num_results, *self._key
        if self._open and self._runs and not busy and self._key not in self._placed and self._asked != question:
            self._asked, lifetimes = question, self._plan().lifetimes
            self._aside.ask(QUESTION, question, lambda: side_by_side(lifetimes))

    def answered(self, answer: Answer) -> None:
        """The planners' plans; late ones, of another result or pass, are dropped."""
        if answer.key != self._asked:
            return
        if answer.error is not None:
            raise answer.error
        _, run, phase = answer.key
        self._placed[run, phase] = answer.value
        self._show()

    def do_memory_run(self, name: str) -> None:
        self._set(self.run, self.run.options, name)
        self._show()

    def do_memory_pass(self, name: str) -> None:
        self._set(self.phase, self.phase.options, name)
        self._show()

    def do_memory_planner(self, name: str) -> None:
        self._set(self.planner, self.planner.options, name)
        self._show()

    @property
    def _key(self) -> tuple[str, str]:
        return self.run.value, self.phase.value

    @property
    def _own(self) -> str:
        run = self._runs.get(self.run.value)
        return AS_IT_RAN if run is None or run.planned else AS_AN_ARENA

    def _plan(self) -> Plan:
        """What is drawn: the run's own plan, or another planner's of the same lifetimes."""
        own = self._runs[self.run.value].plan(self.phase.value)
        others = {each.name: each.plan for each in self._placed.get(self._key, ()) if each.plan}
        return others.get(self.planner.value, own)

    def _show(self) -> None:
        if not (self._open and self._runs):
            return
        run, placed = self._runs[self.run.value], self._placed.get(self._key)
        names = [self._own, *(each.name for each in placed or () if each.plan)]
        if placed is not None or self._own not in self.planner.options:
            self._set(self.planner, names, self.planner.value if self.planner.value in names else self._own)
        self._words.value = f'<h3>Where activations live</h3><p class="eet-dim">{escape(run.story)}</p>'
        figures = [packing(self._plan()), *([footprints(placed)] if placed else [])]
        self.picture.outputs = tuple(map(rendered, figures))
        others = theme.table(HEAD, lines(placed)) if placed else '<p class="eet-dim">Asking the other planners…</p>'
        self._facts.value = (
            f"<h3>Planners on the same tensors</h3>{others}"
            f"<h3>KV cache and driver</h3>{theme.table(('', *self._runs), _facts(self._runs))}"
        )

    def _set(self, widget: Any, options: Any, value: Any) -> None:
        """Set without hearing of it: neither is what a reader has clicked."""
        self._setting = True
        if list(widget.options) != list(options):
            widget.options = list(options)
        widget.value = value
        self._setting = False


def _facts(runs: Mapping[str, RunMemory]) -> list[list[str]]:
    """What each run's KV cache was, and how often it asked the driver: a column for each run."""
    columns = [run.facts() for run in runs.values()]
    return [
        [name, *(column.get(name, "–") for column in columns)] for name in dict.fromkeys(k for c in columns for k in c)
    ]
