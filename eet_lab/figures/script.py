"""A script that several widgets share: it stands once in a page's state, and so in a saved notebook."""

from __future__ import annotations

from pathlib import Path

import anywidget
import ipywidgets as W
import traitlets as T


class BaseScript(anywidget.AnyWidget):
    """The script, or the first part of it, of all widgets that name it. It shows nothing, and is closed like them."""

    _esm = "export default {};"
    source = T.Unicode().tag(sync=True)


class Shared(anywidget.AnyWidget):
    """Drawn by the script of `base` with `source` behind it, as if both were one file.

    All views of a widget share what the script remembers.
    """

    _esm = (Path(__file__).parent / "load.js").read_text(encoding="utf-8")
    base = T.Instance(BaseScript).tag(sync=True, **W.widget_serialization)
    source = T.Unicode().tag(sync=True)


def all_widgets(widget: W.Widget) -> list[W.Widget]:
    """A widget, everything below it, and the scripts of them all."""
    below = [each for child in getattr(widget, "children", ()) for each in all_widgets(child)]
    scripts = [widget.base] if isinstance(widget, Shared) else []
    return list(dict.fromkeys([widget, *below, *scripts]))
