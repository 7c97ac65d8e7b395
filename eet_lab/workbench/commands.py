"""What the page can ask of a workbench: methods that are marked as commands, and how its messages call them.

The page sends {"command": "toggle", "name": "mask_removal", "on": true}; `read` makes `toggle("mask_removal", True)` of
it, of whoever has such a command.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from inspect import isfunction
from typing import Any, TypeVar, get_type_hints

from eet_lab.errors import EETError

Method = TypeVar("Method", bound=Callable[..., None])

MARKED = set[Any]()


def command(method: Method) -> Method:
    """Let the page call a method by its name, with a value for each parameter, of the type that it declares."""
    MARKED.add(method)
    return method


def owners(*objects: object) -> dict[str, object]:
    """Who does each command, by its name."""
    found = dict[str, object]()
    for each in objects:
        for name, method in vars(type(each)).items():
            if isfunction(method) and method in MARKED:
                if name in found:
                    raise ValueError(
                        f"Both {type(found[name]).__name__} and {type(each).__name__} do the command {name}."
                    )
                found[name] = each
    return found


def read(message: Any, known: Mapping[str, object]) -> Callable[[], None]:
    """The call that a message of the page asks for; EETError where there is none, or a value has the wrong type."""
    name = message.get("command") if isinstance(message, Mapping) else None
    if not isinstance(name, str) or name not in known:
        raise EETError(f"The page sent {str(message)[:80]!r}, which is not a command. Reload the page.")
    values = dict[str, Any]()
    for field, kind in parameters(type(known[name]), name).items():
        if field not in message:
            raise EETError(f"The page sent {name} without {field}. Reload the page.")
        values[field] = message[field]
        if not _fits(values[field], kind):
            value = repr(values[field])[:40]
            raise EETError(
                f"The page sent {name} with {field} = {value}, but it must be a {kind.__name__}. Reload the page."
            )
    return partial(getattr(known[name], name), **values)


def parameters(owner: type, name: str) -> dict[str, Any]:
    """What a command takes, and the type of each."""
    return {field: kind for field, kind in get_type_hints(getattr(owner, name)).items() if field != "return"}


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return type(value) is kind


def as_knob(usual: Any, value: Any) -> Any:
    """A value of the page for a knob: JavaScript has one type for 2 and 2.0, and digits may be a text."""
    if isinstance(usual, float) and type(value) is int:
        return float(value)
    return value if isinstance(usual, str) else as_whole(value)


def as_whole(value: Any) -> Any:
    """A value of the page, where it is a whole number as such; one that a float would round comes as its digits."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    is_long = isinstance(value, str) and re.fullmatch(r"-?[0-9]{16,99}", value)
    return int(value) if is_long else value
