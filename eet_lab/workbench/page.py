"""The page's widgets: five views, the live charts, and the stage, on which text, figures and races stand.

+- bar: model, device, actions, headline or progress, banner -------------+
+- left -------------------+- right --------------------------------------+
|  techniques              |  live: three strip charts, or a recording's   |
|  inputs                  |  answer: four tiles, tabs                    |
|                          |  stage: streamed text, then the tab's figure |
|                          +- below --------------------------------------+
|                          |  runs                                        |
+--------------------------+----------------------------------------------+
The page for serving stands in place of all below the bar, when the bar's switch asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import ipywidgets as W
import traitlets as T

from eet_lab.figures import theme
from eet_lab.figures.live import chart_script
from eet_lab.figures.outputs import FigureBox
from eet_lab.figures.players import Race
from eet_lab.figures.script import BaseScript, Shared, compact, script
from eet_lab.workbench.live import Charts, Live

SCRIPTS = Path(__file__).parent / "views"

Put = Callable[[dict[str, Any]], None]
"""Takes a command from the page: {"command": name, ...}, as it came, unchecked."""


def _source(name: str) -> str:
    return compact(SCRIPTS / name)


DOM, STYLE = script("Ends", module=_source("dom.js")), _source("page.css")
"""What the scripts of all views are written with, and the style of the page."""
VIEWS = {name: _source(f"{name}.js") for name in ("bar", "techniques", "inputs", "answer", "runs")}
"""The script of each view: what it draws and sends is told at its head."""


class ViewScript(BaseScript):
    """What all views share. It is a class of its own since anywidget keeps one style for each class."""


class View(Shared):
    """Draws `state` with the script of its name over `dom.js`; commands go to `put`.

    All of `state` is text and numbers: no string of it is read as HTML. A page that is reloaded draws from it alone.
    """

    state = T.Dict().tag(sync=True)

    def __init__(self, name: str, put: Put, base: BaseScript) -> None:
        super().__init__(base=base, source=VIEWS[name])
        self.add_class("eet-view").add_class(f"eet-{name}")
        self.on_msg(lambda _, content, __: put(content))

    def show(self, state: Mapping[str, Any]) -> None:
        """Draw this from now on; what is drawn already is not sent again."""
        if state != self.state:
            self.state = dict(state)


class Page:
    """All widgets of a workbench. Only the ui thread calls it; `put` gets the messages that views send."""

    def __init__(self, put: Put) -> None:
        base = ViewScript(source=DOM, _css=STYLE)
        self._views = [View(name, put, base) for name in VIEWS]
        self.bar, self.techniques, self.inputs, self.answer, self.runs = self._views
        charts = chart_script()
        self.live, self.kept, self.figure = Live(charts), Charts(charts), FigureBox()
        self._stages: dict[str, W.DOMWidget] = {"stream": self.live.stream, "figure": self.figure}
        style = W.HTML(theme.stylesheet(), layout={"display": "none"})
        self._stage = W.VBox([*self._stages.values(), style]).add_class("eet-stage")
        left = W.VBox([self.techniques, self.inputs]).add_class("eet-left-column")
        right = W.VBox([self.live.box, self.kept.box, self.answer, self._stage]).add_class("eet-right-column")
        below = W.VBox([self.runs]).add_class("eet-below-column")
        self.box = W.Box([self.bar, left, right, below]).add_class("eet-bench").add_class("eet-page-grid")
        self.stage("empty")

    @cached_property
    def race(self) -> Race:
        """Lanes of recorded runs, made when first asked for: a saved notebook has the script of every widget."""
        race = Race(layout={"display": "none"})
        self._stages["race"] = race
        self._stage.children = [race, *self._stage.children]
        return race

    def stop_race(self) -> None:
        """Take the lanes of a race down, if there are any."""
        if "race" in self._stages:
            self.race.stop()

    def stage(self, name: str) -> None:
        """Show the streamed text ("stream"), the figure, the race, or none of them ("empty")."""
        for each, widget in self._stages.items():
            widget.layout.display = None if each == name else "none"
        (self._stage.add_class if name == "race" else self._stage.remove_class)("eet-for-race")

    def put_serving(self, box: W.DOMWidget) -> None:
        """Add the page for serving, hidden."""
        self.box.children = [*self.box.children, box.add_class("eet-serving-column")]

    def serving(self, on: bool) -> None:
        """Show the page for serving in place of all that is below the bar."""
        (self.box.add_class if on else self.box.remove_class)("eet-serves")

    def larger(self, on: bool) -> None:
        """Larger type, for a projector."""
        (self.box.add_class if on else self.box.remove_class)("eet-large")

    def send_again(self) -> None:
        """Tell a page once more what it may have missed: one that opens asks first, and listens a little later."""
        for view in self._views:
            view.send_state("state")
        for widget in (*self._stages.values(), self.live.box, self.kept.box):
            widget.layout.send_state("display")
        self._stage.send_state("_dom_classes")
