"""What is chosen: the techniques, each with a card and what it brought, the prompts, and settings of a generation."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from eet_lab.figures.ladder import Effect
from eet_lab.knobs import labels
from eet_lab.technique import Technique, is_in_all, listed, registry
from eet_lab.words import counted, plain
from eet_lab.workbench.choices import MOST_PROMPTS, State
from eet_lab.workbench.problems import FIELDS, Problem, is_at_fault

NUMERICS = {
    "exact": ("exact", "good", "The same numbers, bit by bit."),
    "reordered": ("reordered", "plain", "The same sums in another order: equal up to rounding."),
    "lossy": ("lossy", "warn", "Changes the numbers, within a stated bound."),
}

SENTENCE_END = re.compile(r"[;:.](?:\s|$)")
"""The end of a reason's first part, which is what a line has room for; the point in "9.0" is none."""
NEEDS_GPU = re.compile(r".* needs? (an NVIDIA GPU)\.?")
"""What is alike on many lines, which so need one line each: whatever needs the GPU, the technique does."""
NO_VALUES: Mapping[str, Any] = MappingProxyType({})


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
        "wrong": next(iter(state.wrong(name).values()), "") if state.is_on(name) else "",
        "blocked": blocked,
        "blocked_short": blocked and NEEDS_GPU.sub(r"needs \1", SENTENCE_END.split(blocked)[0]),
        "numerics": {"text": text, "kind": kind, "tip": tip},
        "needs": f"needs {', '.join(needed)}" if needed else "",
        "lacks": not (state.beyond_device(name) or all(map(state.is_on, technique.requires))),
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
    return f"{recipe}. “all” is every technique that can run here, but not: {', '.join(apart)}."


def _card(state: State, name: str, read_only: bool) -> dict[str, Any]:
    technique = state.technique(name)
    why = _blocked(state, name, read_only)
    lesson = technique.lesson
    return {
        "title": technique.title,
        "summary": technique.summary.replace("`", ""),
        "paragraphs": [pieces(paragraph) for paragraph in technique.card.split("\n\n")[1:]],
        "lesson": _lesson(lesson) if lesson else None,
        "source": _source(technique),
        "why": why,
        "knobs": knobs_state(technique, why is None and not read_only, state.field_values(name), state.wrong(name)),
    }


def _lesson(lesson: str) -> dict[str, str]:
    """A link to a lesson; for an app, which hides the code that the lesson is about, how to open it elsewhere."""
    number = lesson[:2]
    how = f"Lesson {number} has code to run, which an app hides. In a terminal: eet-lab lab --notebook {lesson}"
    return {"label": f"lesson {number}", "href": _address(lesson), "elsewhere": how}


def _address(lesson: str) -> str:
    """A lesson as a link from the notebook that runs: beside it, or where `eet-lab lab` serves the lessons."""
    name = f"{lesson}.ipynb"
    places = ("", "../", "../notebooks/")
    return next((f"{place}{name}" for place in places if Path(place, name).is_file()), name)


def pieces(paragraph: str) -> list[dict[str, Any]]:
    """A paragraph as text and what stands in `backticks`."""
    parts = re.split(r"`+([^`]+)`+", paragraph.replace("\n", " "))
    return [{"text": text, "code": i % 2 == 1} for i, text in enumerate(parts) if text]


def knobs_state(
    technique: Technique, enabled: bool, values: Mapping[str, Any] = NO_VALUES, wrong: Mapping[str, str] = NO_VALUES
) -> list[dict[str, Any]]:
    """The knobs that matter now, each with the control that suits it: a list, a number, a check box, else a text.

    `values` are what their fields hold where that is `wrong`, with the reason.
    """
    return [
        _knob(technique, name, limits, enabled)
        | {"value": _exact(values.get(name, getattr(technique, name))), "wrong": wrong.get(name, "")}
        for name, limits in technique.knobs.items()
        if technique.matters(name)
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
        "label": labels(technique)[name],
        "help": limits.get("help", ""),
        "unit": limits.get("unit", ""),
        "kind": kind,
        "options": [
            {"value": choice, "label": words.get(choice, str(choice))} for choice in limits.get("choices") or ()
        ],
        "low": limits.get("low"),
        "high": limits.get("high"),
        "step": "any" if isinstance(value, float) else 1,
        "enabled": enabled,
    }


@lru_cache(maxsize=64)
def _source(technique: Technique) -> str:
    """The technique's own code; empty where it was typed somewhere that keeps none.

    Its docstring is left out: that is what the card says above it.
    """
    try:
        text = textwrap.dedent(inspect.getsource(type(technique)))
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


def inputs_state(
    state: State,
    lengths: Sequence[int] | None,
    context: int | None,
    fits: Mapping[str, Any],
    read_only: bool,
    problem: Problem | None = None,
) -> dict[str, Any]:
    """`lengths` are the prompts' tokens, None before a model is there; `problem` is why nothing can start."""
    return {
        "prompts": _prompts(state, lengths, context),
        "generation": _generation(state, problem),
        "fits": dict(fits),
        "read_only": read_only,
    }


def _prompts(state: State, lengths: Sequence[int] | None, context: int | None) -> dict[str, Any]:
    new = state.generation["max_new_tokens"]
    new = new if isinstance(new, int) else 0
    known: Sequence[int | None] = lengths or [None] * len(state.prompts)
    over = [length is not None and context is not None and is_at_fault(length, new, context) for length in known]
    rows = [
        {"text": text, "tokens": length, "over": too_long}
        for text, length, too_long in zip(state.prompts, known, over, strict=True)
    ]
    summary, longest = _told(lengths), max(lengths or [0])
    total = f"Longest {longest:,} + {new:,} new = {longest + new:,} of {context:,}" if lengths and context else ""
    return {
        "summary": f"{summary}: too long" if any(over) else summary,
        "kind": "bad" if any(over) else "plain",
        "rows": rows,
        "sum": total,
        "over": context is not None and longest + new > context,
        "share": min((longest + max(new, 0)) / context, 1.0) if context else 0.0,
        "most": MOST_PROMPTS,
    }


def _told(lengths: Sequence[int] | None) -> str:
    if not lengths:
        return "none" if lengths is not None else ""
    longest = max(lengths)
    pads = sum(longest - length for length in lengths)
    span = counted(longest, "token") if min(lengths) == longest else f"{min(lengths):,} to {counted(longest, 'token')}"
    return f"{len(lengths):,}, {span}, {counted(pads, 'pad')} to equal length"


def _exact(value: Any) -> Any:
    """A value for the page, whose numbers are floats: a whole one that these would round goes as its digits."""
    return str(value) if isinstance(value, int) and abs(value) > MOST_EXACT else value


MOST_EXACT = 2**53 - 1
"""The largest whole number that a float tells from its neighbours."""


def _generation(state: State, problem: Problem | None) -> dict[str, Any]:
    values = {**state.generation, "repeats": state.repeats}
    temperature = values["temperature"]
    shown = plain(temperature) if isinstance(temperature, int | float) else temperature  # an empty field is ""
    new = values["max_new_tokens"]
    how = "greedy" if temperature == 0 else f"temperature {shown}, seed {values['seed']}"
    fields = [
        {
            "name": name,
            "label": label,
            "help": help,
            "value": _exact(values[name]),
            "step": step,
            "wrong": problem.text if problem and problem.setting == name else "",
        }
        for name, label, help, step in FIELDS
    ]
    return {
        "summary": f"{new:,} new, {how}" if isinstance(new, int) else f"{new} new, {how}",
        "kind": "bad" if any(field["wrong"] for field in fields) else "plain",
        "fields": fields,
        "stop": {
            "value": state.stop_at_eos,
            "label": "Stop at the end of a text",
            "help": "A row ends at a token with which the model ends a text.",
        },
    }
