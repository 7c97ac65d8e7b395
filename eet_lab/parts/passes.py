"""Which texts an encoder reads in one pass, and where their tokens sit.

B texts of a pass, T tokens of it, N of them asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eet_lab.errors import PromptError
from eet_lab.ops.types import Step
from eet_lab.parts.prompts import packed as _packed
from eet_lab.parts.prompts import right_aligned
from eet_lab.scheduling.whole import MOST, check_whole


class Text(NamedTuple):
    """A text's tokens, with the special ones around them."""

    ids: Sequence[int]
    types: Sequence[int] | None = None  # None: all are of type 0
    asked: Sequence[int] = ()  # places of the tokens whose states are wanted


class Pass(NamedTuple):
    """Texts that are read together. Tensors are on the CPU until the pass is sent."""

    numbers: tuple[int, ...]  # of the texts, row by row
    sizes: tuple[int, ...]  # how many tokens of each are asked for
    step: Step
    asked: Tensor  # [N] int64  index in T
    types: Tensor | None = None  # [T] int64

    @property
    def num_tokens(self) -> int:
        """Without pads."""
        return sum(span.count for span in self.step.spans)


@dataclass(frozen=True)
class Batching:
    """How many texts share a pass: at most `batch_size`, with at most `batch_tokens` tokens, pads among them.

    A longer text is read alone. `truncate` cuts texts that are longer than the model's context; without it they are an
    error.
    """

    batch_tokens: int = 8192
    batch_size: int | None = None
    truncate: bool = False

    def __post_init__(self) -> None:
        check_whole(PromptError, "batch_tokens", self.batch_tokens, 1, MOST)
        if self.batch_size is not None:
            check_whole(PromptError, "batch_size", self.batch_size, 1, MOST)
        if not isinstance(self.truncate, bool):
            raise PromptError(f"truncate is {self.truncate!r:.60}, but it must be True or False.")


def text_by_text(texts: Sequence[Text], batching: Batching) -> Iterator[Pass]:
    """The baseline: each text is a pass of its own, so that none has pads."""
    for number in range(len(texts)):
        yield _laid_out(texts, [number], lambda rows: right_aligned(rows, 0)[1])


def padded(texts: Sequence[Text], batching: Batching) -> Iterator[Pass]:
    """Texts in their order, as many as fit into a rectangle with pads on the left."""
    for numbers in _grouped(texts, batching, lambda num, longest, total: num * longest):
        yield _laid_out(texts, numbers, lambda rows: right_aligned(rows, 0)[1])


def packed(texts: Sequence[Text], batching: Batching) -> Iterator[Pass]:
    """Texts in their order, as many as fit end to end, without pads."""
    for numbers in _grouped(texts, batching, lambda num, longest, total: total):
        yield _laid_out(texts, numbers, lambda rows: _packed(rows, 0)[1])


def _grouped(
    texts: Sequence[Text], batching: Batching, tokens_of: Callable[[int, int, int], int]
) -> Iterator[list[int]]:
    """Numbers of texts that share a pass; `tokens_of` tells its size from their number, the longest, and the sum."""
    group: list[int] = []
    longest = total = 0
    for number, text in enumerate(texts):
        length = len(text.ids)
        size = tokens_of(len(group) + 1, max(longest, length), total + length)
        if group and (size > batching.batch_tokens or len(group) == batching.batch_size):
            yield group
            group, longest, total = [], 0, 0
        group.append(number)
        longest, total = max(longest, length), total + length
    if group:
        yield group


def _laid_out(texts: Sequence[Text], numbers: Sequence[int], lay_out: Callable[[list[list[int]]], Step]) -> Pass:
    """Texts of a pass, the longest first: those of the same length are neighbours, which plain PyTorch attends to in
    one call.
    """
    numbers = sorted(numbers, key=lambda number: -len(texts[number].ids))
    chosen = [texts[number] for number in numbers]
    step = lay_out([list(text.ids) for text in chosen])
    asked = [np.asarray(text.asked, np.int64) + span.first for text, span in zip(chosen, step.spans, strict=True)]
    types = None
    if any(text.types is not None for text in chosen):
        types = torch.zeros_like(step.ids)
        for text, span in zip(chosen, step.spans, strict=True):
            if text.types is not None:
                types[span.first : span.first + span.count] = torch.tensor(text.types)
    sizes = tuple(len(text.asked) for text in chosen)
    return Pass(tuple(numbers), sizes, step, torch.from_numpy(np.concatenate(asked)), types)
