"""Workloads: what is run, under names such as `gpt2-xl/b8/p16-512/n128`; those of single ops are in `ops.workload`."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, NamedTuple, Self

from eet_lab.errors import PromptError
from eet_lab.models import Model

OP, SERVE, ENCODE, ACCURACY = "op:", "serve:", "encode:", "accuracy:"
"""How workloads of a single op, of requests to a server, of texts for an encoder, and of accuracy begin."""

PARTS = {
    "model": (r"(?P<model>.+)", "{model}"),
    "b": (r"b(?P<num>\d+)", "b{num}"),
    "r": (r"r(?P<num>\d+)", "r{num}"),
    "t": (r"t(?P<num>\d+)", "t{num}"),
    "p": (r"p(?P<low>\d+)(?:-(?P<high>\d+))?", "p{span}"),
    "p-": (r"p(?P<low>\d+)-(?P<high>\d+)", "p{low}-{high}"),
    "n": (r"n(?P<new>\d+)", "n{new}"),
    "arrivals": (r"(?P<arrivals>\w+)", "{arrivals}"),
}
"""What a workload's name is made of, with slashes between: how each is read, and how it is written."""

VALUES = ("model", "num", "low", "high", "new", "arrivals")
"""The fields of a workload, in order, by the names that `PARTS` give them; some have fewer."""

FIRST_TOKEN = 5
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


class Form(NamedTuple):
    """How one kind of workload is called: `parts` of `PARTS` after `prefix`, `shown` to people with an `example`."""

    what: str
    counted: str  # what there are so many of
    parts: tuple[str, ...]
    shown: str
    example: str
    prefix: str = ""

    def read(self, text: str) -> list[Any]:
        """The values in a name, in order; PromptError that shows the form."""
        found = re.fullmatch(self.prefix + "/".join(PARTS[part][0] for part in self.parts), text.strip())
        if found is None:
            raise PromptError(
                f"{text!r} is no {self.what}. Write {self.prefix}{self.shown}, for example {self.prefix}{self.example}."
            )
        given = found.groupdict()
        given["high"] = given["high"] or given["low"]  # one length is both ends of the range
        return [value if name in ("model", "arrivals") else int(value) for name, value in given.items()]

    def write(self, values: Sequence[Any]) -> str:
        """The name of these values."""
        given = dict(zip(VALUES, values, strict=False))
        low, high = given["low"], given["high"]
        span = f"{low}" if low == high else f"{low}-{high}"
        return self.prefix + "/".join(PARTS[part][1].format(span=span, **given) for part in self.parts)


@dataclass(frozen=True)
class Named:
    """What workloads share: sizes that are checked, and a name; `str` and `parse` are inverse."""

    form: ClassVar[Form]

    def __post_init__(self) -> None:
        _, num, low, high, *new = astuple(self)
        counts = {self.form.counted: num} | ({"new_tokens": new[0]} if new else {})
        check_sizes(self.form.what, low, high, **counts)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From its name; PromptError that shows the form."""
        return cls(*cls.form.read(text))

    def __str__(self) -> str:
        return self.form.write(astuple(self))


@dataclass(frozen=True)
class Workload(Named):
    """A model, a batch of prompts of `low` to `high` tokens, evenly spaced, and new tokens for each.

    One length is written once: `gpt2/b1/p128/n128`.
    """

    form = Form(
        "workload",
        "rows",
        ("model", "b", "p", "n"),
        "model/b<rows>/p<prompt tokens, one number or from-to>/n<new tokens>",
        "gpt2-xl/b8/p16-512/n128",
    )

    model: str
    batch: int
    low: int
    high: int
    new_tokens: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt, evenly spaced from `low` to `high`."""
        return evenly_spaced(self.low, self.high, self.batch)

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Random token ids of these lengths; the same for the same seed."""
        draw = random.Random(seed)
        return [[draw.randrange(vocab_size) for _ in range(length)] for length in self.lengths]


class Drawn(Named):
    """A workload whose prompts have random lengths."""

    first_token: ClassVar[int] = 0

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Random token ids of random lengths, both uniform, in order of arrival; the same for the same seed."""
        _, num, low, high, *_ = astuple(self)
        draw = random.Random(seed)
        lengths = [draw.randint(low, high) for _ in range(num)]
        return [[draw.randrange(self.first_token, vocab_size) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Requests(Drawn):
    """A model, and so many requests with prompts of `low` to `high` tokens."""

    form = Form(
        "serve workload",
        "requests",
        ("model", "r", "p", "n", "arrivals"),
        "model/r<requests>/p<prompt tokens, one number or from-to>/n<new tokens>/all",
        "llama-1b/r256/p100-1024/n512/all",
        SERVE,
    )

    model: str
    requests: int
    low: int
    high: int
    new_tokens: int
    arrivals: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arrivals != "all":
            raise PromptError(f"arrivals is {self.arrivals!r}, but it must be 'all': all requests are there at once.")


@dataclass(frozen=True)
class Stream(Drawn):
    """Requests of one prompt each, one after the other: of `low` to `high` tokens, and `new_tokens` for each."""

    form = Form(
        "stream",
        "requests",
        ("model", "r", "p-", "n"),
        "model/r<requests>/p<prompt tokens, from-to>/n<new tokens>",
        "gpt2-xl/r200/p1-960/n16",
    )

    model: str
    requests: int
    low: int
    high: int
    new_tokens: int


@dataclass(frozen=True)
class Texts(Drawn):
    """An encoder, and so many texts of `low` to `high` tokens."""

    form = Form(
        "workload of texts",
        "texts",
        ("model", "t", "p"),
        "model/t<texts>/p<tokens of each, one number or from-to>",
        "bert-base/t2048/p5-500",
        ENCODE,
    )
    first_token = FIRST_TOKEN

    model: str
    texts: int
    low: int
    high: int


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
