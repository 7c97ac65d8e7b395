"""What the user can ask of a workbench: one frozen dataclass for each command, and how the page's messages become them.

The page sends {"command": "toggle", "name": "mask_removal", "on": true}; `read` makes `Toggle("mask_removal", True)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, dataclass_transform, get_type_hints

from eet_lab.errors import EETError


@dataclass_transform(frozen_default=True)
class Command:
    """Whatever the ui thread can be asked to do. Each command is a frozen dataclass by being a subclass of this."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class PickModel(Command):
    """A model of the list; `OTHER` asks for a folder or a hub name."""

    value: str


class TypeModel(Command):
    """A folder in Hugging Face format, or a hub name."""

    value: str


class LoadAgain(Command):
    """The same model once more: what was in the way may be gone."""


class PickDevice(Command):
    value: str


class PickDtype(Command):
    value: str


class Run(Command):
    """Generate once with the selection, watched."""


class Compare(Command):
    """Time the selection against the pinned recipe, or against the baseline."""


class Ladder(Command):
    """Credit each technique of the selection with its own milliseconds and bytes."""


class TakeTimeline(Command):
    """Take the timeline of one decode step of both recipes of the comparison that is shown."""


class Stop(Command):
    """End the present job; what is there stays."""


class Toggle(Command):
    name: str
    on: bool


class Select(Command):
    """Show a technique's card and knobs."""

    name: str


class Turn(Command):
    """Set a knob."""

    name: str
    knob: str
    value: Any


class EditPrompt(Command):
    index: int
    text: str


class AddPrompts(Command):
    lines: list[str]


class RemovePrompt(Command):
    index: int


class Setting(Command):
    """One setting of a generation, "stop_at_eos" or "repeats"."""

    name: str
    value: Any


class LargerType(Command):
    """Larger type, for a projector."""

    on: bool


class ShowServing(Command):
    """Show the page for serving, or the bench."""

    on: bool


class DismissError(Command):
    """Take down the card of what failed."""


class Tab(Command):
    """Another tab of the result."""

    name: str


class Scale(Command):
    """Switch a scale of figures: "log", for a logarithmic axis, or "own width", for the steps of a timeline."""

    name: str
    on: bool


class Export(Command):
    """Have the browser save a kept run, or what is shown (the id ""): as "json", "csv", "html" or "trace"."""

    id: str
    format: str


class Pick(Command):
    """Another "run", "pass" or "planner" on the tab on memory."""

    what: str
    name: str


class Tick(Command):
    """Choose a kept run for a comparison, or no longer."""

    id: str
    on: bool


class Pin(Command):
    """Make a kept run's recipe what Compare is held against, or no longer."""

    id: str
    on: bool


class Rename(Command):
    id: str
    text: str


class Annotate(Command):
    id: str
    text: str


class Delete(Command):
    id: str


class OpenRun(Command):
    """Show a kept run with its own model, prompts and switches, read-only."""

    id: str


class Replay(Command):
    """Open a kept run and let its two lanes race."""

    id: str


class CloseRun(Command):
    """Leave the kept run that is open: back to the reader's own choices."""


class CompareTicked(Command):
    """Show the two ticked runs side by side, as they were measured."""


class MeasureTicked(Command):
    """Time the recipes of the two ticked runs in turn, here and now, on the present prompts."""


class ShowOlder(Command):
    """List more of the kept runs."""


class Upload(Command):
    """Keep a result's file; `content` is base64."""

    name: str
    content: str


def name_of(command: type[Command]) -> str:
    """`PickModel` is "pick_model" on the page."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", command.__name__).lower()


COMMANDS = {name_of(command): command for command in Command.__subclasses__()}


def read(message: Any) -> Command:
    """The command in a message of the page; EETError where there is none, or a value has the wrong type."""
    name = message.get("command") if isinstance(message, Mapping) else None
    if not isinstance(name, str) or name not in COMMANDS:
        raise EETError(f"The page sent {str(message)[:80]!r}, which is not a command. Reload the page.")
    kind = COMMANDS[name]
    hints, values = get_type_hints(kind), {}
    for f in fields(kind):  # type: ignore[arg-type]  # every command is a dataclass
        if f.name not in message:
            raise EETError(f"The page sent {name} without {f.name}. Reload the page.")
        values[f.name] = message[f.name]
        if not _fits(values[f.name], hints[f.name]):
            value, kind_name = repr(values[f.name])[:40], hints[f.name].__name__
            raise EETError(
                f"The page sent {name} with {f.name} = {value}, but it must be a {kind_name}. Reload the page."
            )
    return kind(**values)


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return type(value) is kind
