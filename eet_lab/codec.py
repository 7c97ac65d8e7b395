"""Frozen dataclasses to JSON files and back, checked against their type hints and the ranges in them (msgspec)."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import threading
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from eet_lab.errors import ResultError
from eet_lab.files import regular_content
from eet_lab.words import visible

T = TypeVar("T")

MISSING = re.compile(r"Object missing required field `(\w+)`")
SURROGATE = re.compile("[\ud800-\udfff]")
STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
HALF = "\\ud"
"""How the escape of a surrogate begins. Pairs of them are one character, and fine."""
SHOWN = 40
"""Characters of a wrong value that its error shows."""


MOST_BYTES = 32 * 2**20
"""The largest file. A ladder of GPT-2 XL takes 0.3 MB. JSON of many small objects takes twenty times that in memory."""


def content_of(path: str | Path, follow_links: bool = True) -> bytes:
    """A regular file's bytes; ResultError for what cannot be read, is larger than `MOST_BYTES`, or is no such file."""
    remedy = "Measure fewer prompts or tokens, and save it again."
    return regular_content(path, "a saved result", MOST_BYTES, ResultError, remedy=remedy, follow_links=follow_links)


class Unreadable:
    """A number of a file that no float or 64-bit integer can hold, such as NaN or 1e999; no type takes it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def parse(content: bytes) -> Any:
    """JSON as plain objects; ValueError for what is none. Numbers out of range stay, so that their place can be told.

    Nesting beyond Python's own limit is a ValueError too, and so is text that cannot be encoded, which nothing could
    print and msgspec must not see: it ends the process (0.22).
    """
    try:
        text = content.decode("utf-8")
        value = json.loads(text, parse_float=_real, parse_int=_whole, parse_constant=Unreadable)
        if HALF in text.lower():
            for place in _halves(value, ""):
                raise ValueError(f"{place or 'it'} holds half of a surrogate pair, which is no text")
        return value
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def encode(value: Any) -> Any:
    """What `json` can write: dataclasses as objects."""
    return msgspec.to_builtins(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """A kind of text or mapping of somebody's own, such as torch's version."""
    if isinstance(value, str | Mapping):
        return str(value) if isinstance(value, str) else dict(value)
    raise TypeError(f"{type(value).__name__} cannot be saved")


_ONE_AT_A_TIME = threading.Lock()


def _converted(data: Any, kind: Any) -> Any:
    """One thread at a time: two that meet a type for the first time together end the process (msgspec 0.22)."""
    with _ONE_AT_A_TIME:
        return msgspec.convert(data, kind)


def decode(kind: type[T], data: Any, where: str = "result") -> T:
    """`data`, as `parse` gives it, as a value of type `kind`.

    Errors: ValueError that names the place, the value and the limit; `Unknown` for a field that `kind` does not have.
    """
    try:
        value = _converted(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_told(str(error), kind, data, where)) from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    for place in _unknown(value, data, where):
        raise Unknown(f"{place}, which this version does not know")
    return value


class Unknown(ValueError):
    """A field that this version does not know."""


def _halves(value: Any, where: str) -> Iterator[str]:
    """Places of texts with half of a surrogate pair."""
    if isinstance(value, str) and SURROGATE.search(value):
        yield where
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _halves(name, where)
            yield from _halves(item, f"{where}.{visible(name)}" if where else visible(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _halves(item, f"{where}[{index}]")


def _real(text: str) -> float | Unreadable:
    value = float(text)
    return value if math.isfinite(value) else Unreadable(text)


def _whole(text: str) -> int | Unreadable:
    return int(text) if len(text) <= 20 else Unreadable(text)


def _told(message: str, kind: Any, data: Any, where: str) -> str:
    """msgspec's words with the value in them, and the key of an object's entry, which it leaves out."""
    what, _, path = message.partition(" - at `$")
    place, value = where, data
    for name, index in STEP.findall(path.rstrip("`")):
        if name:
            place, value, kind = f"{place}.{name}", value[name], _hints(kind).get(name)
        elif isinstance(value, Mapping):
            key = next(key for key in value if _fails(kind, {key: value[key]}))
            place, value = f"{place}.{visible(key)[:SHOWN]}", value[key]
        else:
            place, value = f"{place}[{index}]", value[int(index)]
    if found := MISSING.fullmatch(what):
        return f"{place} has no {found[1]}"
    if choices := _choices(kind):
        limit = f"one of {', '.join(map(str, choices))}"
    elif "regex" in what:
        limit = "an ISO 8601 date"  # the only one of the ranges
    elif not what.startswith("Expected "):  # a dataclass's own words
        return f"{place}: {what}"
    else:
        limit = what.removeprefix("Expected ").partition(", got ")[0].replace("`", "").replace("| null", "or null")
    return f"{place} is {shown(value)}, but it must be {limit}"


def shown(value: Any) -> str:
    """A value in an error: short, and without anything that a terminal would obey."""
    text = visible(repr(value) if isinstance(value, str | Unreadable) else json.dumps(value, default=repr))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _fails(kind: Any, data: Any) -> bool:
    """Whether one entry of an object is what is wrong with it."""
    try:
        _converted(data, kind)
    except msgspec.ValidationError:
        return True
    return False


def _hints(kind: Any) -> dict[str, Any]:
    """The fields' types of a dataclass, which may be optional, or what a list or an object holds."""
    for inner in _inside(kind):
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            return _fields(inner)
    return {}


@cache
def _fields(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _choices(kind: Any) -> tuple[Any, ...]:
    literals = [inner for inner in _inside(kind) if typing.get_origin(inner) is typing.Literal]
    return typing.get_args(literals[0]) if literals else ()


def _inside(kind: Any) -> Iterator[Any]:
    yield kind
    if typing.get_origin(kind) is not typing.Literal:
        for inner in typing.get_args(kind):
            yield from _inside(inner)


def _unknown(value: Any, data: Any, where: str) -> Iterator[str]:
    """Places of what `data` has and `value` does not: msgspec passes over what a dataclass does not know."""
    if dataclasses.is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)}
        yield from (f"{where} has {shown(name)}" for name in data if name not in names)
        for name in names & data.keys():
            yield from _unknown(getattr(value, name), data[name], f"{where}.{name}")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _unknown(item, data[name], f"{where}.{name}")
    elif isinstance(value, tuple | list) and value and not isinstance(value[0], int | float | str):
        for index, item in enumerate(value):
            yield from _unknown(item, data[index], f"{where}[{index}]")


Ms = Annotated[float, Meta(ge=0, le=1e12)]
"""A duration; 1e12 ms are 30 years."""
SignedMs = Annotated[float, Meta(ge=-1e12, le=1e12)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
"""A rate, an energy, an error: nothing negative."""
Positive = Annotated[float, Meta(gt=0, le=1e18)]
Real = Annotated[float, Meta(ge=-1e18, le=1e18)]
Nats = Annotated[float, Meta(ge=0, le=100)]
"""A number of nats, whose exponential is still readable."""
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
SignedBytes = Annotated[int, Meta(ge=-(2**60), le=2**60)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Whole = Annotated[int, Meta(ge=-(2**62), le=2**62)]

Name = Annotated[str, Meta(max_length=10_000)]
"""What stands in one line: a device, a recipe, a version."""
Text = Annotated[str, Meta(max_length=4_000_000)]
Date = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?$", max_length=40)]
"""ISO 8601."""

Some = Annotated[tuple[T, ...], Meta(min_length=1, max_length=100_000)]
Many = Annotated[tuple[T, ...], Meta(max_length=1_000_000)]
Setting = bool | Whole | Real | Text | None | Annotated[list[Whole], Meta(max_length=100_000)]
