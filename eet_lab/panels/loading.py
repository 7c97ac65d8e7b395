"""Which model is wanted, and whether it has been asked for. Only the ui thread calls it."""

from __future__ import annotations

from typing import Any

from eet_lab.panels import jobs
from eet_lab.panels.controls import OTHER
from eet_lab.panels.state import State
from eet_lab.panels.worker import Work

Wish = tuple[Any, str, str]
"""(model, device, dtype)"""


class Loading:
    """Commands on the model; a choice that differs from what was asked for last is loaded next."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._asked: Wish | None = None
        self.asking_path = False
        """The reader is yet to name a folder or a hub model."""

    @property
    def settled(self) -> bool:
        """What is chosen has been asked for."""
        return self._asked == self._wish

    def next(self) -> Work:
        """The job that loads what is chosen."""
        self._asked = model, device, dtype = self._wish
        return jobs.load_model(model, device, None if dtype == "auto" else dtype)

    def do_pick_model(self, value: Any) -> None:
        self.asking_path = value == OTHER
        if not self.asking_path:
            self._state.model = value

    def do_type_model(self, text: str) -> None:
        if text.strip():
            self._state.model = text.strip()
            self.asking_path = False

    def do_load_again(self) -> None:
        """The same once more: what was in the way may be gone."""
        self._asked = None

    @property
    def _wish(self) -> Wish:
        return self._state.model, self._state.device, self._state.dtype
