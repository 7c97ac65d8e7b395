"""What a model is trained to tell: each word's next one, words that were masked, a text's class, or another text.

T tokens of a pass, N of them with a label, B texts, C channels, V words, L classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from eet_lab.errors import ModelError, TrainingError
from eet_lab.models import decoder, encoder, seq2seq
from eet_lab.models.config import HEADS, Config, EncoderConfig, Seq2SeqConfig
from eet_lab.models.decoder import tensors
from eet_lab.parts import Ops
from eet_lab.parts.losses import Head
from eet_lab.parts.passes import Text
from eet_lab.words import told

IGNORED = -100
"""The label of a token that is not learned from, as in PyTorch and transformers."""


class Example(NamedTuple):
    """A text, and what the model shall tell of it.

    `labels` are a token each, `IGNORED` where nothing is learned; a language model learns each token from those before
    it. None: all of `ids`, for a language model. For a classifier it is the number of the class. For an
    encoder-decoder they are the tokens of its answer, of any number, to the source `ids`.
    """

    ids: Sequence[int]
    labels: Sequence[int] | int | None = None
    types: Sequence[int] | None = None


@dataclass(frozen=True)
class TrainTask:
    """What is learned, in words, and how it is read from hidden states."""

    name: str
    read: Callable[[Example, Any], tuple[Text, Sequence[int]]]
    """What a model of such a config reads, asked for the tokens from whose states something is told, and the labels of
    these. Errors: ValueError.
    """
    head: Callable[[Any, Ops], Head]
    num_labels: Callable[[Any], int]
    needs: str = ""
    """What of `HEADS` the checkpoint must have."""

    def check(self, config: Config) -> None:
        """ModelError where such a model lacks what is trained."""
        if self.needs and self.needs not in getattr(config, "heads", ()):
            raise ModelError(
                f"This checkpoint lacks {HEADS[self.needs]}, which {self.name} trains. Load one that was saved with it."
            )

    def checked(self, examples: Sequence[Example], config: Config) -> list[tuple[Text, Sequence[int]]]:
        """The texts with the places that have a label, and the labels. Errors: TrainingError, which names the first."""
        found, limit = [], self.num_labels(config)
        for number, example in enumerate(examples, 1):
            try:
                text, labels = self.read(example, config)
            except (TypeError, ValueError) as error:
                raise TrainingError(f"Example {number} has labels that {self.name} cannot read: {error}") from error
            wrong = next((label for label in labels if not 0 <= label < limit), None)
            if wrong is not None:
                raise TrainingError(
                    f"Example {number} has the label {told(wrong)}, but labels are from 0 to {limit - 1:,}, or "
                    f"{IGNORED} where nothing is learned."
                )
            found.append((text, labels))
        if not any(labels for _, labels in found):
            raise TrainingError(
                f"None of the {len(found)} examples has a label to learn from. Give longer texts, or labels other than "
                f"{IGNORED}."
            )
        return found


def _at_their_places(example: Example, config: Config) -> tuple[Text, Sequence[int]]:
    """Each label belongs to the token that stands where it does."""
    array = np.asarray(example.labels)
    if array.shape != (len(example.ids),) or array.dtype.kind not in "iu":
        raise ValueError(
            f"there must be one for each of its {len(example.ids)} tokens, and not {told(example.labels)}."
        )
    places = np.flatnonzero(array != IGNORED)
    return Text(example.ids, example.types, places.tolist()), array[places].tolist()


def _next_tokens(example: Example, config: Config) -> tuple[Text, Sequence[int]]:
    """Each label belongs to the token before it."""
    if example.labels is None:
        return Text(example.ids, None, range(len(example.ids) - 1)), list(example.ids[1:])
    text, labels = _at_their_places(example, config)
    before = [(place - 1, label) for place, label in zip(text.asked, labels, strict=True) if place]
    return text._replace(asked=[place for place, _ in before]), [label for _, label in before]


def _class(example: Example, config: Config) -> tuple[Text, Sequence[int]]:
    if not isinstance(example.labels, int) or isinstance(example.labels, bool):
        raise ValueError(f"it must be the number of a class, and not {told(example.labels)}.")
    return Text(example.ids, example.types, (0,)), (example.labels,)


def _answer(example: Example, config: Seq2SeqConfig) -> tuple[Text, Sequence[int]]:
    """The decoder reads the labels shifted right: the start token, then each label but the last."""
    array = np.asarray(example.labels)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ValueError(f"there must be the token ids of an answer, and not {told(example.labels)}.")
    if len(array) > config.context:
        raise ValueError(f"there are {len(array):,}, but the model's context is {config.context:,}.")
    before = [config.start_id, *np.where(array == IGNORED, config.pad_id, array)[:-1].tolist()]
    places = np.flatnonzero(array != IGNORED)
    return Text(before, None, places.tolist(), example.ids), array[places].tolist()


def _of_words(model: Any, ops: Ops) -> Head:
    return Head(lambda states: decoder.logits(model, ops, states), tuple(tensors((model.norm, model.head))))


def _of_answers(model: Any, ops: Ops) -> Head:
    weights = tensors((model.decoder.norm, model.head.weight))  # what is added to logits is not trained
    return Head(lambda states: seq2seq.logits(model, ops, states), tuple(weights))


def _of_masked(model: Any, ops: Ops) -> Head:
    weights = tensors((model.mlm_transform, model.mlm_norm, model.head))
    return Head(lambda states: encoder.mlm_logits(model, ops, states), tuple(weights))


def _of_classes(model: Any, ops: Ops) -> Head:
    before = model.pooler if model.class_dense is None else model.class_dense
    weights = tensors(tuple(part for part in (before, model.classes) if part is not None))
    return Head(lambda states: encoder.class_logits(model, ops, states), tuple(weights))


def _vocab(config: Any) -> int:
    return config.vocab_size


LANGUAGE = TrainTask("language modeling", _next_tokens, _of_words, _vocab)
"""Each token from those before it."""
MASKED = TrainTask("masked language modeling", _at_their_places, _of_masked, _vocab, needs="mlm")
"""The tokens that stood where others stand now."""
CLASSES = TrainTask("classification", _class, _of_classes, lambda config: len(config.labels), needs="classes")
"""The class of a text."""
SEQ2SEQ = TrainTask("sequence to sequence", _answer, _of_answers, _vocab)
"""The answer to a source, each token from those before it."""
TASKS = {"language": LANGUAGE, "masked": MASKED, "classes": CLASSES, "seq2seq": SEQ2SEQ}


def task_of(name: str | None, config: Config) -> TrainTask:
    """The task of that name; None: the only one of decoders and of encoder-decoders, and for encoders what their heads
    are for.
    """
    kind, of_kind = "a decoder", ["language"]
    if isinstance(config, EncoderConfig):
        kind, of_kind = "an encoder", ["classes", "masked"] if "classes" in config.heads else ["masked", "classes"]
    elif isinstance(config, Seq2SeqConfig):
        kind, of_kind = "an encoder-decoder", ["seq2seq"]
    name = name or of_kind[0]
    if name not in TASKS:
        raise TrainingError(f"task is {told(name)}, but it must be one of {', '.join(TASKS)}.")
    if name not in of_kind:
        raise TrainingError(f"task is {name!r}, and the model is {kind}, which cannot be trained on it.")
    TASKS[name].check(config)
    return TASKS[name]
