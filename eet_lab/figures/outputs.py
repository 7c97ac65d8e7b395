"""Where figures are put: into a cell's own output, or into a page of widgets from any thread, without a cell.

Both carry a figure's bare JSON, which JupyterLab and Voila draw with the plotly.js that they have: plotly's own
renderers embed it (5 MB) or fetch it from the network.
"""

from __future__ import annotations

import json
import re
from html import escape, unescape
from typing import Any

import anywidget
import ipywidgets as W
import plotly.graph_objects as go
import plotly.io as pio
from IPython.display import HTML, display

from eet_lab.figures.script import all_widgets, script, style

PLOTLY = "application/vnd.plotly.v1+json"
TAG = re.compile("<[^>]*>")
# `responsive` lets plotly.js take the height of what it stands in. Only a FigureBox has one of its own: in a cell's
# output, which is as high as its content, the figure would shrink to nothing.
CONFIG = {
    "responsive": False,
    "displaylogo": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d", "sendChartToCloud"],
    "plotlyServerURL": "",  # and nowhere to send a chart to: nothing leaves this machine
}


class Figure(go.Figure):
    """A plotly figure that is its bare JSON as a cell's output, in the page's own colours."""

    def _ipython_display_(self) -> None:
        show(self)


def show(fig: go.Figure) -> None:
    """Display a figure in the cell that runs, by plotly's own choice for this front end, less what embeds plotly.js.

    Where only bare JSON is left, the title goes along for pages that cannot draw it.
    """
    display(HTML(stylesheet()))
    names = [name for name in pio.renderers.default.split("+") if not name.startswith("notebook")]
    if names in ([], ["plotly_mimetype"]):
        display(rendered(fig)["data"], raw=True)
    else:
        pio.show(fig, renderer="+".join(names), config=CONFIG)


def stylesheet() -> str:
    """What a figure needs of the page it stands in, as a <style> element; each figure of a notebook brings it."""
    return f"<style>{style('Figure')}</style>"


def rendered(thing: Any, **config: Any) -> dict[str, Any]:
    """One output of a cell: a figure as JSON, a text as a paragraph, else what the thing says of itself.

    `config` is plotly.js's, where it is to differ from CONFIG.
    """
    if isinstance(thing, go.Figure):
        drawn = {**json.loads(thing.to_json()), "config": {**CONFIG, **config}}
        data = {PLOTLY: drawn, "text/plain": f"Figure: {_title(thing)}"}
    elif isinstance(thing, str):
        data = {"text/html": f"<p>{escape(thing)}</p>", "text/plain": thing}
    else:
        data = {"text/plain": repr(thing)}
        if hasattr(thing, "_repr_html_"):
            data["text/html"] = thing._repr_html_()
    return {"output_type": "display_data", "data": data, "metadata": {}}


def _title(fig: go.Figure) -> str:
    """A figure's title, or those of its panels, without tags."""
    whole = fig.layout.title.text or ", ".join(note.text for note in fig.layout.annotations if note.text) or "untitled"
    return unescape(TAG.sub("", whole.replace("<br>", " ")))


class FigureBox(W.VBox):
    """A place for figures, and other things, among widgets: whatever becomes of the window, they keep their size.

    Each figure stands in a box of its own height, and has the box's width.
    """

    def __init__(self, **layout: Any) -> None:
        self._keeper, self._places = _Keeper(), list[W.Output]()
        super().__init__([self._keeper], layout=layout)
        self.add_class("eet-figure-box")

    def show(self, *things: Any) -> None:
        """Show these in place of what is there; nothing at all empties the box."""
        while len(self._places) < len(things):
            self._places.append(W.Output())
        for place, thing in zip(self._places, things, strict=False):
            self._put(place, thing)
        for place in self._places[len(things) :]:
            place.outputs = ()
        self.children = [self._keeper, *self._places[: len(things)]]

    @property
    def outputs(self) -> tuple[dict[str, Any], ...]:
        """What is shown, one output for each thing."""
        return tuple(output for place in self._places for output in place.outputs)

    def close(self) -> None:
        for place in self._places:  # while it is empty, it is no child
            for widget in all_widgets(place):
                widget.close()
        super().close()

    def _put(self, place: W.Output, thing: Any) -> None:
        if not isinstance(thing, go.Figure):
            place.remove_class("eet-figure")
            place.layout.height = None
            place.outputs = (rendered(thing),)
            return
        place.add_class("eet-figure")
        place.layout.height = f"calc({thing.layout.height or 450}px * var(--eet-scale, 1))"
        place.outputs = (rendered(thing, responsive=True),)


class _Keeper(anywidget.AnyWidget):
    """Tells plotly.js, which listens to the window alone, that the box it stands in has become wider or narrower."""

    _esm = script("FigureKeeper")
