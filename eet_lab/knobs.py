"""Knobs: the fields of a technique that the user may turn; what each may be, checked and read from words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, field, fields
from types import MappingProxyType
from typing import Any

from eet_lab.errors import RecipeError, did_you_mean

TICKED = {"True": "on", "False": "off"}
"""What a page calls the values of a box that can be ticked."""
KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a word"}
"""What a knob's value must be, in words."""


def knob(
    default: Any,
    help: str,
    *,
    choices: Iterable[Any] = (),
    low: float | None = None,
    high: float | None = None,
    label: str = "",
    unit: str = "",
    words: Mapping[Any, str] = MappingProxyType({}),
    when: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    at_least: str = "",
) -> Any:
    """A field of a technique that the user may turn: one of `choices`, or a number from `low` to `high`.

    `at_least` names another knob, a number that this one is never below. `label` and `unit` are what a page calls it,
    and `words` what it calls a choice. `when` names other knobs and their values: with others this one changes nothing,
    and a page leaves it out.
    """
    limits = {"help": help, "choices": tuple(choices), "low": low, "high": high, "at_least": at_least}
    told = {"label": label, "unit": unit, "words": words, "when": when}
    return field(default=default, metadata=MappingProxyType({**limits, **told}))


def turn_in_words(technique: Any, turn: str) -> str:
    """A turn such as "kv=paged" as a page calls it, "KV layout: pages"; as it stands where there is no such knob.

    `technique` is None where that is not known either.
    """
    name, _, value = turn.partition("=")
    told = next((f.metadata for f in fields(technique) if f.name == name), None) if technique else None
    if told is None or not told.get("label"):
        return turn
    words = TICKED | {str(choice): word for choice, word in told["words"].items()}
    label = told["label"] if told["label"][1:2].isupper() else told["label"][:1].lower() + told["label"][1:]
    return f"{label}: {words.get(value, value)}"


def labels(technique: Any) -> dict[str, str]:
    """What a page calls each knob of a technique, by name."""
    return {f.name: f.metadata.get("label") or f.name.replace("_", " ") for f in fields(technique)}


def check_knobs(technique: Any) -> None:
    """RecipeError where a technique's knob is not what it may be."""
    values = {f.name: getattr(technique, f.name) for f in fields(technique)}
    for _, why in wrong_knobs(technique, values):
        raise RecipeError(f"{technique.name}:{why}")


def wrong_knobs(
    technique: Any, values: Mapping[str, Any], called: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with such values of the knobs: whose, and why, in names of code or as knobs are `called`."""
    single = [(f.name, why) for f in fields(technique) if (why := _unfit(f, values[f.name]))]
    for name, why in single:
        yield (name,), f"{called.get(name, name)} {why}"
    for f in fields(technique):
        other = f.metadata.get("at_least")
        if not other or {f.name, other} & {name for name, _ in single}:
            continue
        if (value := values[f.name]) < (least := values[other]):
            this, that, gets = called.get(f.name, f.name), called.get(other, other), " = " if called else "="
            yield (
                (f.name, other),
                f"{this} is {value}, but it must be at least {that}, which is {least}. Give {this}{gets}{least} or "
                f"more, or {that}{gets}{value} or less.",
            )


def read_knobs(technique: Any, turns: Iterable[str]) -> dict[str, Any]:
    """Knobs by name from words such as "planner=gsoc"; RecipeError where there is no such knob, or no such value."""
    knobs = {f.name: f for f in fields(technique)}
    values: dict[str, Any] = {}
    for turn in turns:
        name, _, text = turn.partition("=")
        if name not in knobs:
            has = f"its knobs are {', '.join(knobs)}" if knobs else "it has no knobs"
            raise RecipeError(f"{technique.name} has no knob {name!r}; {has}.{did_you_mean(name, knobs)}")
        if name in values:
            raise RecipeError(f"{technique.name}:{name} is given twice; give it once.")
        kind: type = type(knobs[name].default)
        try:
            values[name] = {"True": True, "False": False}[text] if kind is bool else kind(text)
        except (ValueError, KeyError):
            raise RecipeError(f"{technique.name}:{name} is {text!r}, but it must be {_allowed(knobs[name])}.") from None
    return values


def _unfit(f: Field, value: Any) -> str:
    """Why a knob cannot have a value, whatever the others are; "" where it can."""
    kind, (choices, low, high) = type(f.default), _limits(f)
    if choices:
        # 1, 1.0 and True are equal, but only one of them is read back from the technique's words.
        fine = any(type(value) is type(choice) and value == choice for choice in choices)
        hint = _nearest(value, choices)
    else:
        fits, hint = type(value) is kind or (kind is float and type(value) is int), ""
        fine = fits and (low is None or value >= low) and (high is None or value <= high)
    return "" if fine else f"is {value!r}, but it must be {_allowed(f)}.{hint}"


def _nearest(value: Any, choices: Iterable[Any]) -> str:
    """What may have been meant: the choice itself where its text was given, else one that is written much like it."""
    if not isinstance(value, str):
        return ""
    meant = {str(choice): choice for choice in choices}
    if value in meant:
        return f" Give {meant[value]!r}, {KINDS.get(type(meant[value]), 'no text')}, rather than the text {value!r}."
    return did_you_mean(value, meant)


def _allowed(f: Field) -> str:
    """What a knob may be: its choices, or a kind of value and its limits."""
    kind, (choices, low, high) = type(f.default), _limits(f)
    if choices and kind is not bool:
        return f"one of {', '.join(map(str, choices))}"
    ends = [f"from {low}"] * (low is not None) + [f"to {high}"] * (high is not None)
    return " ".join([KINDS.get(kind, f"a {kind.__name__}"), *ends])


def _limits(f: Field) -> tuple[Any, Any, Any]:
    """A knob's choices, its lowest and its highest value; a field that is no `knob` has none."""
    return f.metadata.get("choices"), f.metadata.get("low"), f.metadata.get("high")
