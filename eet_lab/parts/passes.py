"""Which texts share a pass of an encoder or of training, and where their tokens sit.

B texts of a pass, T tokens of it, N of them asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eet_lab.errors import PromptError
from eet_lab.ops.types import Batch
from eet_lab.parts.batches import end_to_end, left_padded
from eet_lab.scheduling.whole import MOST, check_whole


class Text(NamedTuple):
    """A text's tokens, with the special ones around them."""

    ids: Sequence[int]  # an engine makes arrays of them
    types: Sequence[int] | None = None  # None: all are of type 0
    asked: Sequence[int] = ()  # places of the tokens whose states are wanted
    source: Sequence[int] = ()  # what an encoder reads first, where `ids` are a decoder's

    @property
    def length(self) -> int:
        """The tokens of its longer side, as fairseq counts them."""
        return max(len(self.ids), len(self.source))


class Image(NamedTuple):
    """An image as an encoder reads it: a class token, and its patches row by row."""

    pixels: Tensor  # [channels,height,width]
    patch_size: int
    asked: Sequence[int] = ()  # places of the tokens whose states are wanted: 0 is the class token

    @property
    def ids(self) -> range:
        """One number for each of its tokens; which ones a pass reads depends on the images beside it."""
        _, height, width = self.pixels.shape
        return range(1 + height * width // self.patch_size**2)

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return len(self.ids)

    @property
    def source(self) -> tuple[()]:
        """Nothing is read before an image."""
        return ()

    @property
    def types(self) -> None:
        """Tokens of images have no types."""


Readable = Text | Image


class Pass(NamedTuple):
    """Texts, or images, that are read together. Tensors are on the CPU until the pass is sent.

    Of images, token 0 is the class token and token 1 + i is patch i of the pass.
    """

    sizes: tuple[int, ...]  # how many tokens of each text are asked for
    batch: Batch
    asked: Tensor  # [N] int64  index in T
    types: Tensor | None = None  # [T] int64
    patches: Tensor | None = None  # [P,channels*size*size] of images
    source: Batch | None = None  # what an encoder reads first: a source of each row


class Group(NamedTuple):
    """Texts that shall share a pass, the longest first, and how their tokens are laid out."""

    numbers: tuple[int, ...]  # of the texts, row by row
    texts: tuple[Readable, ...]
    packed: bool = False  # end to end; else with pads on the left

    @property
    def num_tokens(self) -> int:
        """The tokens of the texts and their sources, without pads."""
        return sum(len(text.ids) + len(text.source) for text in self.texts)

    @property
    def longest(self) -> int:
        return max(len(text.ids) for text in self.texts)

    @property
    def computed_tokens(self) -> int:
        """The tokens that a pass computes, T and those of sources: with pads."""
        if self.packed:
            return self.num_tokens
        return len(self.texts) * (self.longest + max(len(text.source) for text in self.texts))

    @property
    def num_asked(self) -> int:
        return sum(len(text.asked) for text in self.texts)

    @property
    def is_typed(self) -> bool:
        """Whether a text tells the types of its tokens."""
        return any(text.types is not None for text in self.texts)

    def laid_out(self) -> Pass:
        """Where each token sits."""
        layout = end_to_end if self.packed else left_padded
        images = [text for text in self.texts if isinstance(text, Image)]
        batch = layout(_rows_of(images) if images else [text.ids for text in self.texts])
        source = layout([text.source for text in self.texts]) if len(self.texts[0].source) else None
        assert batch.spans is not None
        pairs = [(text, first) for text, (first, _) in zip(self.texts, batch.spans, strict=True)]
        asked = np.concatenate([_numbers(text.asked) + first for text, first in pairs])
        types = None
        if self.is_typed:
            types = torch.zeros_like(batch.ids)
            for text, first in pairs:
                if text.types is not None:
                    types[first : first + len(text.types)] = torch.tensor(text.types)
        patches = _patches(images) if images else None
        sizes = tuple(len(text.asked) for text in self.texts)
        return Pass(sizes, batch, torch.from_numpy(asked), types, patches, source)


def _patches(images: Sequence[Image]) -> Tensor:
    """Those of all images, [patches,channels*size*size], each as a convolution's weights lie; where the pixels are."""
    size, pixels = images[0].patch_size, torch.stack([image.pixels for image in images])
    tiles = pixels.unfold(2, size, size).unfold(3, size, size)
    return tiles.permute(0, 2, 3, 1, 4, 5).reshape(-1, pixels.shape[1] * size * size)


def _rows_of(images: Sequence[Image]) -> list[Any]:
    """The tokens of each: the class token, and its own patches among those of the pass."""
    counts = [len(image.ids) - 1 for image in images]
    rows = [np.arange(end - count, end + 1) for count, end in zip(counts, accumulate(counts), strict=True)]
    for row in rows:
        row[0] = 0
    return rows


def _numbers(places: Sequence[int]) -> np.ndarray:
    if isinstance(places, range):  # of which numpy would ask each number
        return np.arange(places.start, places.stop, places.step)
    return np.asarray(places, np.int64)


@dataclass(frozen=True)
class Batching:
    """How many texts share a pass: at most `batch_size`, with at most `batch_tokens` tokens, pads among them.

    Of texts with sources each side has as many. A longer text is read alone. `truncate` cuts texts that are longer than
    the model's context; without it they are an error.
    """

    batch_tokens: int = 32_768
    batch_size: int | None = None
    truncate: bool = False

    def __post_init__(self) -> None:
        check_whole(PromptError, "batch_tokens", self.batch_tokens, 1, MOST)
        if self.batch_size is not None:
            check_whole(PromptError, "batch_size", self.batch_size, 1, MOST)
        if not isinstance(self.truncate, bool):
            raise PromptError(f"truncate is {self.truncate!r:.60}, but it must be True or False.")


def text_by_text(texts: Sequence[Readable], batching: Batching) -> Iterator[Group]:
    """The baseline: each text is a pass of its own, so that none has pads."""
    for number, text in enumerate(texts):
        yield Group((number,), (text,))


def padded(texts: Sequence[Readable], batching: Batching) -> Iterator[Group]:
    """Texts in their order, as many as fit into a rectangle with pads on the left."""
    return _grouped(texts, batching, lambda num, longest, total: num * longest, packed=False)


def packed(texts: Sequence[Readable], batching: Batching) -> Iterator[Group]:
    """Texts in their order, as many as fit end to end, without pads."""
    return _grouped(texts, batching, lambda num, longest, total: total, packed=True)


def _grouped(
    texts: Sequence[Readable], batching: Batching, tokens_of: Callable[[int, int, int], int], *, packed: bool
) -> Iterator[Group]:
    """Texts that share a pass; `tokens_of` tells its size from their number, the longest, and the sum.

    Those of the same length are neighbours, which plain PyTorch attends to in one call.
    """
    numbers: list[int] = []
    longest, total, lengths = 0, 0, [text.length for text in texts]

    def group() -> Group:
        ordered = sorted(numbers, key=lengths.__getitem__, reverse=True)
        return Group(tuple(ordered), tuple(texts[number] for number in ordered), packed)

    for number, length in enumerate(lengths):
        size = tokens_of(len(numbers) + 1, max(longest, length), total + length)
        if numbers and (size > batching.batch_tokens or len(numbers) == batching.batch_size):
            yield group()
            numbers, longest, total = [], 0, 0
        numbers.append(number)
        longest, total = max(longest, length), total + length
    if numbers:
        yield group()
