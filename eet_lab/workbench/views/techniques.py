"""The list of techniques: a switch each, what it brought in the last ladder, and the card of the one that is chosen."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eet_lab.figures.ladder import Effect
from eet_lab.technique import Technique, is_in_all, listed, registry
from eet_lab.workbench.choices import State

NUMERICS = {
    "exact": ("exact", "good", "The same numbers, bit by bit."),
    "reordered": ("reordered", "plain", "The same sums in another order: equal up to rounding."),
    "lossy": ("lossy", "warn", "Changes the numbers, within a stated bound."),
}

SENTENCE_END = re.compile(r"[;:.](?:\s|$)")
"""The end of a reason's first part, which is what a line has room for; the point in "9.0" is none."""


def techniques_state(
    state: State, selected: str, effects: Mapping[str, Effect], effects_of: str, recipe: str, read_only: bool
) -> dict[str, Any]:
    """All techniques in canonical order; one that was registered in a cell appears like ours."""
    selected = selected if selected in listed() else listed()[0]
    return {
        "list": [_row(state, name, effects.get(name), read_only) for name in listed()],
        "effects_of": effects_of,
        "selected": selected,
        "card": _card(state, selected, read_only),
        "recipe": recipe,
        "recipe_tip": _meaning(recipe),
        "read_only": read_only,
    }


def _row(state: State, name: str, effect: Effect | None, read_only: bool) -> dict[str, Any]:
    technique = state.technique(name)
    text, kind, tip = NUMERICS[technique.numerics]
    needed = [registry()[other].title for other in _needed(technique)]
    blocked = _blocked(state, name, read_only)
    return {
        "name": name,
        "title": technique.title,
        "on": state.is_on(name),
        "blocked": blocked,
        "blocked_short": blocked and SENTENCE_END.split(blocked)[0],
        "numerics": {"text": text, "kind": kind, "tip": tip},
        "needs": f"needs {', '.join(needed)}" if needed else "",
        "summary": technique.summary.replace("`", ""),
        "effect": None if effect is None else vars(effect) | {},
    }


def _blocked(state: State, name: str, read_only: bool) -> str | None:
    """Why a technique cannot be on; of a kept run, whose switches stay, what its own device could not do."""
    return state.beyond_device(name) if read_only else state.blocked(name)


def _needed(technique: Technique) -> list[str]:
    """What it requires, without what these require themselves."""
    needed = [name for name in technique.requires if name in registry()]
    return [name for name in needed if not any(name in registry()[other].requires for other in needed)]


def _meaning(recipe: str) -> str:
    """A recipe's label with what its "all" leaves out."""
    if not recipe.startswith("all"):
        return recipe
    apart = [registry()[name].title for name in listed() if not is_in_all(registry()[name])]
    return f"{recipe}. “all” is every technique that loses nothing and can run here, but not: {', '.join(apart)}."


def _card(state: State, name: str, read_only: bool) -> dict[str, Any]:
    technique = state.technique(name)
    why = _blocked(state, name, read_only)
    lesson = technique.lesson
    return {
        "title": technique.title,
        "summary": technique.summary.replace("`", ""),
        "paragraphs": [pieces(paragraph) for paragraph in technique.card.split("\n\n")[1:]],
        "lesson": {"label": f"lesson {lesson[:2]}", "href": _address(lesson)} if lesson else None,
        "source": _source(type(technique)),
        "why": why,
        "knobs": knobs_state(technique, enabled=why is None and not read_only),
    }


def _address(lesson: str) -> str:
    """A lesson as a link from the notebook that runs: beside it, or where `eet-lab lab` serves the lessons."""
    name = f"{lesson}.ipynb"
    places = ("", "../", "../notebooks/")
    return next((f"{place}{name}" for place in places if Path(place, name).is_file()), name)


def pieces(paragraph: str) -> list[dict[str, Any]]:
    """A paragraph as text and what stands in `backticks`."""
    parts = re.split(r"`+([^`]+)`+", paragraph.replace("\n", " "))
    return [{"text": text, "code": i % 2 == 1} for i, text in enumerate(parts) if text]


def knobs_state(technique: Technique, enabled: bool) -> list[dict[str, Any]]:
    """The knobs that matter now, each with the control that suits it: a list, a number, a check box, else a text."""
    return [
        _knob(technique, name, limits, enabled) for name, limits in technique.knobs.items() if technique.matters(name)
    ]


def _knob(technique: Technique, name: str, limits: Mapping[str, Any], enabled: bool) -> dict[str, Any]:
    value = getattr(technique, name)
    words = limits.get("words", {})
    kind = "text"
    if limits.get("choices") and not isinstance(value, bool):
        kind = "choice"
    elif isinstance(value, bool):
        kind = "check"
    elif isinstance(value, (int, float)):
        kind = "number"
    return {
        "name": name,
        "label": limits.get("label") or name.replace("_", " "),
        "help": limits.get("help", ""),
        "unit": limits.get("unit", ""),
        "kind": kind,
        "options": [
            {"value": choice, "label": words.get(choice, str(choice))} for choice in limits.get("choices") or ()
        ],
        "value": value,
        "low": limits.get("low"),
        "high": limits.get("high"),
        "step": "any" if isinstance(value, float) else 1,
        "enabled": enabled,
    }


def _source(technique: type[Technique]) -> str:
    """The technique's own code; empty where it was typed somewhere that keeps none.

    Its docstring is left out: that is what the card says above it.
    """
    try:
        text = textwrap.dedent(inspect.getsource(technique))
        [tree] = ast.parse(text).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    lines = text.rstrip().split("\n")
    if isinstance(tree, ast.ClassDef) and ast.get_docstring(tree) and len(tree.body) > 1:
        told = tree.body[0]
        del lines[told.lineno - 1 : told.end_lineno]
        if not lines[told.lineno - 1].strip():
            del lines[told.lineno - 1]
    return "\n".join(lines)
