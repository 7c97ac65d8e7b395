"""Recipes in words: a label for a chart or a row, and what a recipe lacks of `all`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from eet_lab.devices import kind_of
from eet_lab.knobs import turn_in_words
from eet_lab.models.config import Config
from eet_lab.technique import is_in_all, is_ours, names_in_all, obstacle, registry


def less_than_all(recipe: str) -> str:
    """A recipe by what it lacks of `all`, every technique that loses nothing, and by what it has beside.

    `pre_padding,int8_weights` among three that lose nothing is `all,-mask_removal,-memory_reuse,int8_weights`.
    """
    words = {word.partition(":")[0]: word for word in recipe.split(",") if word}
    whole = names_in_all()
    lacking = [f"-{name}" for name in whole if name not in words]
    beside = [word for name, word in words.items() if name not in whole or word != name]
    return ",".join(["all", *lacking, *beside])


FEW_LACKING = 3
"""A recipe that lacks more of `all` than this, or half of it, is told by what it has."""


def short_form(recipe: str, device: str, config: Config | None = None) -> str:
    """A recipe as a label: "baseline", "all", "all - mask removal", "pre-padding + memory reuse (KV layout: pages)".

    `all` is every technique of ours that loses nothing and can run on that kind of device ("cpu" or "cuda"), whichever
    machine this is, and such a model, where `config` is given: `config.in_training` of one that is trained. Any text
    gives a label: names that are not known here stay as they are.
    """
    words, whole = dict(_words_of(recipe)), _all_of_ours(kind_of(device), config)
    lacking = [name for name in whole if name not in words]
    beside = [_label(name, knobs) for name, knobs in words.items() if name not in whole or knobs]
    if words and len(lacking) <= FEW_LACKING and 2 * len(lacking) < len(whole):
        return "".join(["all", *(f" - {_label(name)}" for name in lacking), *(f" + {label}" for label in beside)])
    return in_titles(recipe)


@lru_cache(maxsize=64)
def _all_of_ours(kind: str, config: Config | None) -> tuple[str, ...]:
    """What `all` means on a kind of device, which no cell changes: a page asks with each of its labels."""
    training = config is not None and config.stage == "train"
    ours = (t() for t in registry().values() if is_ours(t) and is_in_all(t, training))
    fitting = (t for t in ours if config is None or t.unfit(config) is None)
    return tuple(t.name for t in fitting if kind == "cuda" or obstacle(t, "cpu") is None)


def with_labels(text: str, device: str) -> str:
    """A text in which recipes stand, each as its label."""
    name = rf"(?:{'|'.join(registry())})(?::[^\s,:]+)*"
    return re.sub(rf"\b{name}(?:,{name})*(?!\w)", lambda found: short_form(found[0], device), text)


def in_titles(recipe: str) -> str:
    """The same with every title, and no "all"."""
    return " + ".join(_label(name, knobs) for name, knobs in _words_of(recipe)) or "baseline"


def names_of(recipe: str) -> set[str]:
    """Which techniques a recipe names, without their knobs; any text will do."""
    return {name for name, _ in _words_of(recipe)}


def _words_of(recipe: str) -> Iterator[tuple[str, str]]:
    """Names of techniques, each with its knobs in words."""
    for name, *turns in (word.split(":") for word in recipe.split(",") if word not in ("", "baseline")):
        yield name, ", ".join(turn_in_words(registry().get(name), turn) for turn in turns)


def _label(name: str, knobs: str = "") -> str:
    """A technique in the middle of a line: its title, whose first letter stays large only in an abbreviation."""
    title = registry()[name].title if name in registry() else name
    title = title if title[1:2].isupper() else title[:1].lower() + title[1:]
    return f"{title} ({knobs})" if knobs else title
