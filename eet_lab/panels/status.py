"""The line beside the buttons: how far the present job is, how the last one went, or what failed."""

from __future__ import annotations

from textwrap import shorten
from typing import Any

from eet_lab.bench.progress import Clock
from eet_lab.errors import first_line
from eet_lab.panels import theme
from eet_lab.panels.controls import Actions
from eet_lab.panels.state import State


class Status:
    """`text` is what is said, `clock` how far the present job is. Only the ui thread calls it."""

    def __init__(self, actions: Actions, state: State) -> None:
        self.text, self.clock = "", Clock()
        self._actions, self._state = actions, state
        self._failed_with: dict[str, Any] | None = None

    def say(self, text: str) -> None:
        """Something else than how the last job went."""
        self.text = text

    def fail(self, error: BaseException) -> None:
        """Tell what failed, on a card as well."""
        self._actions.error.value = theme.error_card(error)
        # The line of actions stays in view, the card may not.
        self.text = f"failed: {shorten(first_line(error), 160, placeholder=' …')} The session goes on."
        self._failed_with = self._state.trait_values()

    def forgive(self) -> None:
        """Take down what failed: something else was chosen since, or is done."""
        if self._failed_with is not None:
            self._failed_with, self.text = None, "ready"
            self._actions.error.value = ""

    def look(self) -> None:
        """Forgive where something else was chosen since."""
        if self._failed_with not in (None, self._state.trait_values()):
            self.forgive()

    def show(self, busy: bool) -> None:
        """Put it up. Widgets send only what has changed."""
        if busy:
            self._actions.progress(self.text, self.clock.share, self.clock.left())
        else:
            self._actions.rest(self.text)
