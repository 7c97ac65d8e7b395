"""Examples, and which of them each step reads: of texts laid end to end, of files, or given one by one.

S tokens a row.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, overload

import numpy as np

from eet_lab.errors import TrainingError
from eet_lab.files import regular_content
from eet_lab.models import Model
from eet_lab.models.config import Config
from eet_lab.models.on_device import checked_model
from eet_lab.scheduling.whole import MOST, MOST_SEED, check_number, check_whole
from eet_lab.training.batch import checked
from eet_lab.training.tasks import IGNORED, Example, NamedExample, TrainTask, check_examples
from eet_lab.words import counted, told, visible

MOST_BYTES = 4 << 30
"""A file's text and its tokens are in memory together: eight bytes a token, and more while its own text is read."""
MASKED_SHARE = 0.15
"""How many of the tokens are told, as a share: BERT's (Devlin et al., 2018)."""


class Batches(Protocol):
    """What a training reads."""

    def batch(self, step: int, num_rows: int) -> list[Example]:
        """The examples of a step."""
        ...


def check_batches(rows: object) -> None:
    """TrainingError for what cannot tell which examples a step reads."""
    if not callable(getattr(rows, "batch", None)):
        raise TrainingError(
            f"rows is {told(rows)}, but it must say what each step reads. Give Rows(tokens, row_tokens) of the tokens "
            "of all texts, or Examples([Example(ids, labels), ...])."
        )


def iterable_batches(batches: Iterable[Sequence[Example]]) -> Iterable[Sequence[Example]]:
    """The same. TrainingError for what holds no batches."""
    if not isinstance(batches, Iterable):
        raise TrainingError(f"batches is {told(batches)}, but it must be lists of examples, one for each step.")
    return batches


class Numbered(ABC):
    """Examples by their numbers, from 0.

    Which of them a step reads depends on (seed, step) alone: each once in an epoch, in an order that is drawn anew. So
    a run that is resumed in the middle of an epoch reads what it would have read.
    """

    seed: int
    unit = "example"
    row_tokens: int | None = None  # where each has the same number
    _drawn: tuple[tuple[int, ...], np.ndarray] = (), np.empty(0)  # the last epoch's order, and what it depends on

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def part(self, begin: int, end: int) -> Self:
        """Some of them, from one number to before another."""

    @abstractmethod
    def _read(self, number: int, epoch: int) -> Example:
        """One of them, as it is in an epoch."""

    @overload
    def __getitem__(self, number: int) -> Example: ...
    @overload
    def __getitem__(self, number: slice) -> list[Example]: ...
    def __getitem__(self, number: int | slice) -> Example | list[Example]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        return self._read(range(len(self))[number], 0)

    def __iter__(self) -> Iterator[Example]:
        return (self[number] for number in range(len(self)))

    def split(self, share: float) -> tuple[Self, Self]:
        """All but the last `share` of them, and these, which are held out: one at least. Errors: TrainingError."""
        check_number(TrainingError, "share", share, 1e-9, 1, "above 0 and below 1")
        if len(self) < 2:
            shorter = ", or shorter rows" * (self.unit == "row")
            raise TrainingError(
                f"There is {counted(len(self), self.unit)}, of which no share can be held out. Give more{shorter}."
            )
        place = max(1, min(len(self) - 1, round(len(self) * (1 - share))))
        return self.part(0, place), self.part(place, len(self))

    def batch(self, step: int, num_rows: int) -> list[Example]:
        """The examples that a step reads; where an epoch ends in it, the next one's go on."""
        check_whole(TrainingError, "step", step, 0, MOST)
        check_whole(TrainingError, "num_rows", num_rows, 1, MOST)
        return [self._read(number, epoch) for number, epoch in self._order(step * num_rows, num_rows)]

    def _order(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        while count:
            epoch, place = divmod(first, len(self))
            order = self._in_epoch(epoch)[place : place + count]
            yield from ((number, epoch) for number in order.tolist())
            first, count = first + len(order), count - len(order)

    def _in_epoch(self, epoch: int) -> np.ndarray:
        """Their order, which is drawn once for all steps of an epoch."""
        drawn, of = self._drawn, (self.seed, epoch, len(self))
        if drawn[0] != of:
            drawn = self._drawn = of, np.random.default_rng(of[:2]).permutation(len(self))
        return drawn[1]


class Examples(Numbered):
    """Examples that are given, such as texts with a class, sources with an answer, or images."""

    def __init__(self, examples: Sequence[Example], *, seed: int = 0) -> None:
        check_whole(TrainingError, "seed", seed, 0, MOST_SEED)
        check_examples(examples)
        self.examples, self.seed = examples, seed

    @classmethod
    def of_rows(cls, model: Model, rows: Iterable[Mapping[str, Any]], *, seed: int = 0) -> Examples:
        """Rows with a "text", or its "ids", and "labels" such as the task reads, or a text in their place.

        They may be those of a `Dataset` of the package datasets. Errors: TrainingError, which names the row;
        ModelError for texts, and a model without a tokenizer.
        """
        return cls._of(model, ((row, f"Row {number}") for number, row in enumerate(rows, 1)), seed)

    @classmethod
    def of_file(cls, model: Model, path: str | Path, *, seed: int = 0) -> Examples:
        """The same from JSON lines. Errors: TrainingError, which names the line."""
        lines = [*_json_lines(Path(path), _content(path))]
        if not lines:
            raise TrainingError(f"{visible(str(path))} is empty. Give a file with an example a line.")
        return cls._of(model, lines, seed)

    @classmethod
    def _of(cls, model: Model, rows: Iterable[tuple[Any, str]], seed: int) -> Examples:
        return cls([_example(model, row, name) for row, name in rows], seed=seed)

    def check(self, task: TrainTask, config: Config) -> None:
        """What a step would refuse of any of them. Errors: TrainingError, which names the row or the line."""
        checked(self.examples, task, config, range)

    def __len__(self) -> int:
        return len(self.examples)

    def part(self, begin: int, end: int) -> Examples:
        return Examples(self.examples[begin:end], seed=self.seed)

    def _read(self, number: int, epoch: int) -> Example:
        return self.examples[number]


class Rows(Numbered):
    """Texts as rows of S tokens, one text behind the other, each after the end-of-text token where the model has one.

    The rest of the last row is left out. `name` is what an error calls the texts.
    """

    unit = "row"
    row_tokens: int

    def __init__(
        self, tokens: Sequence[int] | np.ndarray, row_tokens: int, *, seed: int = 0, name: str = "The text"
    ) -> None:
        check_whole(TrainingError, "row_tokens", row_tokens, 2, MOST)
        check_whole(TrainingError, "seed", seed, 0, MOST_SEED)
        self.ids = _in_one_row(tokens)
        self.row_tokens, self.seed = row_tokens, seed
        if len(self) == 0:
            raise TrainingError(
                f"{name} has {counted(len(self.ids), 'token')}, but a row has {row_tokens:,}. Give more text, or "
                "shorter rows."
            )

    @classmethod
    def of_texts(
        cls, model: Model, texts: Iterable[str | Mapping[str, Any]], row_tokens: int, *,
        seed: int = 0, name: str = "The text",
    ) -> Rows:  # fmt: skip
        """Texts as the model's tokens, or rows with a "text" each, such as a `Dataset` of the package datasets.

        Errors: TrainingError, ModelError for a model without a tokenizer.
        """
        if isinstance(model, str):
            checked_model(model)
        if isinstance(texts, str | Mapping):  # whose letters, or names, would be texts
            raise TrainingError(f"texts is {told(texts)}, but it must be a list of texts: give [text].")
        end = [] if model.config.eos_id is None else [model.config.eos_id]
        read = (_text(row, f"Text {number}") for number, row in enumerate(texts, 1))
        tokens = (token for text in read for token in (*end, *model.encode(text)))
        return cls(np.fromiter(tokens, np.int64).data, row_tokens, seed=seed, name=name)

    @classmethod
    def of_file(cls, model: Model, path: str | Path, row_tokens: int, *, seed: int = 0) -> Rows:
        """A text file, or JSON lines with a "text" each. Errors: TrainingError."""
        name = f"The text of {visible(str(path))}"
        return cls.of_texts(model, read_texts(path), row_tokens, seed=seed, name=name)

    def __len__(self) -> int:
        return len(self.ids) // self.row_tokens

    def part(self, begin: int, end: int) -> Rows:
        return Rows(self.ids[begin * self.row_tokens : end * self.row_tokens], self.row_tokens, seed=self.seed)

    def _read(self, number: int, epoch: int) -> Example:
        begin = number * self.row_tokens
        return Example(self.ids[begin : begin + self.row_tokens].tolist())


class Masked(Numbered):
    """Texts with some of their words masked, others in each epoch: the model tells what stood there.

    Of the tokens that it tells, eight in ten are masked, one is another word, and one is as it was (Devlin et al.,
    2018), so that the model has to know each word from those around it.
    """

    def __init__(self, rows: Numbered, mask_id: int, vocab_size: int) -> None:
        self.rows, self.seed, self.unit, self.row_tokens = rows, rows.seed, rows.unit, rows.row_tokens
        self.mask_id, self.vocab_size = mask_id, vocab_size

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, begin: int, end: int) -> Masked:
        return Masked(self.rows.part(begin, end), self.mask_id, self.vocab_size)

    def _read(self, number: int, epoch: int) -> Example:
        ids, draw = np.asarray(self.rows[number].ids), np.random.default_rng((self.seed, epoch, number))
        chance, kind = draw.random((2, len(ids)))
        chosen = chance <= max(MASKED_SHARE, chance.min())  # one at least
        others = np.where(kind < 0.8, self.mask_id, draw.integers(self.vocab_size, size=len(ids)))
        read = np.where(chosen & (kind < 0.9), others, ids)
        return Example(read.tolist(), np.where(chosen, ids, IGNORED).tolist())


def read_texts(path: str | Path) -> list[str]:
    """The texts of a file: one, or one a line of JSON. Errors: TrainingError, which names the line."""
    path, content = Path(path), _content(path)
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        return [content]
    return [_text(row, what) for row, what in _json_lines(path, content)]


def _content(path: str | Path) -> str:
    """A file's text. Errors: TrainingError, which names the byte that is none."""
    found = regular_content(
        path, "a file of text", MOST_BYTES, TrainingError, remedy="Split it, and train on one part after the other."
    )
    try:
        return found.decode().removeprefix("\ufeff")  # which editors put before UTF-8
    except UnicodeDecodeError as error:
        line = found.count(b"\n", 0, error.start) + 1
        raise TrainingError(
            f"{visible(str(path))} is not UTF-8: byte {error.start:,}, in line {line:,}, is {found[error.start]:#04x}. "
            "Convert it."
        ) from error


def _json_lines(path: Path, content: str) -> Iterator[tuple[Any, str]]:
    """What each line holds, and which line it is. Errors: TrainingError."""
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            what = f"Line {number} of {visible(str(path))}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TrainingError(f"{what} is {told(line)}, which is no JSON.") from error
            yield row, what


def _text(row: Any, what: str) -> str:
    """The text of a row, which may be the row itself. Errors: TrainingError, which says `what` the row is."""
    text = row if isinstance(row, str) else row.get("text") if isinstance(row, Mapping) else None
    if not isinstance(text, str):
        raise TrainingError(f'{what} is {told(row)}, but it must be an object with a string as its "text".')
    return text


def _example(model: Model, row: Any, what: str) -> Example:
    """A row's example; whether its labels are right is for the task to say. Errors: those of `Examples.of_rows`."""
    ids: Any = row.get("ids", row.get("text")) if isinstance(row, Mapping) else None
    if not isinstance(ids, str) and not _are_whole(ids):
        raise TrainingError(f'{what} is {told(row)}, but it must be an object with "ids" or a "text", and "labels".')
    labels = row.get("labels")
    if isinstance(labels, bool) or not (isinstance(labels, str | int) or labels is None or _are_whole(labels)):
        raise TrainingError(
            f"{what} has the labels {told(labels)}, but they must be whole numbers, the number of a class, or a text."
        )
    return NamedExample.of(what, model.encode(ids), model.encode(labels) if isinstance(labels, str) else labels)


def _in_one_row(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as an array. Errors: TrainingError."""
    try:
        found = np.asarray(tokens)
    except ValueError:  # rows of several lengths
        found = np.asarray(None)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise TrainingError(
            f"tokens is {told(tokens)}, but it must be the token ids of all texts in one row. Put one behind the "
            "other, or give texts to Rows.of_texts."
        )
    # A caller may fill its own array anew. That of `of_texts`, which may be large, is nobody else's.
    return found.astype(np.int64, copy=not isinstance(tokens, memoryview))


def _are_whole(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in values)
