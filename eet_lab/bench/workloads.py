"""Workloads: what is run, under names such as `gpt2-xl/b8/p16-512/n128`."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eet_lab.errors import PromptError
from eet_lab.models import Model

SERVE, ENCODE = "serve:", "encode:"
"""How workloads of requests to a server, and of texts for an encoder, begin."""
PARTS = {
    "model": r"(?P<model>.+)",
    "b": r"b(?P<num>\d+)",
    "r": r"r(?P<num>\d+)",
    "t": r"t(?P<num>\d+)",
    "p": r"p(?P<low>\d+)(?:-(?P<high>\d+))?",
    "p-": r"p(?P<low>\d+)-(?P<high>\d+)",
    "n": r"n(?P<new>\d+)",
    "arrivals": r"(?P<arrivals>\w+)",
}
"""What a workload's name is made of, with slashes between."""

FIRST_WORD = 5
"""Before it RoBERTa has special tokens; transformers numbers positions by where it finds the one for padding."""

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

    @classmethod
    def parse(cls, text: str) -> Workload:
        """From its name; PromptError that shows the form."""
        form = "model/b<rows>/p<prompt tokens, one number or from-to>/n<new tokens>"
        found = _parsed(text, "model/b/p/n", f"workload. Write {form}, for example gpt2-xl/b8/p16-512/n128")
        return cls(found["model"], *_numbers(found, "num", "low", "high", "new"))

    def __str__(self) -> str:
        return f"{self.model}/b{self.batch}/p{_span(self)}/n{self.new_tokens}"

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
        form = "serve:model/r<requests>/p<prompt tokens, one number or from-to>/n<new tokens>/all"
        told = f"serve workload. Write {form}, for example serve:llama-1b/r256/p100-1024/n512/all"
        found = _parsed(text, "model/r/p/n/arrivals", told, SERVE)
        requests, low, high, new_tokens = _numbers(found, "num", "low", "high", "new")
        return cls(found["model"], requests, low, high, new_tokens, found["arrivals"])

    def __str__(self) -> str:
        return f"{SERVE}{self.model}/r{self.requests}/p{_span(self)}/n{self.new_tokens}/{self.arrivals}"

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Random token ids, of random lengths; the same for the same seed."""
        return _drawn(self.requests, self.low, self.high, vocab_size, seed)


@dataclass(frozen=True)
class Stream:
    """Requests of one prompt each, one after the other: of `low` to `high` tokens, and `new_tokens` for each.

    `str` and `parse` are inverse: `gpt2-xl/r200/p1-960/n16`.
    """

    model: str
    requests: int
    low: int
    high: int
    new_tokens: int

    def __post_init__(self) -> None:
        check_sizes("stream", self.low, self.high, requests=self.requests, new_tokens=self.new_tokens)

    @classmethod
    def parse(cls, text: str) -> Stream:
        """From its name; PromptError that shows the form."""
        form = "model/r<requests>/p<prompt tokens, from-to>/n<new tokens>"
        found = _parsed(text, "model/r/p-/n", f"stream. Write {form}, for example gpt2-xl/r200/p1-960/n16")
        return cls(found["model"], *_numbers(found, "num", "low", "high", "new"))

    def __str__(self) -> str:
        return f"{self.model}/r{self.requests}/p{self.low}-{self.high}/n{self.new_tokens}"

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Random token ids of random lengths; the same for the same seed."""
        return _drawn(self.requests, self.low, self.high, vocab_size, seed)


@dataclass(frozen=True)
class Texts:
    """An encoder, and so many texts of `low` to `high` tokens. `str` and `parse` are inverse."""

    model: str
    texts: int
    low: int
    high: int

    def __post_init__(self) -> None:
        check_sizes("workload of texts", self.low, self.high, texts=self.texts)

    @classmethod
    def parse(cls, text: str) -> Texts:
        """From its name; PromptError that shows the form."""
        form = "encode:model/t<texts>/p<tokens of each, one number or from-to>"
        told = f"workload of texts. Write {form}, for example encode:bert-base/t2048/p5-500"
        found = _parsed(text, "model/t/p", told, ENCODE)
        return cls(found["model"], *_numbers(found, "num", "low", "high"))

    def __str__(self) -> str:
        return f"{ENCODE}{self.model}/t{self.texts}/p{_span(self)}"

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Random token ids of random lengths, in order of arrival; the same for the same seed."""
        return _drawn(self.texts, self.low, self.high, vocab_size, seed, first=FIRST_WORD)


def _parsed(text: str, form: str, told: str, prefix: str = "") -> dict[str, str]:
    """What each part of a workload's name says; PromptError that it is no such workload, and what is."""
    found = re.fullmatch(prefix + "/".join(PARTS[part] for part in form.split("/")), text.strip())
    if found is None:
        raise PromptError(f"{text!r} is no {told}.")
    return {name: value for name, value in found.groupdict().items() if value is not None}


def _numbers(found: Mapping[str, str], *names: str) -> list[int]:
    """The numbers of a name; where one length is written, it is both ends of the range."""
    return [int(found.get(name, found["low"])) for name in names]


def _span(workload: Workload | Requests | Texts) -> str:
    return str(workload.low) if workload.low == workload.high else f"{workload.low}-{workload.high}"


def _drawn(num: int, low: int, high: int, vocab_size: int, seed: int, first: int = 0) -> list[list[int]]:
    """Token ids from `first` on; lengths and ids are uniform."""
    draw = random.Random(seed)
    lengths = [draw.randint(low, high) for _ in range(num)]
    return [[draw.randrange(first, vocab_size) for _ in range(length)] for length in lengths]


def check_sizes(what: str, low: int, high: int, **counts: int) -> None:
    """PromptError where prompts of `low` to `high` tokens, or a count, cannot be; the first counts prompts."""
    for name, value in (counts | {"prompt tokens": low}).items():
        if value < 1:
            raise PromptError(f"{name.replace('_', ' ')} of a {what}: {value}, but it must be at least 1.")
    if high < low:
        raise PromptError(f"Prompts from {low} to {high} tokens: the second must not be the smaller.")
    name, num = next(iter(counts.items()))
    if (tokens := num * (low + high) // 2) > MOST_TOKENS:
        raise PromptError(
            f"{num:,} prompts from {low:,} to {high:,} tokens are {tokens:,} in all, but a {what} has at most "
            f"{MOST_TOKENS:,}. Take fewer {name}, or shorter prompts."
        )


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
