"""Why nothing can start with the present choices, in the words of the page and with the fields that are at fault."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eet_lab.errors import EETError, RecipeError, first_line
from eet_lab.knobs import labels, wrong_knobs
from eet_lab.models import Model
from eet_lab.scheduling.request import to_fit
from eet_lab.technique import Recipe, Technique, registry
from eet_lab.words import counted

if TYPE_CHECKING:
    from eet_lab.workbench.choices import State

FIELDS = (
    ("max_new_tokens", "New tokens", "For every prompt.", 1),
    ("temperature", "Temperature", "0 is greedy: always the most likely token.", 0.1),
    ("top_k", "Top-k", "Sample from this many tokens, the most likely ones; 0: no limit.", 1),
    ("top_p", "Top-p", "Sample from the most likely tokens whose probabilities sum to this; 1: no limit.", 0.05),
    ("seed", "Seed", "The same seed gives the same samples.", 1),
    (
        "repeats",
        "Pairs of runs",
        "How many times Compare and Ladder time each recipe; 0: until the interval is narrow.",
        1,
    ),
)
"""The settings of a generation, each with its label, its help and its step."""
MOST_REPEATS = 50


@dataclass(frozen=True)
class Problem:
    """Why nothing can start; `setting` is the field of a generation that is at fault, "" where none is."""

    text: str
    setting: str = ""


def problem_of(state: State, model: Model, rows: Sequence[Sequence[int]]) -> Problem | None:
    """Why nothing can start with these choices, of prompts with these tokens; None when it can."""
    if not state.prompts:
        return Problem("There are no prompts: add one (an empty one starts from BOS).")
    return _of_settings(state, model) or _of_knobs(state) or _of_tokens(model, rows) or _of_length(state, model, rows)


def settled_recipe(state: State) -> Recipe:
    """What is switched on; RecipeError where a knob's field holds something else, which does not fit."""
    if problem := _of_knobs(state):
        raise RecipeError(problem.text)
    return state.recipe()


def misfits(kind: type[Technique], values: Mapping[str, Any]) -> dict[str, str]:
    """Which knobs of a technique cannot have these values, each with the reason in the page's words."""
    if found := {name: why for names, why in wrong_knobs(kind, values, labels(kind)) for name in names}:
        return found
    try:
        kind(**values)
    except Exception as error:  # noqa: BLE001  whatever a check of its own raises
        return dict.fromkeys(values, first_line(error))
    return {}


def _of_settings(state: State, model: Model) -> Problem | None:
    try:
        state.settings(model)
    except EETError as error:
        return _in_labels(str(error))
    if not isinstance(state.repeats, int) or not 0 <= state.repeats <= MOST_REPEATS:
        return _in_labels(
            f"repeats is {state.repeats}, but it must be a whole number from 1 to {MOST_REPEATS}, or 0 to "
            "measure until the interval is narrow."
        )
    return None


def _in_labels(problem: str) -> Problem:
    """What is wrong with a setting, which it calls by its name, with the label that its field has."""
    setting = next((name for name, *_ in FIELDS if problem.startswith(f"{name} is ")), "")
    for name, label, *_ in FIELDS:
        problem = re.sub(rf"\b{name}\b", label, problem)
    return Problem(problem, setting)


def _of_knobs(state: State) -> Problem | None:
    """Of techniques that are off, fields may hold anything."""
    for name in filter(state.is_on, registry()):
        for why in state.wrong(name).values():
            return Problem(f"{registry()[name].title}: {why}")
    return None


def _of_tokens(model: Model, rows: Sequence[Sequence[int]]) -> Problem | None:
    last = model.config.vocab_size - 1
    for number, row in enumerate(rows, 1):
        if strange := [token for token in row if not 0 <= token <= last]:
            return Problem(
                f"Prompt {number} holds the token {strange[0]}, but the model's vocabulary ends at {last}. "
                "Write other ids, or load the model with the tokenizer that it was trained with."
            )
    return None


def _of_length(state: State, model: Model, rows: Sequence[Sequence[int]]) -> Problem | None:
    new, context = state.generation["max_new_tokens"], model.config.context
    length, first = max((max(len(row), 1), -number) for number, row in enumerate(rows, 1))  # an empty one is BOS
    if length + new <= context:
        return None
    return Problem(
        f"Prompt {-first} has {counted(length, 'token')}; with {new:,} new ones that is {length + new:,}, past "
        f"the context of {context:,}. {to_fit(context - length)}",
        setting="" if new < context <= length else "max_new_tokens",
    )


def is_at_fault(length: int, new: int, context: int) -> bool:
    """Whether a prompt of so many tokens is too long: not where so many new ones leave no room for any prompt."""
    return length + new > context and not length < context <= new
