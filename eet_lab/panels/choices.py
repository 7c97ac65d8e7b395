"""What the user may choose at any time: each command changes the state. Only the ui thread calls it."""

from __future__ import annotations

from typing import Any

from eet_lab.errors import PromptError
from eet_lab.panels.prompts_editor import PromptsEditor
from eet_lab.panels.state import State
from eet_lab.words import counted

MOST_PROMPTS = 256
"""On one page: each has an editor and an output of its own, and a browser is slow with thousands of them."""


class Choices:
    """Commands on techniques, prompts and settings; they count from the next run on."""

    def __init__(self, state: State, prompts: PromptsEditor) -> None:
        self._state, self._prompts = state, prompts

    def do_toggle(self, name: str, on: bool) -> None:
        self._state.toggle(name, on)

    def do_knob(self, name: str, knob: str, value: Any) -> None:
        self._state.turn(name, knob, value)

    def do_setting(self, name: str, value: Any) -> None:
        self._state.generation = {**self._state.generation, name: value}

    def do_prompt(self, index: int, text: str) -> None:
        prompts = list(self._state.prompts)
        if index < len(prompts):  # a row that was removed may still tell of its last key
            prompts[index] = text
            self._state.prompts = prompts

    def do_add_prompts(self, lines: list[str]) -> None:
        count = len(self._state.prompts) + len(lines)
        if count > MOST_PROMPTS:
            raise PromptError(
                f"{counted(len(lines), 'prompt')} more would make {count:,}, and this page shows at most "
                f"{MOST_PROMPTS}. Add fewer, or run them in a cell with Engine.generate."
            )
        self._state.prompts = [*self._state.prompts, *lines]

    def do_remove_prompt(self, index: int) -> None:
        self._state.prompts = [text for i, text in enumerate(self._state.prompts) if i != index]

    def do_open_paste(self, wanted: bool) -> None:
        self._prompts.open_paste(wanted)

    def do_paste(self) -> None:
        self.do_add_prompts(self._prompts.pasted_lines())
        self._prompts.empty_pasted()
