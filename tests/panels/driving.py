"""Turning the workbench by hand: commands in, turns of the ui thread, what is shown."""

from __future__ import annotations

import threading
import time
from typing import Any

from eet_lab.panels import Workbench
from eet_lab.panels.aside import Answer, Aside

PROMPTS = ["5 6 7", "8 9 10 11 12 13"]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("eet-")]


def turn_until(workbench: Workbench, done: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        workbench.desk.tick()
        if done():
            workbench.desk.tick()
            return
        time.sleep(0.005)
    raise AssertionError(f"nothing after {seconds} s; status: {workbench.desk.status.text}")


def do(workbench: Workbench, action: str, *values: Any) -> None:
    """Give a command and turn the desk until it is done."""
    workbench.desk.put(action, *values)
    turn_until(workbench, lambda: workbench.desk.idle)


def errors(workbench: Workbench) -> str:
    return workbench.desk.actions.error.value


def answers(aside: Aside, count: int, seconds: float = 5.0) -> list[Answer]:
    """The next answers, `count` of them."""
    found: list[Answer] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += aside.take()
        time.sleep(0.002)
    return found
