"""What the user may choose at any time: it counts from the next run on. Only the ui thread calls it."""

from __future__ import annotations

from typing import Any

from eet_lab.errors import EETError
from eet_lab.models import PRESETS, Model
from eet_lab.workbench import commands as c
from eet_lab.workbench import jobs
from eet_lab.workbench.engine_thread import Work
from eet_lab.workbench.state import State, problem
from eet_lab.workbench.views.bar import LIVE, OTHER

Wish = tuple[Any, str, str]
"""(model, device, dtype)"""


class Choices:
    """Commands on the model, techniques, prompts and settings; `selected` is the technique whose card is open.

    A model, device or type that differs from what was asked for last is loaded next.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.selected = ""
        self.live: Any = None if isinstance(state.model, str) else state.model
        """A model object of the reader's; None where there is none."""
        self._asked: Wish | None = None
        self._there: Wish | None = None
        self.failed: Wish | None = None
        """What was asked for last, if it could not be loaded."""
        self.asking_path = False
        """The reader is yet to name a folder or a hub model."""
        self._tokens: dict[str, list[int]] = {}  # of prompts, as the model that is there encodes them

    def do(self, command: c.Command) -> bool:
        """Do a command on choices; False if it is none of those. EETError where it cannot be done."""
        state = self._state
        match command:
            case c.Toggle(name, on):
                state.toggle(name, on)
                self.selected = name
            case c.Select(name):
                self.selected = name
            case c.Turn(name, knob, value):
                state.turn(name, knob, value)
            case c.PickModel(value):
                self._pick(value)
            case c.TypeModel(value):
                if value.strip():
                    state.model, self.asking_path = value.strip(), False
            case c.LoadAgain():
                if self.failed is not None:
                    self._wish = self.failed
                self._asked, self.asking_path = None, False
            case c.PickDevice(value):
                state.move_to(value)
            case c.PickDtype(value):
                state.dtype = value
            case c.EditPrompt(index, text):
                state.edit_prompt(index, text)
            case c.AddPrompts(lines):
                state.add_prompts(lines)
            case c.RemovePrompt(index):
                state.prompts = [text for i, text in enumerate(state.prompts) if i != index]
            case c.Setting(name, value):
                state.set(name, value)
            case _:
                return False
        return True

    # The model

    @property
    def settled(self) -> bool:
        """What is chosen has been asked for."""
        return self._asked == self._wish

    def load(self) -> Work:
        """The job that loads what is chosen."""
        self._asked = model, device, dtype = self._wish
        self.failed = None
        return jobs.load_model(model, device, None if dtype == "auto" else dtype)

    def loaded(self, model: Model) -> None:
        """What was asked for is there."""
        self._there = self._asked
        self._tokens.clear()
        self._state.fit_to(model.config)

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
            self._wish = self._there
        return True

    def _pick(self, value: str) -> None:
        if self.asking_path and value != OTHER:
            self.failed = None  # the reader has given that name up
        self.asking_path = value == OTHER
        if not self.asking_path:
            self._state.model = self.live if value == LIVE else value

    @property
    def _wish(self) -> Wish:
        return self._state.model, self._state.device, self._state.dtype

    @_wish.setter
    def _wish(self, wish: Wish) -> None:
        self._state.model, self._state.device, self._state.dtype = wish

    # The prompts

    def tokens(self, model: Model | None) -> tuple[list[list[int]] | None, str | None]:
        """Each prompt's tokens, encoded once for a model; None without one, or with why one cannot be encoded."""
        if model is None:
            return None, None
        try:
            for prompt in self._state.prompts:
                if prompt not in self._tokens:
                    self._tokens[prompt] = jobs.token_ids(model, prompt)
        except EETError as error:
            return None, str(error)
        return [self._tokens[prompt] for prompt in self._state.prompts], None

    def problem(self, model: Model | None) -> str | None:
        """Why nothing can start with these choices; None when it can."""
        rows, unreadable = self.tokens(model)
        return unreadable or problem(self._state, model, rows)
