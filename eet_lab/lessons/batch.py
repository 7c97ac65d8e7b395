"""The batch that lessons run: four prompts, 3 to 124 tokens of the demo model, in the words that it knows."""

from __future__ import annotations

from typing import Any

from eet_lab.models import Model
from eet_lab.texts import Output, generate

PROMPTS = (
    "Return a list",
    "Open the file and read it line by line. If the file does not exist,",
    "The function takes two arguments. The first is the name of a module, the second is a dictionary of its "
    "attributes. When the name is not a string, a TypeError is raised; when the module cannot be found,",
    "An iterator is an object that represents a stream of data. Each call of its method returns the next item of the "
    "stream; when no more data is available, an exception is raised instead. A list is not an iterator, but it can "
    "give one: a new iterator each time that it is asked. This is why two loops over the same list do not disturb each "
    "other, and why a loop over a file, which is its own iterator, finds nothing when it runs for the second time. If "
    "you want to go through the lines of a file twice, then",
)
"""Ragged, as batches are."""

SHORT = ("Return a list", "If the file does not", "When the name is not a string,")
"""Short enough for a picture."""


def rows(model: Model) -> list[list[int]]:
    """Token ids of each prompt."""
    return [model.encode(prompt) for prompt in PROMPTS]


def lengths(model: Model) -> list[int]:
    """Tokens of each prompt."""
    return [len(row) for row in rows(model)]


def clipped(text: str) -> str:
    """The beginning of a text."""
    return text if len(text) <= 70 else text[:69].rstrip() + "…"


def warmed(model: Model, recipe: str, **settings: Any) -> Output:
    """The batch continued with a recipe, for the second time: the first run of anything is slower, and is dropped."""
    for _ in range(2):
        output = generate(model, PROMPTS, recipe=recipe, stop_at_eos=False, **settings)
    return output
