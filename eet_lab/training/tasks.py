"""What a model is trained to tell: each word's next one, words that were masked, a text's class, or another text.

T tokens of a pass, N of them with a label, B texts, C channels, V words, L classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from eet_lab.errors import ModelError, TrainingError
from eet_lab.models import decoder
from eet_lab.models.config import HEADS, Config, EncoderConfig, Seq2SeqConfig, VisionConfig
from eet_lab.models.decoder import tensors
from eet_lab.models.table import flat
from eet_lab.parts import Ops
from eet_lab.parts.losses import IGNORED, Head
from eet_lab.parts.passes import Image, Readable, Text
from eet_lab.scheduling.whole import check_choice, is_whole
from eet_lab.words import told

MOST_64 = 2**63 - 1
SINGLE_LABEL = "single_label_classification"
"""The `problem_type` of transformers where a text has one class."""


class Example(NamedTuple):
    """A text, or an image, and what the model shall tell of it.

    `labels` holds one label for each token, `IGNORED` where nothing is learned; a language model learns each token from
    those before it. None: all of `ids`, for a language model. For a classifier it is the number of the class. For an
    encoder-decoder they are the tokens of its answer to the source `ids`. `pixels` are those of an image
    [channels,height,width], which has no `ids`.
    """

    ids: Sequence[int] = ()
    labels: Sequence[int] | int | None = None
    types: Sequence[int] | None = None
    pixels: Tensor | None = None

    def read(self, places: Sequence[int], config: Config) -> Readable:
        """The same as an engine reads it; `places` are those of the tokens with a label."""
        if isinstance(config, VisionConfig) and self.pixels is not None:
            return Image(self.pixels, config.patch_size, places)
        if isinstance(config, Seq2SeqConfig):  # the decoder reads the labels shifted right
            labels = np.asarray(self.labels)[:-1]
            return Text(
                [config.start_id, *np.where(labels == IGNORED, config.pad_id, labels).tolist()], None, places, self.ids
            )
        return Text(self.ids, self.types, places)


class NamedExample(Example):
    """One that errors call by its name, such as its line of a file, rather than by its place in the batch.

    It equals an example without a name.
    """

    name = ""

    @classmethod
    def of(cls, name: str, *values: Any) -> NamedExample:
        """The example with these values, in the order of `Example`."""
        found = cls(*values)
        found.name = name
        return found


def check_examples(examples: object) -> None:
    """TrainingError for what is no list of examples, or an empty one."""
    if not isinstance(examples, Sized) or getattr(examples, "ndim", 1) == 0:  # an array of no dimension has no length
        raise TrainingError(
            f"examples is {told(examples)}, but it must be a list, such as [Example(ids, labels), ...]."
        )
    if len(examples) == 0:
        raise TrainingError("There are no examples; give at least one.")


@dataclass(frozen=True)
class TrainTask:
    """What is learned, in words, and how it is read from hidden states."""

    name: str
    labelled: Callable[[Example], tuple[Sequence[int], np.ndarray | None]]
    """The places of the tokens from whose states something is told, and the labels of these; None: the next tokens."""
    logits: Callable[[Any, Ops, Tensor], Tensor]
    """Those of hidden states, by a model and its ops."""
    weights: Callable[[Any], Sequence[Any]]
    """What of a model makes them, and is trained."""
    num_labels: Callable[[Any], int]
    needs: str = ""
    """What of `HEADS` the checkpoint must have."""

    def head(self, model: Any, ops: Ops) -> Head:
        """What makes logits, whose products another `linear` can make."""

        def logits(states: Tensor, linear: Callable | None = None) -> Tensor:
            used = ops if linear is None else replace(ops, norm_linear=partial(ops.norm_linear, linear=linear))
            return self.logits(model, used, states)

        return Head(logits, tuple(tensors(tuple(self.weights(model)))))

    def check(self, config: Config) -> None:
        """ModelError where such a model lacks what is trained."""
        if self.needs and self.needs not in getattr(config, "heads", ()):
            raise ModelError(
                f"This checkpoint lacks {HEADS[self.needs]}, which {self.name} trains. Load one that was saved with it."
            )
        if self.num_labels(config) < 2:
            raise ModelError(
                f"This checkpoint has one class, as transformers has it for regression, and {self.name} has nothing to "
                "choose between. Load one with two classes at least."
            )

        kind = getattr(config, "problem_type", None)
        if self.needs == "classes" and kind not in (None, SINGLE_LABEL):
            raise ModelError(
                f"problem_type is {told(kind)} in this checkpoint's config, but {self.name} is trained with one class "
                f"an example: problem_type={SINGLE_LABEL!r}, or none. Load a model whose config has that, or train "
                "this one by transformers."
            )

    def read(
        self, examples: Sequence[Example], config: Config, names: Sequence[str]
    ) -> list[tuple[Readable, np.ndarray | None]]:
        """The texts with the places that have a label, and the labels; None: the next tokens, which are not checked
        here. Errors: TrainingError, which calls the first that is wrong by its name.
        """
        found, limit = [], self.num_labels(config)
        for name, example in zip(names, examples, strict=True):
            try:
                places, labels = self.labelled(example)
            except (TypeError, ValueError) as error:
                raise TrainingError(f"{name} has labels that {self.name} cannot read: {error}") from error
            found.append((example.read(places, config), labels))
        given = [(name, labels) for name, (_, labels) in zip(names, found, strict=True) if labels is not None]
        if not _are_within(limit, [labels for _, labels in given]):
            name, labels = next(each for each in given if not _are_within(limit, [each[1]]))
            wrong = next(label for label in labels.tolist() if not 0 <= label < limit)
            remedy = f", or {IGNORED} where nothing is learned"
            if self.labelled is _class:
                remedy = ". An example without a class must be left out"
            raise TrainingError(f"{name} has the label {told(wrong)}, but labels are from 0 to {limit - 1:,}{remedy}.")
        if not any(len(text.asked) for text, _ in found):
            none = "The example has no label" if len(found) == 1 else f"None of the {len(found):,} examples has a label"
            longer = "a text of two tokens at least, or " if self.labelled is _next_tokens else ""
            raise TrainingError(f"{none} to learn from. Give {longer}labels other than {IGNORED}.")
        return found


def _are_within(limit: int, arrays: Sequence[np.ndarray]) -> bool:
    """Whether all labels are from 0 to less than the limit; all are asked at once."""
    every = np.concatenate([np.zeros(1, np.int64), *arrays])
    return bool(every.min() >= 0 and every.max() < limit)


def _at_their_places(example: Example) -> tuple[Sequence[int], np.ndarray]:
    """Each label belongs to the token that stands where it does."""
    array = _whole_numbers(example.labels)
    if array is None or array.shape != (len(example.ids),):
        raise ValueError(
            f"they must be whole numbers, one for each of its {len(example.ids)} tokens, and not "
            f"{told(example.labels)}."
        )
    return _labelled(array)


def _masked_words(example: Example) -> tuple[Sequence[int], np.ndarray]:
    if example.labels is None:
        raise ValueError("there are none. eet_lab.training.masked(model, rows) masks words of rows, and labels them.")
    return _at_their_places(example)


def _labelled(array: np.ndarray) -> tuple[Sequence[int], np.ndarray]:
    """The places of labels that are not ignored, and these."""
    places = np.flatnonzero(array != IGNORED)
    return places.tolist(), array[places]


def _whole_numbers(labels: Any) -> np.ndarray | None:
    """Labels as an array of int64, or of Python's own where one is beyond that: numpy would make fractions of them.

    None for what are no whole numbers.
    """
    array = np.asarray(labels)
    if array.dtype.kind == "i":
        return array.astype(np.int64, copy=False)
    numbers = np.asarray(labels, dtype=object)
    if not numbers.size or not all(map(is_whole, numbers.ravel().tolist())):
        return None
    return numbers if numbers.max() > MOST_64 or numbers.min() < -MOST_64 else numbers.astype(np.int64)


def _next_tokens(example: Example) -> tuple[Sequence[int], np.ndarray | None]:
    """Each label belongs to the token before it."""
    if example.labels is None:
        return range(len(example.ids) - 1), None
    places, labels = _at_their_places(example)
    has_first = bool(places) and places[0] == 0  # which nothing is before
    return [place - 1 for place in places[has_first:]], labels[has_first:]


def _answer(example: Example) -> tuple[Sequence[int], np.ndarray]:
    """Each label belongs to the place that the one before it has in the decoder."""
    array = _whole_numbers(example.labels)
    if array is None or array.ndim != 1 or not len(array):
        raise ValueError(f"there must be the token ids of an answer, and not {told(example.labels)}.")
    return _labelled(array)


def _class(example: Example) -> tuple[Sequence[int], np.ndarray]:
    array = _whole_numbers(example.labels)
    if array is None or array.ndim:
        raise ValueError(f"it must be the number of a class, and not {told(example.labels)}.")
    return (0,), array.reshape(1)


_vocab = attrgetter("vocab_size")


def _num_classes(config: Any) -> int:
    return len(config.labels)


LANGUAGE = TrainTask("language modeling", _next_tokens, decoder.logits, attrgetter("norm", "head"), _vocab)
"""Each token from those before it."""
MASKED = TrainTask(
    "masked language modeling", _masked_words, lambda model, ops, states: model.mlm_logits(ops, states),
    attrgetter("mlm_transform", "mlm_norm", "head"), _vocab, needs="mlm",
)  # fmt: skip
"""The tokens that stood where others stand now."""
CLASSES = TrainTask(
    "classification", _class, lambda model, ops, states: model.class_logits(ops, states), attrgetter("class_weights"),
    _num_classes, needs="classes",
)  # fmt: skip
"""The class of a text."""
TOKEN_CLASSES = TrainTask(
    "token classification", _at_their_places, lambda model, ops, states: model.token_class_logits(ops, states),
    attrgetter("token_classes"), _num_classes, needs="token_classes",
)  # fmt: skip
"""The class of each token."""
SEQ2SEQ = TrainTask(
    "sequence to sequence", _answer, decoder.logits, attrgetter("decoder.norm", "head.weight"), _vocab
)  # what is added to logits is not trained
"""The answer to a source, each token from those before it."""
TASKS = {"language": LANGUAGE, "masked": MASKED, "classes": CLASSES, "token-classes": TOKEN_CLASSES}
TASKS |= {"seq2seq": SEQ2SEQ}


def task_of(name: str | None, config: Config) -> TrainTask:
    """The task of that name; None: the only one of decoders and of encoder-decoders, and for encoders what their heads
    are for.
    """
    kind, fitting = "a decoder", ["language"]
    if isinstance(config, EncoderConfig):
        kind, heads = "an encoder", {"classes": "classes", "token_classes": "token-classes", "mlm": "masked"}
        fitting = [*(task for head, task in heads.items() if head in config.heads), "masked", *heads.values()]
    if isinstance(config, VisionConfig):
        kind, fitting = "an encoder of images", ["classes"]
    if isinstance(config, Seq2SeqConfig):
        kind, fitting = "an encoder-decoder", ["seq2seq"]
    name = name or fitting[0]
    check_choice(TrainingError, "task", name, TASKS)
    if name not in fitting:
        tasks = ", ".join(dict.fromkeys(fitting))
        raise TrainingError(f"task is {name!r}, and the model is {kind}, which is trained on other tasks: {tasks}.")
    TASKS[name].check(config)
    return TASKS[name]


def trained(model: Any, head: Head, fixed: Sequence[Tensor]) -> dict[str, Tensor]:
    """What a task reads of a model, by its path, but for `fixed`; a tensor that is there twice has its first one."""
    embeddings = ("token_embedding", "position_embedding", "type_embedding", "cls_token", "patches")
    body = (*embeddings, "norm", "layers", "encoder", "decoder")
    read = [*(t for name in body for t in tensors(getattr(model, name, None))), *head.weights]
    ids, found = {id(t) for t in read}, dict[int, tuple[str, Tensor]]()
    for path, tensor in flat(model):
        if id(tensor) in ids and not any(tensor is each for each in fixed):
            found.setdefault(id(tensor), (path, tensor))
    return dict(found.values())
