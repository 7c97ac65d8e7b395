"""Ctrl-C that stops a run cleanly, progress on one line, and files that can be written once a run is over."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from eet_lab.errors import SetupError

if TYPE_CHECKING:
    from eet_lab.progress import Clock


def check_writable(*paths: Path | None) -> None:
    """SetupError, before any work is done, where a file could not be written after it."""
    for path in (path for path in paths if path is not None):
        parent = path.resolve().parent
        if path.is_dir():
            why = "it is a folder"
        elif not parent.is_dir():
            why = f"there is no folder {parent}"
        elif not os.access(path if path.exists() else parent, os.W_OK):
            why = "permission denied"
        else:
            continue
        raise SetupError(f"{path} cannot be written: {why}. Choose another place.")


@contextmanager
def stoppable(*others: signal.Signals) -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that a run ends at its next step; a second Ctrl-C interrupts at once. `others` are
    signals that do the same.
    """
    stop = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    before = {number: signal.signal(number, on_interrupt) for number in (signal.SIGINT, *others)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def followed(clock: Clock | None = None, *others: signal.Signals) -> Iterator[tuple[ProgressLine, threading.Event]]:
    """A run: the line that tells its progress, which is gone at the end, and the event that stops it: Ctrl-C sets it,
    and so do `others`.
    """
    line = ProgressLine(clock)
    try:
        with stoppable(*others) as stop:
            yield line, stop
    finally:
        line.clear()


class ProgressLine:
    """A `Progress` on stderr: one line that is written over on a terminal, and a line for each message elsewhere.

    With a `clock`, each line ends with the time left as soon as that can be said.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._live, self._clock = sys.stderr.isatty(), clock
        self._last: tuple[int, int, str] | None = None

    def __call__(self, done: int, total: int, message: str) -> None:
        if self._last == (done, total, message):
            return
        self._last = done, total, message
        line = f"[{done}/{total}] {message}"
        if self._clock is not None:
            self._clock.progress(done, total)
            left = self._clock.left()
            line += f", {left}" if left else ""
        print(f"\r\x1b[K{line}" if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave the terminal's line empty, if progress stands there: else it would be somebody else's."""
        if self._live and self._last is not None:
            self._last = None
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
