"""Workloads: what is run, under names such as `gpt2-xl/b8/p16-512/n128`; `op_workloads` has those of single ops."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from eet_lab.bench.measured import environment
from eet_lab.bench.op_workloads import OP, TIMED_CASES, OpWorkload, evenly_spaced
from eet_lab.bench.rows import ACCURACY, TRAIN
from eet_lab.bench.timing import check_repeats
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.errors import PromptError
from eet_lab.models import Model
from eet_lab.models.config import EncoderConfig
from eet_lab.naming import Form
from eet_lab.scheduling.traffic import FIRST_TOKEN
from eet_lab.texts import Prompts, as_rows
from eet_lab.words import counted

SERVE, ENCODE = "serve:", "encode:"
"""How workloads of requests to a server, and of texts for an encoder, begin."""

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


SPAN = "/p<low prompt tokens>[-<high prompt tokens>]"  # one length is written once
RANGE = "/p<low prompt tokens>-<high prompt tokens>"
SHARED = "[/shared<shared shared tokens>]"
NEW = "/n<new_tokens new tokens>"


class Kind(NamedTuple):
    """What one kind of workload is called, how its names are formed, and an example."""

    what: str
    form: Form
    example: str


def _kind(what: str, form: str, example: str, prefix: str = "") -> Kind:
    """Names begin with `prefix` and a model."""
    return Kind(what, Form(f"{prefix}<model model>/{form}", model=".+", arrivals=r"\w+"), prefix + example)


@dataclass(frozen=True)
class Named:
    """What workloads share: sizes that are checked, and a name; `str` and `parse` are inverse."""

    kind: ClassVar[Kind]
    model: str

    def __post_init__(self) -> None:
        _, _, low, high, *_ = astuple(self)
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 1:
                what = f"{self.kind.form.words[name]} of a {self.kind.what}"
                raise PromptError(f"{what}: {value}, but it must be at least 1.")
        if high is not None and high < (low or 1):
            raise PromptError(f"Lengths from {low} to {high} tokens: the second must not be the smaller.")

    def check_total(self) -> None:
        """PromptError where its prompts would be too many tokens to be drawn; those that are given may be more."""
        _, num, low, high, *_ = astuple(self)
        if (tokens := num * (low + high) // 2) > MOST_TOKENS:
            what, items = self.kind.what, self.kind.form.words[fields(self)[1].name]
            raise PromptError(
                f"{counted(num, 'prompt')} from {low:,} to {high:,} tokens are {tokens:,} in all, but a {what} has at "
                f"most {MOST_TOKENS:,}. Take fewer {items}, or shorter prompts."
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The workload of this name; PromptError that shows the form."""
        what, form, example = cls.kind
        given = form.read(text.strip())
        if given is None:
            raise PromptError(f"{text!r} is no {what}. Write {form}, for example {example}.")
        high = given["low"] if given["high"] is None else given["high"]  # one length is both ends of the range
        workload = cls(**given | {"high": high})
        workload.check_total()
        return workload

    @classmethod
    def of(cls, given: Self | str, model: Model) -> Self:
        """The workload that is given, or named; PromptError where its name, or the model in it, is another.

        A row would tell a lie of another model. A live one came without a name, so that it goes by any.
        """
        workload = cls.parse(given) if isinstance(given, str) else given
        wanted, names = workload.model, (model.name, model.label, Path(model.name).name)
        if model.kind != "live" and wanted not in names and Path(wanted).resolve().name != model.name:
            raise PromptError(
                f"{workload} is a workload of {wanted!r}, but the model is {model.name!r}. Load that model, or name "
                f"{replace(workload, model=model.name)}."
            )
        return workload

    def __str__(self) -> str:
        _, _, low, high, *_ = astuple(self)
        return self.kind.form.write(vars(self) | {"high": None if high == low else high})


@dataclass(frozen=True)
class Workload(Named):
    """A model, a batch of prompts of `low` to `high` tokens, evenly spaced, and new tokens for each.

    One length is written once: `gpt2/b1/p128/n128`.
    """

    kind = _kind("workload", "b<batch rows>" + SPAN + NEW, "gpt2-xl/b8/p16-512/n128")

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
        self.check_total()
        draw = random.Random(seed)
        return [[draw.randrange(vocab_size) for _ in range(length)] for length in self.lengths]


@dataclass(frozen=True)
class HeldOut(Workload):
    """The same of pieces of held-out text, all of one length, and of the tokens that follow each of them."""

    kind = _kind("workload of held-out text", "b<batch rows>" + SPAN + NEW, "demo/b16/p64/n64", ACCURACY)


class Drawn(Named):
    """A workload whose prompts have random lengths."""

    first_token: ClassVar[int] = 0

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Random token ids of random lengths, both uniform, in order of arrival; the same for the same seed."""
        self.check_total()
        _, num, low, high, *_ = astuple(self)
        draw = random.Random(seed)
        lengths = [draw.randint(low, high) for _ in range(num)]
        return [[draw.randrange(self.first_token, vocab_size) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Requests(Drawn):
    """A model, and so many requests with prompts of `low` to `high` tokens.

    `new_tokens` is what each is answered with, or with `most_new_tokens` the fewest: then it is random, too. The first
    `shared` tokens are the same in all prompts, as instructions are; they count among the `low` to `high`.
    """

    kind = _kind(
        "serve workload",
        "r<requests requests>" + SPAN + SHARED + NEW + "[-<most_new_tokens most new tokens>]/<arrivals arrivals>",
        "llama-1b/r256/p100-1024/n512/all",
        SERVE,
    )

    requests: int
    low: int
    high: int
    new_tokens: int
    most_new_tokens: int | None = None
    arrivals: str = "all"
    shared: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arrivals != "all":
            raise PromptError(f"arrivals is {self.arrivals!r}, but it must be 'all': all requests are there at once.")
        if self.most_new_tokens is not None and self.most_new_tokens < self.new_tokens:
            raise PromptError(
                f"Answers from {self.new_tokens} to {self.most_new_tokens} tokens: the second must not be the smaller. "
                "Swap them."
            )
        if self.shared is not None and self.shared >= self.low:
            raise PromptError(
                f"The shortest prompt has {self.low} tokens, of which {self.shared} are shared, but at least one must "
                f"be its own. p counts the shared tokens too: take prompts from {self.shared + 1} tokens, or share "
                "fewer."
            )

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """The same with the first prompt's beginning in front of all; lengths and other tokens stay as they are."""
        drawn = super().prompts(vocab_size, seed)
        begin = drawn[0][: self.shared or 0]
        return [begin + prompt[len(begin) :] for prompt in drawn]

    def new_lengths(self) -> list[int]:
        """New tokens of each request, uniform; always the same, and drawn apart from the prompts."""
        draw = random.Random("new tokens, 0")
        return [draw.randint(self.new_tokens, self.most_new_tokens or self.new_tokens) for _ in range(self.requests)]


@dataclass(frozen=True)
class Stream(Drawn):
    """Requests of one prompt each, one after the other: of `low` to `high` tokens, and `new_tokens` for each."""

    kind = _kind("stream", "r<requests requests>" + RANGE + NEW, "gpt2-xl/r200/p1-960/n16")

    requests: int
    low: int
    high: int
    new_tokens: int

    def __str__(self) -> str:
        return self.kind.form.write(vars(self))


@dataclass(frozen=True)
class Texts(Drawn):
    """An encoder, and so many texts of `low` to `high` tokens."""

    kind = _kind("workload of texts", "t<texts texts>" + SPAN, "bert-base/t2048/p5-500", ENCODE)
    first_token = FIRST_TOKEN

    texts: int
    low: int
    high: int


@dataclass(frozen=True)
class TrainBatch(Named):
    """A model, and the batch that each step trains it with: rows of `low` to `high` tokens, evenly spaced.

    Without lengths they are as long as the model's context, as images are; an encoder-decoder's sources and answers are
    of these lengths. `dropout` is that of hidden states and of attention.
    """

    kind = Kind(
        "training workload",
        Form(
            "train:<model model>/b<rows rows>[/s<low tokens>][-<high tokens>][/d<dropout dropout>]",
            model="[^/]+(?:/[^/]+)*?",
            dropout=r"0\.[0-9]+",
        ),
        "train:gpt2/b8/s1024",
    )

    rows: int
    low: int | None = None
    high: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_tokens(self.high or self.low or 1)

    def _check_tokens(self, high: int) -> None:
        if (tokens := self.rows * high) > MOST_TOKENS:
            raise PromptError(
                f"{self.rows:,} rows of {high:,} tokens are {tokens:,} in all, but a {self.kind.what} has at most "
                f"{MOST_TOKENS:,}. Take fewer rows, or name shorter ones: {self.kind.example}."
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The workload of this name; PromptError that shows the form."""
        what, form, example = cls.kind
        given = form.read(text.strip())
        if given is None or (given["high"] and given["low"] is None):
            raise PromptError(f"{text!r} is no {what}. Write {form}, for example {example}.")
        return cls(**given | {"dropout": float(given["dropout"] or 0)})

    def lengths(self, context: int) -> tuple[int, ...]:
        """Tokens of each row; PromptError where the context is shorter, or so long that all rows are too many."""
        low = context if self.low is None else self.low
        high = low if self.high is None else self.high
        if high > context:
            raise PromptError(f"{self} has rows of {high:,} tokens, but the model's context is {context:,}.")
        self._check_tokens(high)
        return evenly_spaced(low, high, self.rows)


KINDS: dict[str, type[Named]] = {SERVE: Requests, ENCODE: Texts, ACCURACY: HeldOut, TRAIN: TrainBatch}
"""Workloads whose names begin with a word; one without is a `Workload`."""


def parse(text: str) -> tuple[Named | OpWorkload, ...]:
    """What a name that can be timed stands for: one workload, or all sizes of `op:<case>`; PromptError for no such."""
    text = text.strip()
    if text.startswith(OP):
        return OpWorkload.parse(text)
    if text.partition("/")[0] in {case.name for case in TIMED_CASES}:
        raise PromptError(f"{text!r} names an op. Did you mean '{OP}{text}'?")
    kind = next((kind for word, kind in KINDS.items() if text.startswith(word)), Workload)
    return (kind.parse(text),)


def describe(name: str, rows: Sequence[Sequence[int]], new_tokens: int) -> str:
    """The workload's name for prompts that are there; only their shortest and longest length show."""
    lengths = [len(row) for row in rows]
    return str(Workload(name, len(rows), min(lengths), max(lengths), new_tokens))


def default_prompts(model: Model, new_tokens: int = 0) -> list[list[int]]:
    """Eight ragged prompts: sentences where the model has a tokenizer, else random tokens. They are cut where they and
    so many new tokens would pass the context; an encoder's keep their last token, which ends a text.
    """
    rows: Iterable[list[int]] = Workload(model.name, 8, 2, 30, 1).prompts(model.config.vocab_size)
    if model.tokenizer is not None:
        rows = map(model.encode, DEMO_PROMPTS)
    most = max(model.config.context - new_tokens, 1)
    ends = int(isinstance(model.config, EncoderConfig))
    return [row[: most - ends] + row[len(row) - ends :] if len(row) > most else row for row in rows]


@dataclass(frozen=True)
class RunInputs:
    """A model, its prompts as token ids, and how to generate."""

    model: Model
    rows: list[list[int]]
    settings: Settings

    @classmethod
    def of(cls, model: Model, prompts: Prompts | None, repeats: int | None, settings: dict[str, Any]) -> RunInputs:
        """The inputs from what the user gave (no prompts: the default ones); PromptError for what cannot run."""
        check_repeats(repeats)
        chosen = Settings.of(**settings)
        given = default_prompts(model, chosen.max_new_tokens) if prompts is None else prompts
        encoded = as_rows(model, given)
        return cls(model, checked_prompts(encoded, chosen, model.config), chosen)

    def described(self) -> dict[str, Any]:
        """The fields that every result begins with."""
        settings = {name: value for name, value in asdict(self.settings).items() if value is not None}
        workload = describe(self.model.name, self.rows, self.settings.max_new_tokens)
        return described(self.model, workload, self.rows, settings | {"stop": list(settings["stop"])})


def described(model: Model, workload: str, rows: Sequence[Sequence[int]], settings: dict[str, Any]) -> dict[str, Any]:
    """The same of any texts or prompts `rows`."""
    return {
        "environment": environment(model),
        "workload": workload,
        "prompts": tuple(map(model.decode, rows)),
        "prompt_lengths": tuple(map(len, rows)),
        "settings": settings,
    }
