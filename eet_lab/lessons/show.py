"""Showing things in a lesson: figures, tables, source, and the note that says where numbers come from."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, TypeVar

import plotly.graph_objects as go
from IPython.display import HTML, Code, display

from eet_lab.bench import Change, Comparison, Ladder
from eet_lab.bench.measured import device_name
from eet_lab.bench.rows import Row
from eet_lab.errors import PlanError, check_known
from eet_lab.figures.outputs import show
from eet_lab.figures.script import style
from eet_lab.lessons import recorded
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device
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
        for thing in self.outputs():
            show(thing) if isinstance(thing, go.Figure) else display(thing)

    def outputs(self) -> list[Any]:
        """What is displayed, texts as captions."""
        return [_styled("Caption", _text("caption", each)) if isinstance(each, str) else each for each in self.things]


def note(text: str, kind: str = "plain") -> HTML:
    """A paragraph with a coloured edge; `kind` is "plain", "good" or "warn"."""
    return _styled("Say", _text(f"say eet-{kind}", text))


def noted(text: str) -> HTML:
    """A note of where numbers come from."""
    return HTML(_text("where", text))


def _styled(section: str, html: str) -> HTML:
    """HTML behind the section of widgets.css that it needs: JupyterLab may draw any piece alone."""
    return HTML(f"<style>{style(section)}</style>{html}")


def _text(kind: str, text: str) -> str:
    return f'<div class="eet-{kind}">{_marked(text)}</div>'


def _marked(text: str) -> str:
    """Text as HTML; what stands in `backticks` is code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(text))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> HTML:
    """A small table; columns of numbers stand on the right. All of it is escaped."""
    sides = ["number" if all(map(_is_number, column)) else "words" for column in zip(*rows, strict=True)]

    def line(tag: str, row: Sequence[str]) -> str:
        cells = zip(sides, row, strict=True)
        return "".join(f'<{tag} class="eet-{side}">{escape(cell)}</{tag}>' for side, cell in cells)

    cells = line("th", head)
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return _styled("Table", f'<table class="eet-table"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>')


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "0123456789+-−"


def chosen(what: str, name: str, choices: Mapping[str, T]) -> T:
    """The choice of that name; PlanError, which lists what there is, for another one."""
    check_known(PlanError, what, name, choices)
    return choices[name]


@on_its_device
def here(model: Model) -> HTML:
    """Measured on this machine, while the reader looks."""
    if model.device == "cuda":
        return noted(f"Measured now on {device_name('cuda')}.")
    return noted(f"Measured now on the CPU: {device_name('cpu')}.")


def there(used: Sequence[Row] | Ladder | Comparison | str) -> HTML:
    """Measured on another machine: which one, with what, and when, of what it is or in words."""
    return noted(f"Not this machine: {used if isinstance(used, str) else recorded.label(used)}.")


def in_words(result: Comparison, metric: str, name: str) -> str:
    """What the pairs of runs say of a time, `ttft_ms` or another, and whether the output is the same."""
    change = result.all_changes.get(metric)
    said = f"{name}: {change.words(metric)}. " if change else ""
    return f"{said}Same output? {result.parity.verdict}."


def saved_words(change: Change | None, saved: str) -> str:
    """What was saved, unless the pairs of runs cannot tell the two apart: then that."""
    return change.verdict if change and change.verdict == "cannot tell apart" else saved


def source(thing: str | Technique | Callable) -> Source:
    """The source of a technique (by name, class or instance) or of a function, highlighted, its docstring in a fold.

    What was written in a cell works too.
    """
    if isinstance(thing, str):
        thing = known(thing)
    kind: Callable = type(thing) if isinstance(thing, Technique) else thing
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):  # a class from a cell has no file; its methods still know theirs
        text = inspect.getsource(getattr(kind, "apply"))  # noqa: B009  only techniques get here
    return Source(textwrap.dedent(text))


class Source(Code):
    """Highlighted source in two parts: `doc`, the docstring, in a fold above `data`, the code without it.

    Long lines break between words; JupyterLab's own rule breaks them anywhere. Its colours are JupyterLab's, which
    follow the theme: IPython's own style is for a class that no page of JupyterLab or Voila has.
    """

    def __init__(self, text: str) -> None:
        code, self.doc = _parted(text)
        super().__init__(data=code, language="python")

    def _repr_html_(self) -> str:
        fold = ""
        if self.doc:
            first, more = _summed_up(self.doc)
            fold = f"<details><summary>{_marked(first)}</summary><pre>{_marked(more)}</pre></details>"
            fold = fold if more else f'<div class="eet-doc">{_marked(first)}</div>'
        code = super()._repr_html_().rpartition("</style>")[2]
        return _styled("Source", f'<div class="eet-source">{fold}{code}</div>').data

    def _repr_latex_(self) -> None:
        """None: a saved notebook need not carry the code once more."""


def _summed_up(doc: str) -> tuple[str, str]:
    """A docstring's first sentence, which may go on over lines, and the rest; its first line where that is whole."""
    first, _, more = doc.partition("\n")
    if more.strip() and more[0] != "\n" and first[-1] not in ".:;?!":
        paragraph, _, more = doc.partition("\n\n")
        first, *left = re.split(r"(?<=\.) (?=[A-Z`])", " ".join(paragraph.split()), maxsplit=1)
        more = f"{textwrap.fill(''.join(left), 100)}\n\n{more}"
    return first, more.strip()


def _parted(text: str) -> tuple[str, str]:
    """Source without its docstring, and the docstring; nothing is parted where there is none, or nothing else."""
    [top, *_] = ast.parse(text).body
    if not isinstance(top, (ast.FunctionDef, ast.ClassDef)) or (doc := ast.get_docstring(top)) is None:
        return text, ""
    stands, lines = top.body[0], text.splitlines(keepends=True)
    if len(top.body) == 1 or stands.end_lineno is None:
        return text, ""
    rest = lines[stands.end_lineno :]
    while isinstance(top, ast.ClassDef) and rest and not rest[0].strip():
        rest = rest[1:]
    return "".join([*lines[: stands.lineno - 1], *rest]), doc
