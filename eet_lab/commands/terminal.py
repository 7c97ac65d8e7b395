"""Ctrl-C that stops a run cleanly, and progress on one line."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that a run ends at its next step; a second Ctrl-C interrupts at once."""
    stop = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class ProgressLine:
    """A `Progress` on stderr: one line that is written over on a terminal, and a line for each message elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = ""

    def __call__(self, done: int, total: int, message: str) -> None:
        line = f"[{done}/{total}] {message}"
        if line == self._last:
            return
        self._last = line
        print(f"\r\x1b[K{line}" if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave the terminal's line empty."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
