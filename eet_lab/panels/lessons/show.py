"""Showing things in a lesson: figures, tables and the sentence that says what to look at."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from IPython.display import HTML, Code, display

from eet_lab.panels import theme
from eet_lab.panels.lessons.prediction import Prediction
from eet_lab.panels.outputs import CONFIG
from eet_lab.technique import Technique, known


class Shown:
    """Figures, texts and whatever else a notebook can display, one under the other.

    Figures are static and go out as their bare JSON: what they show stays in a saved notebook when the kernel is gone,
    and plotly.js, which JupyterLab and Voila have already, is not embedded.
    """

    def __init__(self, *things: Any) -> None:
        self.things = things

    def _ipython_display_(self) -> None:
        for thing in self.things:
            if isinstance(thing, go.Figure):
                thing.show(renderer=_light_renderer(), config=CONFIG)
            else:
                display(caption(thing) if isinstance(thing, str) else thing)


def _light_renderer() -> str:
    """Plotly's own choice for this front end, less the part that embeds plotly.js (4 MB) in the notebook."""
    names = [name for name in pio.renderers.default.split("+") if not name.startswith("notebook")]
    return "+".join(names) or "plotly_mimetype"


def caption(text: str) -> HTML:
    """A sentence under a figure."""
    return HTML(f'{_stylesheet()}<div class="eet-caption">{escape(text)}</div>')


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> HTML:
    """A small table; the first column is text, numbers stand on the right. All of it is escaped."""
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return HTML(f'{_stylesheet()}<table class="eet-table"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>')


@cache
def _stylesheet() -> str:
    return f"<style>{Path(__file__).with_name('lessons.css').read_text(encoding='utf-8')}</style>"


def after(guess: Prediction, show: Callable[[], Shown]) -> Shown:
    """What `show` gives, once the reader has made a prediction; until then a reminder."""
    if guess.value is not None:
        return show()
    return Shown(HTML(theme.stylesheet() + theme.note("Predict first (above), then run this cell again.", "warn")))


def source(thing: str | Technique | Callable) -> Code:
    """The source of a technique (by name, class or instance) or of a function, highlighted.

    What was written in a cell works too.
    """
    if isinstance(thing, str):
        thing = known(thing)
    kind: Callable = type(thing) if isinstance(thing, Technique) else thing
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):  # a class from a cell has no file; its methods still know theirs
        text = inspect.getsource(getattr(kind, "apply"))  # noqa: B009  only techniques get here
    return Code(data=text, language="python")
