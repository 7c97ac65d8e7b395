"""Everything that is seen in a notebook: the workbench, figures of results, and what the lessons are made of."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"Workbench": "workbench", "plot": "figures"}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """`plot` alone must not load widgets, so each name is imported when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'eet_lab.panels' has no attribute {name!r}")
    return getattr(import_module(f"eet_lab.panels.{_HOMES[name]}"), name)
