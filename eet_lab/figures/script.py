"""A script that several widgets share: it stands once in a page's state, and so in a saved notebook."""

from __future__ import annotations

import re
from pathlib import Path

import anywidget
import ipywidgets as W
import traitlets as T


def compact(*paths: Path) -> str:
    """Scripts or styles, one after the other, without indentation and comments on lines of their own.

    They stand in each saved notebook with a widget's state. Styles have no comments, nor spaces beside their marks.
    """
    texts = ((path, path.read_text(encoding="utf-8")) for path in paths)
    small = (_small_style(text) if path.suffix == ".css" else text for path, text in texts)
    lines = (line.strip() for text in small for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def style(*sections: str) -> str:
    """Sections of widgets.css as `compact` writes styles: a saved notebook has the rules of its widgets and no more."""
    _, *parts = re.split(r"/\* (\w+):.*\n", (Path(__file__).parent / "widgets.css").read_text(encoding="utf-8"))
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    return "".join(_small_style(found[name]) for name in sections)


def _small_style(text: str) -> str:
    """The same style without comments and needless spaces; one before a colon stays, where a selector may need it."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r" *([{};]) *|(?<=:) +", r"\1", text).replace(";}", "}")


class BaseScript(anywidget.AnyWidget):
    """The script, or the first part of it, of all widgets that name it, and their style.

    It shows nothing, and is closed like them.
    """

    _esm = "export default {};"
    _css = T.Unicode().tag(sync=True)
    source = T.Unicode().tag(sync=True)


class Shared(anywidget.AnyWidget):
    """Drawn by the script of `base` with `source` behind it, as if both were one file.

    All views of a widget share what the script remembers.
    """

    _esm = compact(Path(__file__).parent / "load.js")
    base = T.Instance(BaseScript).tag(sync=True, **W.widget_serialization)
    source = T.Unicode().tag(sync=True)


def all_widgets(widget: W.Widget) -> list[W.Widget]:
    """A widget, everything below it, and the scripts of them all."""
    below = [each for child in getattr(widget, "children", ()) for each in all_widgets(child)]
    scripts = [widget.base] if isinstance(widget, Shared) else []
    return list(dict.fromkeys([widget, *below, *scripts]))
