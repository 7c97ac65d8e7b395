"""Messages of the page become typed commands, or a clear error."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from eet_lab.errors import EETError
from eet_lab.workbench import Workbench
from eet_lab.workbench import commands as c
from workbench.driving import errors, turn


def test_a_message_is_the_command_that_it_names() -> None:
    assert c.read({"command": "toggle", "name": "mask_removal", "on": True}) == c.Toggle("mask_removal", True)
    assert c.read({"command": "add_prompts", "lines": ["a", "b"]}) == c.AddPrompts(["a", "b"])
    assert c.read({"command": "turn", "name": "x", "knob": "y", "value": 3, "more": 1}) == c.Turn("x", "y", 3)
    assert c.read({"command": "stop"}) == c.Stop()


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
        c.read(message)


def test_a_bad_message_leaves_the_workbench_at_work(bench: Workbench) -> None:
    bench.controller.put({"command": "toggle", "name": 5, "on": True})
    turn(bench)
    assert "with name = 5" in errors(bench)
    bench.controller.put({"command": "dismiss_error"})
    turn(bench)
    assert errors(bench) == ""


def test_what_the_scripts_send_is_known() -> None:
    """A name that is misspelt in JavaScript would be told only when somebody clicks."""
    scripts = Path(c.__file__).parent / "views"
    sent = [
        (name, set(re.findall(r"(\w+)(?=[,: }])(?![^:,}]*\()", keys.split(":")[0])))
        for path in scripts.glob("*.js")
        for name, keys in re.findall(r'send\("(\w+)"(?:, \{([^}]*)\})?\)', path.read_text())
    ]
    assert len(sent) > 15, "the scripts send commands in this form"
    for name, keys in sent:
        assert name in c.COMMANDS
        assert keys <= {f.name for f in fields(c.COMMANDS[name])}, name
