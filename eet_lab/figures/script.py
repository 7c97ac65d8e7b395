"""Scripts and styles of widgets. A shared one stands once in a page's state, and so in a saved notebook."""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import anywidget
import ipywidgets as W
import traitlets as T

HERE = Path(__file__).parent
BEHIND = re.compile(r"(?<=[;{},()\]])\s+// [^\"'`]*$")
"""A comment behind what a line of a script says. One with a quote may be part of a text, and stays."""


def compact(*paths: Path) -> str:
    """Scripts or styles, one after the other, without indentation and comments.

    They stand in each saved notebook with a widget's state. Styles have no comments, nor lines, nor spaces beside their
    marks.
    """
    return "\n".join(_compact(path.read_text(encoding="utf-8"), path.suffix) for path in paths)


@cache
def style(*sections: str) -> str:
    """Sections of widgets.css as `compact` writes styles: a saved notebook has the rules of its widgets and no more."""
    return _sections(".css", sections)


def script(*sections: str, module: str = "") -> str:
    """Sections of widgets.js with `module` behind them, which else renders the widget of the last section."""
    return f"{_sections('.js', sections)}\n{module or f'export default {{ render: render{sections[-1]} }};'}"


def _sections(kind: str, names: Sequence[str]) -> str:
    _, *parts = re.split(r"/\* (\w+):.*\n", HERE.joinpath(f"widgets{kind}").read_text(encoding="utf-8"))
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    return _compact("".join(found[name] for name in names), kind)


def _compact(text: str, kind: str) -> str:
    if kind == ".css":
        return _small_style(text)
    lines = (BEHIND.sub("", line.strip()) for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def _small_style(text: str) -> str:
    """The same style without comments and needless spaces; one before a colon stays, where a selector may need it."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"\s*([{};>])\s*|(?<=:) +", r"\1", text).replace(";}", "}").strip()


def _gzipped(text: str, widget: W.Widget) -> bytes:
    """The text as a page gets it: a saved notebook has these bytes, which are a third of the script."""
    return gzip.compress(text.encode(), mtime=0)


SCRIPT = {"sync": True, "to_json": _gzipped}


class BaseScript(anywidget.AnyWidget):
    """The script, or the first part of it, of all widgets that name it, and their style.

    It shows nothing, and is closed like them.
    """

    _esm = "export default {};"
    _css = T.Unicode().tag(sync=True)
    source = T.Unicode().tag(**SCRIPT)


class Shared(anywidget.AnyWidget):
    """Drawn by the script of `base` with `source` behind it, as if both were one file.

    All views of a widget share what the script remembers.
    """

    _esm = script("Shared")
    base = T.Instance(BaseScript).tag(sync=True, **W.widget_serialization)
    source = T.Unicode().tag(**SCRIPT)


def all_widgets(widget: W.Widget) -> list[W.Widget]:
    """A widget, everything below it, and what all of these have of their own: scripts, layouts and styles."""
    own = (getattr(widget, name, None) for name in ("base", "layout", "style"))
    below = [*getattr(widget, "children", ()), *(each for each in own if isinstance(each, W.Widget))]
    return list(dict.fromkeys([widget, *(each for one in below for each in all_widgets(one))]))
