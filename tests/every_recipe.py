"""Going through the recipes that a set of techniques makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from eet_lab.technique import Recipe, registry


def every_set(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every set of these techniques, whether or not they fit together."""
    for count in range(len(names) + 1):
        yield from combinations(names, count)


def needs(name: str) -> set[str]:
    """A technique, and all that it builds on."""
    return {name}.union(*map(needs, registry()[name].requires))


def is_whole(names: Sequence[str]) -> bool:
    """Whether each has beside it what it requires."""
    return all(set(registry()[name].requires) <= set(names) for name in names)


def every_recipe(names: Sequence[str]) -> list[str]:
    """The recipes of all whole sets. One whose techniques conflict is an error here, and not left out unseen."""
    return [str(Recipe.parse(",".join(chosen))) for chosen in every_set(names) if is_whole(chosen)]


def with_every_store(recipes: Sequence[str]) -> list[str]:
    """The same, and each that has a KV cache of its own also with its keys and values in pages."""
    paged = (words.replace("memory_reuse", "memory_reuse:kv=paged") for words in recipes)
    return list(dict.fromkeys((*recipes, *paged)))
