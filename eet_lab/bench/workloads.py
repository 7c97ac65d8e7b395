"""Workloads: what is run, under names such as `gpt2-xl/b8/p16-512/n128`."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from eet_lab.errors import PromptError
from eet_lab.models import Model

PATTERN = re.compile(r"(?P<model>.+)/b(?P<batch>\d+)/p(?P<low>\d+)(?:-(?P<high>\d+))?/n(?P<new>\d+)")
PREFIX = "serve:"
SERVE_PATTERN = re.compile(
    r"serve:(?P<model>.+)/r(?P<requests>\d+)/p(?P<low>\d+)(?:-(?P<high>\d+))?/n(?P<new>\d+)/(?P<arrivals>\w+)"
)

DEMO_PROMPTS = (
    "Return",
    "Return a list of",
    "This module provides",
    "If the file does not exist, an exception is",
    "The following example shows how to open a file and read",
    "Raise ValueError if the argument is negative, and TypeError if it is",
    "class Counter:\n    def __init__(self, items):\n        self.items = list(items)\n\n    def __len__(self):\n"
    "        return",
    "When an iterator is exhausted, the function returns None. The optional argument specifies the default value, "
    "which is returned if the key is not found in the dictionary. If the key is found, its value is removed and "
    "returned. This is useful when several threads share",
)
"""Eight lengths, so that the batch is ragged; in the words of Python's documentation, which the demo model knows."""

MOST_TOKENS = 10_000_000  # of a workload's prompts: they are lists of Python's numbers


@dataclass(frozen=True)
class Workload:
    """A model, a batch of prompts of `low` to `high` tokens, evenly spaced, and new tokens for each.

    `str` and `parse` are inverse; one length is written once: `gpt2/b1/p128/n128`.
    """

    model: str
    batch: int
    low: int
    high: int
    new_tokens: int

    def __post_init__(self) -> None:
        check_sizes("workload", self.low, self.high, rows=self.batch, new_tokens=self.new_tokens)
        tokens = self.batch * (self.low + self.high) // 2
        if tokens > MOST_TOKENS:
            raise PromptError(
                f"{self.batch:,} prompts from {self.low:,} to {self.high:,} tokens are {tokens:,} in all, but a "
                f"workload has at most {MOST_TOKENS:,}. Take fewer rows, or shorter prompts."
            )

    @classmethod
    def parse(cls, text: str) -> Workload:
        """From its name; PromptError that shows the form."""
        found = PATTERN.fullmatch(text.strip())
        if found is None:
            raise PromptError(
                f"{text!r} is no workload. Write model/b<rows>/p<prompt tokens, one number or from-to>/n<new tokens>, "
                "for example gpt2-xl/b8/p16-512/n128."
            )
        numbers = {name: int(found[name] or found["low"]) for name in ("batch", "low", "high", "new")}
        return cls(found["model"], numbers["batch"], numbers["low"], numbers["high"], numbers["new"])

    def __str__(self) -> str:
        span = str(self.low) if self.low == self.high else f"{self.low}-{self.high}"
        return f"{self.model}/b{self.batch}/p{span}/n{self.new_tokens}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt, evenly spaced from `low` to `high`."""
        return evenly_spaced(self.low, self.high, self.batch)

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Random token ids of these lengths; the same for the same seed."""
        draw = random.Random(seed)
        return [[draw.randrange(vocab_size) for _ in range(length)] for length in self.lengths]


@dataclass(frozen=True)
class Requests:
    """A model, and so many requests with prompts of `low` to `high` tokens. `str` and `parse` are inverse."""

    model: str
    requests: int
    low: int
    high: int
    new_tokens: int
    arrivals: str = "all"

    def __post_init__(self) -> None:
        check_sizes("serve workload", self.low, self.high, requests=self.requests, new_tokens=self.new_tokens)
        if self.arrivals != "all":
            raise PromptError(f"arrivals is {self.arrivals!r}, but it must be 'all': all requests are there at once.")

    @classmethod
    def parse(cls, text: str) -> Requests:
        """From its name; PromptError that shows the form."""
        found = SERVE_PATTERN.fullmatch(text.strip())
        if found is None:
            raise PromptError(
                f"{text!r} is no serve workload. Write serve:model/r<requests>/p<prompt tokens, one number or from-to>/"
                "n<new tokens>/all, for example serve:llama-1b/r256/p100-1024/n512/all."
            )
        requests, low, high, new = (int(found[name] or found["low"]) for name in ("requests", "low", "high", "new"))
        return cls(found["model"], requests, low, high, new, found["arrivals"])

    def __str__(self) -> str:
        span = str(self.low) if self.low == self.high else f"{self.low}-{self.high}"
        return f"serve:{self.model}/r{self.requests}/p{span}/n{self.new_tokens}/{self.arrivals}"

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Random token ids, of random lengths; the same for the same seed."""
        draw = random.Random(seed)
        lengths = [draw.randint(self.low, self.high) for _ in range(self.requests)]
        return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def check_sizes(what: str, low: int, high: int, **counts: int) -> None:
    """PromptError where prompts of `low` to `high` tokens, or one of the counts, cannot be."""
    for name, value in (counts | {"prompt tokens": low}).items():
        if value < 1:
            raise PromptError(f"{name.replace('_', ' ')} of a {what}: {value}, but it must be at least 1.")
    if high < low:
        raise PromptError(f"Prompts from {low} to {high} tokens: the second must not be the smaller.")


def evenly_spaced(low: int, high: int, num: int) -> tuple[int, ...]:
    """`num` lengths from `low` to `high`, both among them."""
    return tuple(round(low + (high - low) * i / max(num - 1, 1)) for i in range(num))


def describe(name: str, rows: Sequence[Sequence[int]], new_tokens: int) -> str:
    """The workload's name for prompts that are there; only their shortest and longest length show."""
    lengths = [len(row) for row in rows]
    return str(Workload(name, len(rows), min(lengths), max(lengths), new_tokens))


def default_prompts(model: Model) -> list[str | list[int]]:
    """Eight ragged prompts: sentences where the model has a tokenizer, else random tokens."""
    if model.tokenizer is not None:
        return list(DEMO_PROMPTS)
    return list(Workload(model.name, 8, 2, 30, 1).prompts(model.config.vocab_size))
