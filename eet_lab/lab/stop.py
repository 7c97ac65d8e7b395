"""How the lab ends: signals end the server, before it is up as well as after."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen, TimeoutExpired
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 10
"""What a server may take to end its kernels, each of which it gives two seconds."""


class Stop:
    """What Ctrl+C, SIGTERM and SIGHUP do while inside `watched`: they end the server, a second one kills it.

    Under nohup a SIGHUP does nothing. Until the server is `up` they end what we do as well, with the exit code that
    shells have for a signal.
    """

    def __init__(self) -> None:
        self.server: Popen[bytes] | None = None
        self.up = False
        self._asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, self._asked = self._asked, True
        if self.server is not None:
            self.server.kill() if again else self.server.terminate()
        if not self.up:
            raise SystemExit(128 + number)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Whatever happens inside, the server has ended when this is left."""
        is_detached = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as nohup leaves it: to outlive the terminal
        heeded = (number for number in SIGNALS if not (is_detached and number == signal.SIGHUP))
        before = {number: signal.signal(number, self) for number in heeded}
        try:
            yield
        finally:
            if self.server is not None and self.server.poll() is None:
                if not self._asked:  # a second SIGTERM would stop the loop in which it ends its kernels
                    self.server.terminate()
                try:
                    self.server.wait(PATIENCE_S)
                except TimeoutExpired:
                    self.server.kill()
                    self.server.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
