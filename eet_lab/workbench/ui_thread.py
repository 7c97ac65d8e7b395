"""The ui thread of a page of widgets: ten times a second it takes a turn, and it alone writes widgets."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import ipywidgets as W
from IPython.display import HTML, display

from eet_lab.errors import EETError
from eet_lab.words import plain

TICK_S = 0.1
RUN_AGAIN = """<style>
.jp-OutputArea:not(:has(> * > .jp-OutputArea-output.jupyter-widgets)) > :has(> * > .eet-run-again) { display: none }
.jp-OutputArea:has(> * > * > .eet-run-again) > * > .jp-OutputArea-output.jupyter-widgets { display: none }
</style>
<p class="eet-run-again" role="status">This page is gone with its kernel. Run its cell again: click the line above it,
and press Shift+Enter. Runs that were kept come back.</p>"""
"""An output of its own, seen only in place of ipywidgets' "model not found".

Such an output has the class `jupyter-widgets` itself; else what stands in it has. Only children are asked for, so that
a browser does not look through all of a page of figures after each change of it.
"""


class UiThread:
    """Turns a page of widgets until it is closed. Of each kind one is open: opening another closes it.

    A kind gives what a turn does, what ends its other threads and takes its widgets down, whether nothing is left to
    do, and in words what is.
    """

    _opened: ClassVar[Any] = None
    _turn: Callable[[], None]
    _end: Callable[[], None]
    _is_idle: Callable[[], bool]
    _told: Callable[[], str]

    @property
    def busy(self) -> bool:
        """Whether something runs or is still to be done."""
        return not self._closing.is_set() and not self._is_idle()

    def start(self) -> None:
        """Start the ui thread, if it does not run yet. Displaying the page does it."""
        if not self._ui.is_alive() and not self._closing.is_set():
            self._ui.start()

    def close(self) -> None:
        """End what runs and all threads, and take the widgets off the page. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._ui.is_alive():
            self._ui.join()  # first: a turn may start a thread
        self._end()
        if type(self)._opened is self:
            type(self)._opened = None

    @classmethod
    def _make_room(cls) -> None:
        """Close the one that is open: before threads of another begin, once nothing asked for it can be wrong."""
        if cls._opened is not None:
            cls._opened.close()

    def _open(self, box: W.DOMWidget) -> None:
        """Take its place, with all there is to turn."""
        self._box, self._closing = box, threading.Event()
        self._ui = threading.Thread(target=self._loop, name="eet-ui", daemon=True)
        type(self)._opened = self

    def _loop(self) -> None:
        while not self._closing.wait(TICK_S):
            self._turn()

    def _wait(self, timeout_s: float) -> None:
        """Wait until nothing is left to do. EETError after `timeout_s`, and after `close`."""
        self._check_open("wait")
        self.start()
        deadline = time.monotonic() + timeout_s
        while self.busy:
            if time.monotonic() > deadline:
                raise EETError(f"It is not done after {plain(timeout_s)} s: {self._told()}. Give wait() longer.")
            time.sleep(TICK_S / 4)

    def _check_open(self, action: str) -> None:
        """EETError after `close`."""
        if self._closing.is_set():
            name = type(self).__name__
            raise EETError(f"This {name} is closed, so {action} does nothing. Open another: eet_lab.{name}().")

    def _ipython_display_(self) -> None:
        display(HTML(RUN_AGAIN))
        display({**self._box._repr_mimebundle_(), "text/plain": "(a page of widgets)"}, raw=True)
        self.start()


@atexit.register
def _close_all() -> None:
    """A script that ends closes its pages: torch aborts where a thread of Python's ends in the middle of it."""
    kinds = [UiThread]
    for kind in kinds:
        kind._make_room()
        kinds += kind.__subclasses__()
