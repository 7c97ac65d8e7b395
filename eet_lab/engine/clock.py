"""How long a request has taken, as its user counts it."""

from __future__ import annotations

import time
from collections.abc import Callable


class RequestClock:
    """Starts when a request comes. What is done for the first time, and looked up from then on, stands apart."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.setup_ms = 0.0

    def once(self, work: Callable[[], bool]) -> None:
        """Run `work`. If it returns True, its time is setup; otherwise it is part of every request, and is counted."""
        start = time.perf_counter()
        if work():
            self.setup_ms += (time.perf_counter() - start) * 1e3

    def since_ms(self) -> float:
        """Milliseconds since the request came, setup among them."""
        return (time.perf_counter() - self._began) * 1e3
