"""Frozen dataclasses to JSON and back, checked against their type hints."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any


def encode(value: Any) -> Any:
    """What `json` can write: dataclasses as objects, tuples as lists."""
    if is_dataclass(value):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {name: encode(item) for name, item in value.items()}
    return value


def decode(kind: Any, data: Any, where: str = "result") -> Any:
    """`data` as a value of type `kind`; ValueError that names the place where they part."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        [kind] = (arg for arg in args if arg is not type(None))
        return None if data is None else decode(kind, data, where)
    if origin is typing.Literal:
        return _checked(data in args, data, where, f"one of {', '.join(map(str, args))}")
    if origin is tuple:
        _checked(isinstance(data, list), data, where, "a list")
        kinds = args[:1] * len(data) if args[1:] == (...,) else args
        _checked(len(kinds) == len(data), data, where, f"a list of {len(kinds)}")
        pairs = enumerate(zip(kinds, data, strict=True))
        return tuple(decode(k, item, f"{where}[{i}]") for i, (k, item) in pairs)
    if origin is dict:
        _checked(isinstance(data, dict), data, where, "an object")
        return {name: decode(args[1], item, f"{where}.{name}") for name, item in data.items()}
    if is_dataclass(kind):
        return _decode_fields(kind, data, where)
    number = (int, float) if kind is float else kind
    _checked(
        isinstance(data, number) and (kind is bool or not isinstance(data, bool)), data, where, f"a {kind.__name__}"
    )
    return kind(data)


def _decode_fields(kind: Any, data: Any, where: str) -> Any:
    _checked(isinstance(data, dict), data, where, "an object")
    hints, values = typing.get_type_hints(kind), {}
    for f in fields(kind):
        if f.name in data:
            values[f.name] = decode(hints[f.name], data[f.name], f"{where}.{f.name}")
        elif f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{where} has no {f.name}")
    if unknown := sorted(data.keys() - hints.keys()):
        raise ValueError(f"{where} has {unknown[0]}, which this version does not know")
    return kind(**values)


def _checked(fine: bool, data: Any, where: str, wanted: str) -> Any:
    if not fine:
        raise ValueError(f"{where} is {str(data)[:40]!r}, not {wanted}")
    return data
