"""What a technique's own code must be: its class when it is registered, and its parts when it is applied.

Whoever writes one writes it in a cell, so each error names what is wrong and what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eet_lab.devices import kind_of
from eet_lab.errors import BrokenTechnique, RecipeError, did_you_mean, first_line
from eet_lab.parts import Parts, misfit
from eet_lab.scheduling.whole import is_real

NUMERICS = ("exact", "reordered", "lossy")
STAGES = {"generate": "decoders", "encode": "encoders", "seq2seq": "encoder-decoders", "train": "training"}
"""What a technique may be for, in words."""
WORDS = ("all", "baseline")
"""What a recipe may hold beside the names of techniques."""


def check_definition(technique: Any, known: Mapping[str, Any]) -> None:
    """RecipeError where a technique's class lacks something; `known` are the classes that there are, by name."""
    who = technique.__name__
    if "__dataclass_fields__" not in vars(technique) or not technique.__dataclass_params__.frozen:
        raise RecipeError(f"{who} is not a frozen dataclass: write @dataclass(frozen=True) between @register and it.")
    for attribute in ("name", "title"):
        if not isinstance(getattr(technique, attribute, None), str):
            raise RecipeError(f"{who} has no {attribute}: give it one, `{attribute}: ClassVar[str] = ...`.")
    if not technique.name.isidentifier():
        raise RecipeError(
            f"{who}.name is {technique.name!r}, but it must be a word of letters, digits and underscores."
        )
    if technique.name in WORDS:
        raise RecipeError(
            f"{who}.name is {technique.name!r}, which stands for other things in a recipe; choose another."
        )
    if technique.numerics not in NUMERICS:
        raise RecipeError(f"{who}.numerics is {technique.numerics!r}, but it must be one of {', '.join(NUMERICS)}.")
    bound = technique.tolerance
    if not is_real(bound) or bound < 0:
        raise RecipeError(
            f"{who}.tolerance is {bound!r}, but it must be a number from 0 on: how far the logits of a lossy technique "
            "may be off, as a share of the largest."
        )
    if not isinstance(technique.stages, tuple) or not technique.stages or set(technique.stages) - STAGES.keys():
        raise RecipeError(
            f"{who}.stages is {technique.stages!r:.60}, but it must be a tuple of some of {', '.join(STAGES)}, as in "
            "('generate',) with its comma."
        )
    _check_requires(technique, known)
    try:
        technique()
    except RecipeError:
        raise
    except Exception as error:  # whatever a constructor of another's raises
        raise RecipeError(
            f"{who}() fails with {_told(error)}. Give every field a default: `knob(default, help)`."
        ) from error


def _check_requires(technique: Any, known: Mapping[str, Any]) -> None:
    who, requires = technique.__name__, technique.requires
    if not isinstance(requires, tuple) or not all(isinstance(name, str) for name in requires):
        raise RecipeError(
            f"{who}.requires is {requires!r}, but it must be a tuple of names, as in ('pre_padding',) with its comma."
        )
    if technique.name in requires:
        raise RecipeError(f"{who} requires itself; leave {technique.name!r} out of its requires.")
    for name in requires:
        if name not in known:
            hint = did_you_mean(name, known)
            raise RecipeError(f"{who} requires {name!r}, which is not registered.{hint} Register that one first.")
    if way := _way(requires, technique.name, known):
        raise RecipeError(f"{who} requires itself, by way of {' and '.join(way)}; leave one of them out of a requires.")


def _way(names: Sequence[str], to: str, known: Mapping[str, Any]) -> list[str]:
    """How one gets from one of `names` to `to` by what each requires; empty where one does not."""
    for name in names:
        if name in known:
            further = known[name].requires
            if to in further:
                return [name]
            if way := _way(further, to, known):
                return [name, *way]
    return []


def applied(technique: Any, parts: Parts) -> Parts:
    """The parts with a technique in them; BrokenTechnique where its `apply` does not make any.

    A RecipeError that `apply` raises itself says with which parts the technique does not go.
    """
    try:
        after = technique.apply(parts)
    except RecipeError:
        raise
    except Exception as error:  # whatever another's code raises
        raise BrokenTechnique(technique.name, f"its apply raised {_told(error)}") from error
    if not isinstance(after, Parts):
        raise BrokenTechnique(technique.name, f"its apply returned {after!r:.60}, but it must return the changed Parts")
    if wrong := misfit(after):
        raise BrokenTechnique(technique.name, f"its apply returned Parts whose {wrong}")
    return after


def unavailable(technique: Any, device: str) -> str | None:
    """Why it says that it cannot run on a device of that kind; None where it says that it can."""
    try:
        return technique.unavailable(kind_of(device))
    except Exception as error:  # noqa: BLE001  whatever another's code raises
        return f"it is broken: its unavailable raised {_told(error)}"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
