"""Telling a page once more what it may have missed.

A page that opens asks for every widget's state first and listens to changes a little later: Voila's loses what changes
in between, and a workbench that has loaded its model just then would look as if it had not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import ipywidgets as W

SETTLE_S = 2.5
"""A page listens so long after it has asked, at the latest."""


class Refresh:
    """Sends all that only the desk writes, once, a while after each change. Only the ui thread calls it."""

    def __init__(self, box: W.Box, now: Callable[[], float] = time.monotonic) -> None:
        self._box, self._now = box, now
        self._due: float | None = None

    def turn(self, changed: bool, busy: bool) -> None:
        """One turn of the desk; while it is busy nothing is sent, to leave runs alone."""
        if changed:
            self._due = self._now() + SETTLE_S
        if self._due is not None and self._now() >= self._due and not busy:
            self._due = None
            for widget in all_widgets(self._box):
                _send_again(widget)


def all_widgets(widget: W.Widget) -> list[W.Widget]:
    """A widget and everything below it."""
    return [widget, *(each for child in getattr(widget, "children", ()) for each in all_widgets(child))]


def _send_again(widget: W.Widget) -> None:
    """Not what a reader types or clicks, which might be on its way here."""
    names = {"value"} if isinstance(widget, W.HTML) else {"disabled", "_dom_classes"} & set(widget.keys)
    if names:
        widget.send_state(names)
    if widget.layout.display is not None:
        widget.layout.send_state("display")
