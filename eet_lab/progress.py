"""How long work is followed and stopped: what every function that takes a while is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Progress = Callable[[int, int, str], None]
"""Called with units done, units in all, and what is being done now."""


class Cancel(Protocol):
    """Anything like a `threading.Event`: set it, and the work ends at the next place where it can."""

    def is_set(self) -> bool: ...
