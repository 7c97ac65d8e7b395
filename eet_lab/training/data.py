"""Data for language modeling: text as rows of tokens, and which of them each step reads.

S tokens a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eet_lab.errors import TrainingError
from eet_lab.files import regular_content
from eet_lab.models import Model
from eet_lab.scheduling.whole import MOST, check_number, check_whole
from eet_lab.training.tasks import Example
from eet_lab.words import counted, told, visible

MOST_BYTES = 4 << 30
"""A file's text, and its tokens with eight bytes each, are in memory together."""


class Rows:
    """Texts as rows of S tokens, one text behind the other, each after the end-of-text token where the model has one.

    Which rows a step reads depends on (seed, step) alone: each row once in an epoch, in an order that is drawn anew. So
    a run that is resumed in the middle of an epoch reads what it would have read. The rest of the last row is left out.
    """

    def __init__(self, tokens: Sequence[int] | np.ndarray, row_tokens: int, *, seed: int = 0) -> None:
        check_whole(TrainingError, "row_tokens", row_tokens, 2, MOST)
        self.ids = np.asarray(tokens, np.int64)
        self.row_tokens, self.seed = row_tokens, seed
        if len(self) == 0:
            raise TrainingError(
                f"The text has {counted(len(self.ids), 'token')}, but a row has {row_tokens:,}. Give more text, or "
                "shorter rows."
            )

    @classmethod
    def of_texts(
        cls, model: Model, texts: Iterable[str | Mapping[str, Any]], row_tokens: int, *, seed: int = 0
    ) -> Rows:
        """Texts as the model's tokens, or rows with a "text" each, such as a `Dataset` of the package datasets.

        Errors: TrainingError, ModelError for a model without a tokenizer.
        """
        end = [] if model.config.eos_id is None else [model.config.eos_id]
        read = (_text(row, f"Text {number}") for number, row in enumerate(texts, 1))
        return cls([token for text in read for token in (*end, *model.encode(text))], row_tokens, seed=seed)

    @classmethod
    def of_file(cls, model: Model, path: str | Path, row_tokens: int, *, seed: int = 0) -> Rows:
        """A text file, or JSON lines with a "text" each. Errors: TrainingError."""
        return cls.of_texts(model, read_texts(path), row_tokens, seed=seed)

    def split(self, share: float) -> tuple[Rows, Rows]:
        """The rows but for the last `share` of them, and these, which are held out. Errors: TrainingError."""
        check_number(TrainingError, "share", share, 1e-9, 1, "above 0 and below 1")
        if len(self) < 2:
            raise TrainingError(
                f"There is {counted(len(self), 'row')}, of which no share can be held out. Give more text, or shorter "
                "rows."
            )
        place = min(len(self) - 1, round(len(self) * (1 - share))) * self.row_tokens
        parts = (self.ids[:place], self.ids[place : len(self) * self.row_tokens])
        first, held_out = (Rows(ids, self.row_tokens, seed=self.seed) for ids in parts)
        return first, held_out

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.ids) // self.row_tokens

    def __getitem__(self, number: int) -> Example:
        """One row."""
        begin = range(len(self))[number] * self.row_tokens
        return Example(self.ids[begin : begin + self.row_tokens].tolist())

    def batch(self, step: int, num_rows: int) -> list[Example]:
        """The rows that a step reads; where an epoch ends in it, the next one's go on."""
        check_whole(TrainingError, "num_rows", num_rows, 1, MOST)
        return [self[row] for row in self._order(step * num_rows, num_rows)]

    def _order(self, first: int, count: int) -> Iterator[int]:
        while count:
            epoch, place = divmod(first, len(self))
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self))[place : place + count]
            yield from order.tolist()
            first, count = first + len(order), count - len(order)


def read_texts(path: str | Path) -> list[str]:
    """The texts of a file: one, or one a line of JSON. Errors: TrainingError, which names the line."""
    path = Path(path)
    remedy = "Split it, and train on one part after the other."
    found = regular_content(path, "a file of text", MOST_BYTES, TrainingError, remedy=remedy)
    try:
        content = found.decode()
    except UnicodeDecodeError as error:
        raise TrainingError(
            f"{visible(str(path))} is not UTF-8: byte {error.start:,} is {error.object[error.start]:#04x}. Convert it."
        ) from error
    if path.suffix not in (".jsonl", ".ndjson"):
        return [content]
    texts = []
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            what = f"Line {number} of {visible(str(path))}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TrainingError(f"{what} is {told(line)}, which is no JSON.") from error
            texts.append(_text(row, what))
    return texts


def _text(row: str | Mapping[str, Any], what: str) -> str:
    """The text of a row, which may be the row itself. Errors: TrainingError, which says `what` the row is."""
    text = row if isinstance(row, str) else row.get("text") if isinstance(row, Mapping) else None
    if not isinstance(text, str):
        raise TrainingError(f'{what} is {told(row)}, but it must be an object with a string as its "text".')
    return text
