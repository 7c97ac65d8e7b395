"""Showing things in a lesson: figures, tables and the sentence that says what to look at."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import ipywidgets as W
import plotly.graph_objects as go
import plotly.io as pio
import torch
from IPython.display import HTML, Code, display

from eet_lab.errors import PlanError, did_you_mean
from eet_lab.panels import theme
from eet_lab.panels.lessons.prediction import Prediction
from eet_lab.panels.outputs import CONFIG, rendered
from eet_lab.technique import Technique, known

T = TypeVar("T")


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
                _show(thing)
            else:
                display(caption(thing) if isinstance(thing, str) else thing)


def _show(fig: go.Figure) -> None:
    """By plotly's own choice for this front end, less the part that embeds plotly.js (4 MB) in the notebook.

    Where only bare JSON is left, the title goes along for pages that cannot draw it.
    """
    names = [name for name in pio.renderers.default.split("+") if not name.startswith("notebook")]
    if names in ([], ["plotly_mimetype"]):
        display(rendered(fig)["data"], raw=True)
    else:
        fig.show(renderer="+".join(names), config=CONFIG)


def caption(text: str) -> HTML:
    """A sentence under a figure."""
    return HTML(f'{stylesheet()}<div class="eet-caption">{escape(text)}</div>')


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> HTML:
    """A small table; columns of numbers stand on the right. All of it is escaped."""
    sides = ["number" if all(map(_is_number, column)) else "words" for column in zip(*rows, strict=True)]

    def line(tag: str, row: Sequence[str]) -> str:
        cells = zip(sides, row, strict=True)
        return "".join(f'<{tag} class="eet-{side}">{escape(cell)}</{tag}>' for side, cell in cells)

    cells = line("th", head)
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return HTML(f'{stylesheet()}<table class="eet-table"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>')


@cache
def stylesheet() -> str:
    """What only lessons need, as a <style> element."""
    return f"<style>{Path(__file__).with_name('lessons.css').read_text(encoding='utf-8')}</style>"


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "0123456789+-−"


def after(guess: Prediction, show: Callable[[], Shown]) -> Shown:
    """What `show` gives, once the reader has made a prediction; until then a reminder in its place."""
    if guess.value is not None:
        return show()
    place, num_threads = W.Output(), torch.get_num_threads()
    place.outputs = (rendered(HTML(theme.stylesheet() + theme.note("Predict first (above), then look here.", "warn"))),)

    def fill() -> None:
        torch.set_num_threads(num_threads)  # each thread has a setting of its own
        things = (caption(thing) if isinstance(thing, str) else thing for thing in show().things)
        place.outputs = tuple(map(rendered, things))

    guess.then(fill)
    return Shown(place)


def chosen(what: str, name: str, choices: Mapping[str, T]) -> T:
    """The choice of that name; PlanError, which lists what there is, for another one."""
    if name not in choices:
        raise PlanError(
            f"There is no {what} {name!r}.{did_you_mean(str(name), choices)} Choose one of: "
            f"{', '.join(map(repr, choices))}."
        )
    return choices[name]


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
    return Source(data=textwrap.dedent(text), language="python")


class Source(Code):
    """Highlighted source whose long lines break between words; JupyterLab's own rule breaks them anywhere."""

    def _repr_html_(self) -> str:
        return f'{stylesheet()}<div class="eet-source">{super()._repr_html_()}</div>'
