"""Which model is wanted, and whether it has been asked for. Only the ui thread calls it."""

from __future__ import annotations

from typing import Any

from eet_lab.models import PRESETS
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
        self._there: Wish | None = None
        self.failed: Wish | None = None
        """What was asked for last, if it could not be loaded."""
        self.asking_path = False
        """The reader is yet to name a folder or a hub model."""

    @property
    def settled(self) -> bool:
        """What is chosen has been asked for."""
        return self._asked == self._wish

    def next(self) -> Work:
        """The job that loads what is chosen."""
        self._asked = model, device, dtype = self._wish
        self.failed = None
        return jobs.load_model(model, device, None if dtype == "auto" else dtype)

    def succeeded(self) -> None:
        """What was asked for is there."""
        self._there = self._asked

    def back(self) -> bool:
        """What was asked for cannot be had: choose again what is there; whether there is anything.

        A name that was typed stays where it can be mended.
        """
        self.failed, wanted = self._asked, self._asked[0] if self._asked else ""
        if self._there is None:
            return False
        self._asked = self._there
        if self._wish == self.failed:  # else something else was chosen meanwhile, and comes next
            self.asking_path = isinstance(wanted, str) and wanted not in ("demo", *PRESETS)
            self._choose(self._there)
        return True

    def do_pick_model(self, value: Any) -> None:
        if self.asking_path and value != OTHER:
            self.failed = None  # the reader has given that name up
        self.asking_path = value == OTHER
        if not self.asking_path:
            self._state.model = value

    def do_type_model(self, text: str) -> None:
        if text.strip():
            self._state.model = text.strip()
            self.asking_path = False

    def do_load_again(self) -> None:
        """The same once more: what was in the way may be gone."""
        if self.failed is not None:
            self._choose(self.failed)
        self._asked, self.asking_path = None, False

    def _choose(self, wish: Wish) -> None:
        self._state.model, self._state.device, self._state.dtype = wish

    @property
    def _wish(self) -> Wish:
        return self._state.model, self._state.device, self._state.dtype
