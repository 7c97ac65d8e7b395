"""A batch of training: checked, divided into passes, and laid out in tensors on the host.

T tokens of a pass, N of them with a label, B texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from eet_lab.engine.readable import readable
from eet_lab.engine.settings import checked_texts
from eet_lab.errors import TrainingError
from eet_lab.models.config import Config, EncoderConfig, Seq2SeqConfig, VisionConfig
from eet_lab.parts.losses import IGNORED
from eet_lab.parts.passes import Batching, Group, Pass, Readable, Text
from eet_lab.parts.protocols import LaysOutTexts
from eet_lab.training.ranks import BatchMark
from eet_lab.training.settings import TrainSettings
from eet_lab.training.tasks import Example, NamedExample, TrainTask, check_examples
from eet_lab.words import told

PLACE = "Example "
"""How an example is called that has no name, before its place in the batch."""


class Given(NamedTuple):
    """All that a pass reads. On the host or the device; what has 64 bits is sent as integers are."""

    read: Pass
    labels: Tensor  # [N] int64
    numbers: Tensor  # [B] int64: of the texts in the batch
    noise: Tensor  # [1] int64: the key of the step
    scales: Tensor  # [2] float64, as int64: the number of the batch's labels, and the loss scale
    settings: TrainSettings
    is_first: bool = False  # in its step


class Totals(NamedTuple):
    """What an update waits for, and its step tells: a loss, beside which the norm of all gradients is taken."""

    loss: Tensor  # 0-d: the sum over all passes, and all ranks


class UpdateInputs(NamedTuple):
    """All that an update reads."""

    found: Tensor  # [2] float64: the loss, and the norm of the scaled gradients
    numbers: Tensor  # [3] float64, as int64: learning rate, loss scale, and the number of the update, from 1
    settings: TrainSettings


class TrainPass(NamedTuple):
    """Texts that are read together; `numbers` are theirs in the batch, to which pads do not belong."""

    group: Group
    labels: np.ndarray  # [N] int64
    numbers: list[int]

    def laid_out(self, noise: int, scales: Sequence[float], settings: TrainSettings, is_first: bool) -> Given:
        """The same in tensors; the numbers are those of `Given`."""
        numbers = np.zeros(len(self.group.texts), np.int64)
        numbers[: len(self.numbers)] = self.numbers
        # How many are asked for of each text is no matter of the shape.
        read, labels = self.group.laid_out()._replace(sizes=()), torch.from_numpy(self.labels)
        key = torch.tensor([noise])
        return Given(read, labels, torch.from_numpy(numbers), key, as_integers(*scales), settings, is_first)


class Checked(NamedTuple):
    """A batch that can be learned from, of which this rank reads the examples `numbers`."""

    texts: Sequence[Readable]
    labels: list[np.ndarray]
    numbers: range
    names: Sequence[str]  # what errors call each

    @property
    def num_tokens(self) -> int:
        return sum(len(text.ids) + len(text.source) for text in self.texts)

    @property
    def num_labels(self) -> int:
        return sum(map(len, self.labels))

    def mark(self) -> BatchMark:
        """What ranks compare, to see whether all were given this one: made of tokens and labels, and not of pixels."""
        found = 0
        for text, labels in zip(self.texts, self.labels, strict=True):
            for row in (text.ids, text.source, labels):
                found = crc32(np.asarray(row, np.int64).tobytes(), crc32(len(row).to_bytes(8, "little"), found))
        return BatchMark(len(self.texts), found)

    def passes(self, layout: LaysOutTexts, batch_tokens: int) -> Iterator[TrainPass]:
        """The passes over this rank's share that have labels to learn from; places without one are `IGNORED`."""
        for group in layout([self.texts[number] for number in self.numbers], Batching(batch_tokens)):
            numbers = [self.numbers[row] for row in group.numbers]
            labels = np.concatenate([self.labels[number] for number in numbers])
            if len(labels):
                extra = np.full(group.num_asked - len(labels), IGNORED)
                yield TrainPass(group, np.concatenate([labels, extra]), numbers)


class Ready(NamedTuple):
    """A batch that can be learned from, its passes, and what the first reads, but for what changes between steps."""

    batch: Checked
    passes: list[TrainPass]
    first: list[Given]  # none where a rank has no pass


def checked(
    examples: Sequence[Example],
    task: TrainTask,
    config: Config,
    share: Callable[[int], range],
) -> Checked:
    """The texts and the labels of each; `share` tells which of so many this rank reads.

    Errors: TrainingError, PromptError.
    """
    check_examples(examples)
    longest = config.context
    places = ((each, f"{PLACE}{number}") for number, each in enumerate(examples, 1))
    names = [each.name or place if isinstance(each, NamedExample) else place for each, place in places]
    for name, example in zip(names, examples, strict=True):
        if not isinstance(example, Example):
            raise TrainingError(f"{name} is {told(example)}, but it must be an Example(ids, labels).")
        if example.pixels is not None and not isinstance(config, VisionConfig):
            raise TrainingError(
                f"{name} is an image, but the model ({config.family}) learns from texts: give Example(ids, "
                "labels) with token ids, or train an encoder of images, such as a ViT."
            )
        if not isinstance(example.ids, Sized):
            raise TrainingError(f"{name} has the ids {told(example.ids)}, but they must be token ids.")
        if len(example.ids) > longest:
            raise TrainingError(
                f"{name} has {len(example.ids):,} tokens, but the model's context is {longest:,}. Cut it into pieces."
            )
        if not len(example.ids) and example.pixels is None:
            raise TrainingError(f"{name} has no tokens; give it one at least.")

    def called(number: int) -> str:
        return names[number - 1]

    read = task.read(examples, config, names)
    texts: Sequence[Readable] = [text for text, _ in read]
    if isinstance(config, EncoderConfig):
        texts = readable(texts, config, truncate=False, waits=False, called=called)  # a step tells what is not finite
    elif isinstance(config, Seq2SeqConfig):
        sources = checked_texts([text.source for text in texts], config, called=called)
        texts = [Text(text.ids, None, text.asked, row) for text, row in zip(texts, sources, strict=True)]
        if long := [name for name, text in zip(names, texts, strict=True) if len(text.ids) > longest]:
            raise TrainingError(f"{long[0]} has an answer that is longer than the model's context of {longest:,}.")
    else:
        ids = checked_texts([text.ids for text in texts], config, called=called)
        texts = [Text(row, None, text.asked) for text, row in zip(texts, ids, strict=True)]
    labels = [
        np.asarray(text.ids[1:], np.int64) if own is None else own for text, (_, own) in zip(texts, read, strict=True)
    ]
    return Checked(texts, labels, share(len(examples)), names)


def as_integers(*numbers: float) -> Tensor:
    """Numbers of 64 bits, so that they are sent in the same copy as all others."""
    return torch.tensor(numbers, dtype=torch.float64).view(torch.long)
