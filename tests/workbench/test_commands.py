"""Messages of the page become calls of commands, with values of the right types, or a clear error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from eet_lab.errors import EETError
from eet_lab.workbench import Workbench
from eet_lab.workbench import commands as c
from workbench.driving import errors, turn


class Told:
    """Has two commands, and notes how they are called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @c.command
    def toggle(self, name: str, on: bool) -> None:
        self.calls.append((name, on))

    @c.command
    def add_prompts(self, lines: list[str]) -> None:
        self.calls.append((lines,))

    @c.command
    def edit_prompt(self, index: int, text: Any) -> None:
        self.calls.append((index, text))

    def explode(self) -> None:
        """No command: the page cannot call it."""


def test_a_message_is_the_call_that_it_names() -> None:
    told = Told()
    for message in (
        {"command": "toggle", "name": "mask_removal", "on": True},
        {"command": "add_prompts", "lines": ["a", "b"]},
        {"command": "edit_prompt", "index": 1, "text": 3, "more": 1},
    ):
        c.read(message, c.owners(told))()
    assert told.calls == [("mask_removal", True), (["a", "b"],), (1, 3)]


def test_a_command_is_of_one_owner() -> None:
    class Other:
        @c.command
        def toggle(self) -> None:
            """Told's name."""

    with pytest.raises(ValueError, match="Both Told and Other do the command toggle"):
        c.owners(Told(), Other())


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (None, "not a command"),
        ({"command": "explode"}, "not a command"),
        ({"command": ["toggle"]}, "not a command"),
        ({"command": "toggle", "name": "x"}, "without on"),
        ({"command": "toggle", "name": "x", "on": 1}, "with on = 1, but it must be a bool"),
        ({"command": "add_prompts", "lines": [1]}, "with lines"),
        ({"command": "edit_prompt", "index": True, "text": ""}, "with index = True"),
    ],
)
def test_what_is_none_is_told(message: Any, words: str) -> None:
    with pytest.raises(EETError, match=words):
        c.read(message, c.owners(Told()))


def test_a_bad_message_leaves_the_workbench_at_work(bench: Workbench) -> None:
    bench.controller.put({"command": "toggle", "name": 5, "on": True})
    turn(bench)
    assert "with name = 5" in errors(bench)
    bench.controller.put({"command": "dismiss_error"})
    turn(bench)
    assert errors(bench) == ""


def test_what_the_scripts_send_is_known(bench: Workbench) -> None:
    """A name that is misspelt in JavaScript would be told only when somebody clicks."""
    scripts = Path(c.__file__).parent / "views"
    sent = [
        (name, set(re.findall(r"(\w+)(?=[,: }])(?![^:,}]*\()", keys.split(":")[0])))
        for path in scripts.glob("*.js")
        for name, keys in re.findall(r'send\("(\w+)"(?:, \{([^}]*)\})?\)', path.read_text())
    ]
    assert len(sent) > 15, "the scripts send commands in this form"
    for name, keys in sent:
        assert keys <= c.parameters(type(bench.controller.commands[name]), name).keys(), name
