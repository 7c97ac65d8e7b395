"""Turning the workbench by hand: commands in, turns of the ui thread, what is shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from eet_lab.workbench import Workbench
from eet_lab.workbench.choices import Choices, State
from eet_lab.workbench.commands import MARKED, parameters
from eet_lab.workbench.controller import Controller
from eet_lab.workbench.history import History
from eet_lab.workbench.results import Results
from eet_lab.workbench.rows import KeptRun
from eet_lab.workbench.threads import Answer, Background

PROMPTS = ["5 6 7", "8 9 10 11 12 13"]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("eet-")]


def turn(workbench: Workbench, times: int = 1) -> None:
    for _ in range(times):
        workbench.controller.tick()


def turn_until(workbench: Workbench, done: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        turn(workbench)
        if done():
            turn(workbench)
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing after {seconds} s; status: {workbench.controller.status.text}")


class Ask:
    """Messages of the page: `ask.toggle("mask_removal", True)` has what the command takes by its names."""

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        kind = next(kind for kind in (Controller, State, Choices, Results) if vars(kind).get(name) in MARKED)
        return lambda *values: {"command": name, **dict(zip(parameters(kind, name), values, strict=True))}


ask = Ask()


def do(workbench: Workbench, *messages: dict[str, Any]) -> None:
    """Ask for something, one after the other, and turn the controller until each is done."""
    for message in messages:
        workbench.controller.put(message)
        turn_until(workbench, lambda: workbench.controller.idle)


def shown(workbench: Workbench, view: str) -> dict[str, Any]:
    """The state of "bar", "techniques", "inputs", "answer" or "runs"."""
    return getattr(workbench.controller.page, view).state


def row(workbench: Workbench, name: str) -> dict[str, Any]:
    """A technique in the list."""
    return next(each for each in shown(workbench, "techniques")["list"] if each["name"] == name)


def knobs(workbench: Workbench) -> dict[str, Any]:
    """The fields of the card that is open, by name."""
    return {each["name"]: each for each in shown(workbench, "techniques")["card"]["knobs"]}


def enabled(workbench: Workbench) -> dict[str, bool]:
    """Which actions can be pressed."""
    return {name: action["enabled"] for name, action in shown(workbench, "bar")["actions"].items()}


def status(workbench: Workbench) -> str:
    return shown(workbench, "bar")["status"]["text"]


def errors(workbench: Workbench) -> str:
    """What the card of errors says."""
    error = shown(workbench, "bar")["error"]
    return "" if error is None else f"{error['title']}: {error['text']} {error['details'] or ''}"


def answers(background: Background, count: int, seconds: float = 5.0) -> list[Answer]:
    """The next answers, `count` of them."""
    found: list[Answer] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += background.take()
        time.sleep(0.002)
    return found


def own(history: History) -> list[KeptRun]:
    """Rows of the folder as it is now, without the recordings that come along."""
    history.look()
    return [row for row in history.rows() if not row.id.startswith("recorded:")]


def read_all(history: History) -> None:
    history.look()
    while files := history.unread():
        history.learn(history.read(files))


def full(path: Any, content: Any) -> None:
    raise OSError(28, "No space left on device")
