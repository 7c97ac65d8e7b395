"""Technique: one optimization. Recipe: a set of them, and the parts that they make together."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from eet_lab.errors import RecipeError, did_you_mean
from eet_lab.knobs import check_knobs, knob, read_knobs
from eet_lab.parts import Parts, replaced

__all__ = ["NUMERICS", "Recipe", "Technique", "everything", "knob", "known", "obstacle", "register", "registry"]

NUMERICS = ("exact", "reordered", "lossy")


@dataclass(frozen=True)
class Technique:
    """One optimization. The docstring is its card, the fields are its knobs; `apply` is pure.

    `requires` names techniques that must be on beside it; `numerics` is "exact", "reordered" (the same sums in another
    order) or "lossy"; `tolerance` is the bound that a lossy one states: how far its logits may be off, as a share of
    the largest; `headline` ones come first in every list. One that `wraps` changes how others' parts are run and not
    what they are: a slot that it changes stays whose it was.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    numerics: ClassVar[str] = "exact"
    tolerance: ClassVar[float] = 0.0
    stages: ClassVar[tuple[str, ...]] = ("generate",)
    headline: ClassVar[bool] = False
    wraps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_knobs(self)

    def apply(self, parts: Parts) -> Parts:
        """The parts with this technique in them."""
        raise NotImplementedError

    def unavailable(self, device: str = "cpu") -> str | None:
        """Why it cannot run on that kind of device ("cpu" or "cuda"), or None."""
        return None

    @property
    def card(self) -> str:
        """What the user reads: the docstring."""
        return inspect.cleandoc(type(self).__doc__ or "")

    @property
    def summary(self) -> str:
        """The card's first sentence."""
        return self.card.split("\n\n")[0].replace("\n", " ")

    @property
    def knobs(self) -> Mapping[str, Mapping[str, Any]]:
        """Each knob's help and limits, by name."""
        return {f.name: f.metadata for f in fields(self)}

    def __str__(self) -> str:
        turned = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ":".join([self.name, *turned])


@dataclass(frozen=True)
class Recipe:
    """Techniques in canonical order; the empty recipe is the baseline. `str(recipe)` and `Recipe.parse` are inverse."""

    techniques: tuple[Technique, ...] = ()

    def __post_init__(self) -> None:
        order = {name: i for i, name in enumerate(registry())}
        names = [t.name for t in self.techniques]
        if twice := [name for name in names if names.count(name) > 1]:
            raise RecipeError(f"{twice[0]} is named twice; name it once.")
        ordered = sorted(self.techniques, key=lambda t: order.get(t.name, len(order)))
        object.__setattr__(self, "techniques", tuple(ordered))
        for t in self.techniques:
            if missing := [name for name in t.requires if name not in names]:
                them = "that" if len(missing) == 1 else "those"
                raise RecipeError(
                    f"{t.name} needs {' and '.join(missing)}; turn {them} on as well, or leave {t.name} out."
                )
        self.parts  # noqa: B018  computed now, so that a conflict is told when the recipe is made

    @cached_property
    def parts(self) -> Parts:
        """The parts that the techniques make; RecipeError where two replace the same slot."""
        parts = Parts()
        owner: dict[str, str] = {}
        for t in self.techniques:
            after = t.apply(parts)
            for slot in () if t.wraps else replaced(parts, after):
                if owner.get(slot, t.name) not in (t.name, *t.requires):  # what it requires, it may refine
                    raise RecipeError(f"{owner[slot]} and {t.name} both replace {slot}; leave one of them out.")
                owner[slot] = t.name
            parts = after
        return parts

    @classmethod
    def parse(cls, text: str, device: str = "cpu") -> Recipe:
        """From words such as "all,-cuda_graphs,memory_reuse:planner=first_fit"; "" and "baseline" are the empty one.

        `all` is every technique that is available on `device`, not lossy, and free of conflicts with an earlier one;
        those of them that need a name with a minus go with it.
        """
        return cls(named(text, device))

    def check(self, device: str) -> Recipe:
        """The same recipe; RecipeError if one of its techniques cannot run on `device` ("cpu" or "cuda")."""
        check_runnable(self.techniques, device)
        return self

    def without(self, name: str) -> tuple[Recipe, tuple[str, ...]]:
        """The recipe less `name` and less all that needs it, and the names of what went with it."""
        also = _dependents(name, self.techniques)
        return Recipe(tuple(t for t in self.techniques if t.name not in (name, *also))), also

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.techniques)

    @property
    def lossy(self) -> bool:
        """Whether a technique of it changes more than the order of sums."""
        return any(t.numerics == "lossy" for t in self.techniques)

    @property
    def tolerance(self) -> float:
        """How far its logits may be off beyond rounding, as a share of the largest; 0 unless a technique is lossy."""
        return sum(t.tolerance for t in self.techniques)

    def __str__(self) -> str:
        return ",".join(map(str, self.techniques)) or "baseline"

    def __iter__(self) -> Iterator[Technique]:
        return iter(self.techniques)

    def __len__(self) -> int:
        return len(self.techniques)


_REGISTRY: dict[str, type[Technique]] = {}


def register(technique: type[Technique]) -> type[Technique]:
    """Make a technique known by its name, to the toggles and the command line alike. Usable as a decorator.

    Registering a name again replaces it, so that a notebook cell can be run again; a name of ours is taken.
    Errors: RecipeError for what is not a technique.
    """
    who = getattr(technique, "__name__", repr(technique))
    if not (isinstance(technique, type) and issubclass(technique, Technique)):
        raise RecipeError(f"{who} is not a technique: derive it from eet_lab.Technique.")
    if "__dataclass_fields__" not in vars(technique) or not technique.__dataclass_params__.frozen:  # type: ignore
        raise RecipeError(f"{who} is not a frozen dataclass: write @dataclass(frozen=True) between @register and it.")
    if technique.apply is Technique.apply:
        raise RecipeError(f"{who} has no apply: write `def apply(self, parts)`, which returns the changed parts.")
    for attribute in ("name", "title"):
        if not isinstance(getattr(technique, attribute, None), str):
            raise RecipeError(f"{who} has no {attribute}: give it one, `{attribute}: ClassVar[str] = ...`.")
    if not technique.name.isidentifier():
        raise RecipeError(
            f"{who}.name is {technique.name!r}, but it must be a word of letters, digits and underscores."
        )
    if technique.numerics not in NUMERICS:
        raise RecipeError(f"{who}.numerics is {technique.numerics!r}, but it must be one of {', '.join(NUMERICS)}.")
    if (taken := _REGISTRY.get(technique.name)) and _is_ours(taken) and not _is_ours(technique):
        raise RecipeError(f"The name {technique.name!r} is taken by a technique of EET Lab; choose another.")
    _REGISTRY[technique.name] = technique
    return technique


def _is_ours(technique: type[Technique]) -> bool:
    return technique.__module__.startswith("eet_lab.techniques.")


def registry() -> Mapping[str, type[Technique]]:
    """Every known technique by name, in canonical order: headline ones first, then as they were registered."""
    import eet_lab.techniques  # noqa: F401  registers ours

    headline = {name: t for name, t in _REGISTRY.items() if t.headline}
    return MappingProxyType(headline | _REGISTRY)


def known(name: str) -> type[Technique]:
    """The technique of that name; RecipeError if there is none."""
    if name not in registry():
        hint = did_you_mean(name, registry())
        if "=" in name:
            hint = " A knob follows its technique after a colon, as in memory_reuse:kv=paged:page=32."
        raise RecipeError(f"There is no technique {name!r}.{hint} Known ones: {', '.join(registry())}.")
    return registry()[name]


def named(text: str, device: str = "cpu") -> tuple[Technique, ...]:
    """The techniques that words such as `Recipe.parse`'s name; whether they fit together is not looked at."""
    chosen: dict[str, Technique] = {}
    by_name: set[str] = set()
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, *turns = word.split(":")
        if name == "baseline" and not turns:
            chosen.clear()
        elif name == "all" and not turns:
            chosen |= {t.name: t for t in everything(device).techniques if t.name not in chosen}
        elif name.startswith("-"):
            known(name[1:])
            rest = [t for t in chosen.values() if t.name not in by_name]
            for gone in (name[1:], *_dependents(name[1:], rest)):
                chosen.pop(gone, None)
        elif name in by_name:
            raise RecipeError(f"{name} is named twice in {text!r}; name it once.")
        else:
            chosen[name] = known(name)(**read_knobs(known(name), turns))
            by_name.add(name)
    return tuple(chosen.values())


def _dependents(name: str, techniques: Sequence[Technique]) -> tuple[str, ...]:
    """Those of `techniques` that need `name`, or one that needs it."""
    found = [name]
    for t in [*techniques] * len(techniques):
        if t.name not in found and set(t.requires) & set(found):
            found.append(t.name)
    return tuple(found[1:])


def obstacle(t: Technique, device: str) -> str | None:
    """Why a technique, or one that it requires, cannot run on `device`; None if it can."""
    if reason := t.unavailable(device):
        return reason
    needed = {name: obstacle(known(name)(), device) for name in t.requires}
    return next((f"it needs {name}, and {reason}" for name, reason in needed.items() if reason), None)


def check_runnable(techniques: Sequence[Technique], device: str) -> None:
    """RecipeError where some cannot run on `device`: all of them are named, and the first one's reason is told."""
    reasons = {t.name: reason for t in techniques if (reason := obstacle(t, device))}
    if reasons:
        name, reason = next(iter(reasons.items()))
        raise RecipeError(
            f"{name} cannot run on {device}: {reason.rstrip('.')}. Leave {' and '.join(reasons)} out of the recipe."
        )


def everything(device: str) -> Recipe:
    """Every technique that can run on `device`, is not lossy, and composes with those before it."""
    recipe = Recipe()
    for technique in registry().values():
        if technique.numerics == "lossy" or technique().unavailable(device):
            continue
        try:
            recipe = Recipe((*recipe.techniques, technique()))
        except RecipeError:
            continue
    return recipe


def less_than_all(recipe: str) -> str:
    """A recipe by what it lacks of `all`, every technique that loses nothing, and by what it has beside.

    `pre_padding,int8_weights` among three that lose nothing is `all,-mask_removal,-memory_reuse,int8_weights`.
    """
    words = {word.partition(":")[0]: word for word in recipe.split(",") if word}
    whole = [name for name, technique in registry().items() if technique().numerics != "lossy"]
    lacking = [f"-{name}" for name in whole if name not in words]
    beside = [word for name, word in words.items() if name not in whole or word != name]
    return ",".join(["all", *lacking, *beside])
