"""Technique: one optimization. Recipe: a set of them, and the parts that they make together."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from eet_lab.definition import NUMERICS, STAGES, WORDS, applied, check_definition, unavailable
from eet_lab.devices import KINDS, NAMES, kind_of
from eet_lab.errors import BrokenTechnique, RecipeError, did_you_mean
from eet_lab.knobs import check_knobs, knob, read_knobs
from eet_lab.models.config import Config
from eet_lab.ops import native
from eet_lab.parts import Parts, replaced
from eet_lab.words import told

__all__ = [
    "NUMERICS",
    "Recipe",
    "Technique",
    "TrainingKernels",
    "everything",
    "knob",
    "known",
    "obstacle",
    "register",
    "registry",
]


@dataclass(frozen=True)
class Technique:
    """One optimization. The docstring is its card, the fields are its knobs; `apply` is pure.

    `requires` names techniques that must be on beside it; `numerics` is "exact", "reordered" (the same sums in another
    order) or "lossy"; `tolerance` is the bound that a lossy one states: how far its logits may be off, as a share of
    the largest; `stages` tell what it is for, decoders ("generate"), encoders ("encode"), encoder-decoders ("seq2seq")
    or training ("train"); `headline` ones come first in every list. One that `wraps` changes how others' parts are run
    and not what they are: a slot that it changes stays whose it was. `in_all` is False for one that `all` leaves out,
    as it leaves out lossy ones: it serves other workloads than a batch that begins together. `lesson` is the notebook
    that explains it, without ".ipynb"; "" where there is none.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    lesson: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    numerics: ClassVar[str] = "exact"
    tolerance: ClassVar[float] = 0.0
    stages: ClassVar[tuple[str, ...]] = ("generate",)
    headline: ClassVar[bool] = False
    wraps: ClassVar[bool] = False
    in_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_knobs(self)

    def apply(self, parts: Parts) -> Parts:
        """The parts with this technique in them."""
        raise NotImplementedError

    def unavailable(self, device: str = "cpu") -> str | None:
        """Why it cannot run on that kind of device ("cpu" or "cuda"), or None."""
        return None

    def unfit(self, config: Config) -> str | None:
        """Why it cannot run such a model, or None: what the ops that it brings declare (`ops.fits`), and its stages."""
        reason = None
        with suppress(RecipeError):  # it wants other parts than the plain ones, or is broken: both are told elsewhere
            reason = applied(self, Parts()).ops_of(config.stage).unfit(config)
        if reason is None and config.stage not in self.stages:
            whom = f"{' and '.join(map(STAGES.__getitem__, self.stages))}, and this is not one of them"
            where = "inference alone, and this is training" if config.stage == "train" else whom
            reason = f"it is for {'training alone' if is_for_training(self) else where}"
        return reason

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

    def matters(self, knob: str) -> bool:
        """Whether a knob changes anything, as the others stand."""
        when = self.knobs[knob].get("when", {})
        return all(getattr(self, other) in values for other, values in when.items())

    def __str__(self) -> str:
        turned = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ":".join([self.name, *turned])


@dataclass(frozen=True)
class TrainingKernels(Technique):
    """What techniques share that have kernels of ours do a piece of training."""

    numerics: ClassVar[str] = "reordered"
    stages: ClassVar[tuple[str, ...]] = ("train",)

    def unavailable(self, device: str = "cpu") -> str | None:
        return native.available(device)


@dataclass(frozen=True)
class Recipe:
    """Techniques in canonical order; the empty recipe is the baseline. `str(recipe)` and `Recipe.parse` are inverse."""

    techniques: tuple[Technique, ...] = ()

    def __post_init__(self) -> None:
        order = {name: i for i, name in enumerate(registry())}
        if strange := [each for each in self.techniques if not isinstance(each, Technique)]:
            raise RecipeError(f"A Recipe is made of techniques, not of {strange[0]!r:.60}; Recipe.parse reads words.")
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
            after = applied(t, parts)
            for slot in () if t.wraps else replaced(parts, after):
                if owner.get(slot, t.name) not in (t.name, *t.requires):  # what it requires, it may refine
                    raise RecipeError(f"{owner[slot]} and {t.name} both replace {slot}; leave one of them out.")
                owner[slot] = t.name
            parts = after
        return parts

    @classmethod
    def parse(cls, text: str, device: str = "cpu", config: Config | None = None) -> Recipe:
        """Read words such as "all,-cuda_graphs,memory_reuse:planner=first_fit"; "" and "baseline" are the empty one.

        `all` is every technique that is available on `device`, `is_in_all`, and free of conflicts with an earlier one,
        and takes models such as `config`, if it is given; those of them that need a name with a minus go with it.
        """
        return cls(named(text, device, config))

    def check(self, device: str, config: Config | None = None) -> Recipe:
        """The same recipe; RecipeError if one of its techniques cannot run on `device` ("cpu" or "cuda"), or such a
        model.
        """
        check_runnable(self.techniques, device, config)
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
    Errors: RecipeError for what is no technique (`definition`), or requires what is not there.
    """
    who = getattr(technique, "__name__", repr(technique))
    if not (isinstance(technique, type) and issubclass(technique, Technique)):
        raise RecipeError(f"{who} is not a technique: derive it from eet_lab.Technique.")
    if technique.apply is Technique.apply:
        raise RecipeError(f"{who} has no apply: write `def apply(self, parts)`, which returns the changed parts.")
    if not is_ours(technique):
        check_definition(technique, registry())
    if (taken := _REGISTRY.get(technique.name)) and is_ours(taken) and not is_ours(technique):
        raise RecipeError(f"The name {technique.name!r} is taken by a technique of EET Lab; choose another.")
    _REGISTRY[technique.name] = technique
    return technique


def is_ours(technique: type[Technique] | Technique) -> bool:
    """Whether it came with the package."""
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
        if name.lower() in ("none", "off", "no"):
            hint = " A recipe without any is called baseline."
        many = len(registry())
        raise RecipeError(f"There is no technique {name!r}.{hint} `eet-lab techniques` lists all {many} of them.")
    return registry()[name]


def named(text: str, device: str = "cpu", config: Config | None = None) -> tuple[Technique, ...]:
    """The techniques that words such as `Recipe.parse`'s name; whether they fit together is not looked at."""
    if not isinstance(text, str):
        raise RecipeError(f"A recipe is {told(text)}, but it must be words, such as 'all' or 'pre_padding'.")
    if not isinstance(device, str) or kind_of(device) not in KINDS:
        raise RecipeError(f"device is {told(device)}, but it must be {NAMES}, such as model.device.")
    if config is not None and not isinstance(config, Config):
        raise RecipeError(f"config is {told(config)}, but it must be a model's: model.config, or None.")
    chosen: dict[str, Technique] = {}
    by_name: set[str] = set()
    has_all, before = False, ""
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, *turns = word.split(":")
        if name == "baseline" and not turns:
            chosen.clear()
        elif name == "all" and not turns:
            has_all = True
            chosen |= {t.name: t for t in everything(device, config).techniques if t.name not in chosen}
        elif name in WORDS:
            raise RecipeError(
                f"{word!r}: {name} has no knobs. A knob follows its technique, as in {name},memory_reuse:kv=paged."
            )
        elif name == "-all":
            raise RecipeError(f"{word!r} would leave nothing: write baseline for no technique.")
        elif name == "-baseline":
            raise RecipeError(
                f"{word!r} leaves nothing out: baseline is the recipe without any technique. Leave the word out."
            )
        elif name.startswith("-"):
            known(name[1:])
            if not (has_all or name[1:] in chosen):
                raise RecipeError(f"{word!r} leaves out what is not there. Name it after all, as in all,{word}.")
            rest = [t for t in chosen.values() if t.name not in by_name]
            for gone in (name[1:], *_dependents(name[1:], rest)):
                chosen.pop(gone, None)
        elif name in by_name:
            raise RecipeError(f"{name} is named twice in {text!r}; name it once.")
        else:
            _check_comma(before, word)
            chosen[name] = known(name)(**read_knobs(known(name), turns))
            by_name.add(name)
        before = word
    return tuple(chosen.values())


def _check_comma(before: str, word: str) -> None:
    """RecipeError for a word that is a knob of the technique in the word before it."""
    whose, knob = registry().get(before.partition(":")[0]), word.partition("=")[0]
    if whose and "=" in word and knob in {f.name for f in fields(whose)} and f":{knob}=" not in before:
        raise RecipeError(f"There is no technique {word!r}. It is a knob of {whose.name}: write {before}:{word}.")


def _dependents(name: str, techniques: Sequence[Technique]) -> tuple[str, ...]:
    """Those of `techniques` that need `name`, or one that needs it."""
    found = [name]
    for t in [*techniques] * len(techniques):
        if t.name not in found and set(t.requires) & set(found):
            found.append(t.name)
    return tuple(found[1:])


def obstacle(t: Technique, device: str, config: Config | None = None) -> str | None:
    """Why a technique, or one that it requires, cannot run on `device` or such a model, or is broken; else None."""
    if reason := _absent(t, device, config):
        return reason
    parts = Parts()
    try:
        for each in (*_required(t), t):
            parts = applied(each, parts)
    except BrokenTechnique as error:
        culprit = "it" if each is t else f"it needs {each.name}, which"
        return f"{culprit} is broken: {error.wrong}"
    except RecipeError as error:  # it does not go with what it requires
        return str(error)
    return None


def _absent(t: Technique, device: str, config: Config | None = None) -> str | None:
    """The same, but whether it is broken is not looked at."""
    if reason := unavailable(t, device) or (config and t.unfit(config)):
        return reason
    for name in t.requires:
        reason = _absent(registry()[name](), device, config) if name in registry() else f"there is no {name}"
        if reason:
            return f"it needs {name}, and {reason}"
    return None


def _required(t: Technique) -> list[Technique]:
    """What a technique needs, and what that needs, in canonical order."""
    names, last = {*t.requires}, set[str]()
    while names != last:
        last, names = names, names.union(*(known(name).requires for name in names))
    return [technique() for name, technique in registry().items() if name in names]


def unfit(device: str, config: Config) -> dict[str, str]:
    """What `all` leaves out for such a model and would not for another on that device, with the reasons."""
    meant = (t() for t in registry().values() if config.stage == "train" or not is_for_training(t))
    here = [t for t in meant if obstacle(t, device) is None]
    return {t.name: reason for t in here if (reason := obstacle(t, device, config))}


def check_runnable(techniques: Sequence[Technique], device: str, config: Config | None = None) -> None:
    """RecipeError where some cannot run on `device`, or such a model: all of them are named, and the first one's reason
    is told.

    That one is broken is told, with where it broke, by the recipe that it is put into.
    """
    reasons = {t.name: reason for t in techniques if (reason := _absent(t, device, config))}
    if reasons:
        name, reason = next(iter(reasons.items()))
        where = device if any(t.name == name and _absent(t, device) for t in techniques) else "this model"
        raise RecipeError(
            f"{name} cannot run on {where}: {reason.rstrip('.')}. Leave {' and '.join(reasons)} out of the recipe."
        )


def everything(device: str, config: Config | None = None) -> Recipe:
    """Every technique of `all` that can run on `device`, and such a model, and composes with those before it.

    `obstacle` says of the others why not.
    """
    recipe, training = Recipe(), config is not None and config.stage == "train"
    for technique in registry().values():
        if not is_in_all(technique, training) or obstacle(technique(), device, config):
            continue
        try:
            recipe = Recipe((*recipe.techniques, technique()))
        except RecipeError:
            continue
    return recipe


def is_in_all(technique: type[Technique] | Technique, training: bool = False) -> bool:
    """Whether `all` means this one too, where it can run; in training it means what is for training."""
    return technique.in_all and technique.numerics != "lossy" and (training or not is_for_training(technique))


def is_for_training(technique: type[Technique] | Technique) -> bool:
    """Whether it is for nothing else."""
    return technique.stages == ("train",)


def listed() -> tuple[str, ...]:
    """The names of all techniques that generate or encode, in canonical order: a page's list."""
    return tuple(name for name, technique in registry().items() if not is_for_training(technique))


def names_in_all() -> tuple[str, ...]:
    """The names of all techniques that `all` means somewhere."""
    return tuple(name for name, technique in registry().items() if is_in_all(technique))
