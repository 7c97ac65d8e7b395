"""encode, classify, classify_tokens, fill_mask: texts in, what an encoder makes of them out, with a recipe.

N texts, C channels, V vocabulary, L classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eet_lab.engine.encode import EncoderEngine
from eet_lab.engine.in_flight import Run
from eet_lab.engine.tasks import CLASSES, CLS, HIDDEN, MEAN, MLM, TOKEN_CLASSES, TextTask
from eet_lab.errors import ModelError, PromptError, check_known, did_you_mean
from eet_lab.models import Model
from eet_lab.models.config import EncoderConfig, VisionConfig
from eet_lab.models.families import FAMILIES
from eet_lab.models.on_device import on_its_encoders_device
from eet_lab.models.tokenizer import check_characters
from eet_lab.parts.passes import Batching, Image, Readable, Text
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.whole import MOST, check_whole
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe
from eet_lab.words import told

TextLike = str | Sequence[int] | tuple[str, str] | Text
Texts = Sequence[TextLike] | str
"""A text, or a list of texts, of pairs of texts, or of lists of token ids with their special tokens.

An encoder of images reads pixels in their place: an array [N,channels,height,width], or a list of images.
"""
POOLS = {"mean": MEAN, "cls": CLS, None: HIDDEN}


@dataclass(frozen=True)
class Embeddings:
    """A vector for each text [N,C], in fp32 on the CPU; with `pool=None` the last hidden states [S,C] of each."""

    vectors: Tensor | tuple[Tensor, ...]
    recipe: Recipe
    run: Run


@dataclass(frozen=True)
class Classes:
    """The logits [N,L] of each text's classes, which `names` names, and their scores.

    Scores are softmax, or sigmoid where a text may have several labels or the model has one class, as transformers'
    pipeline has it; a regression's are its logits.
    """

    names: tuple[str, ...]
    logits: Tensor
    scores: Tensor
    recipe: Recipe
    run: Run

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of the likeliest class of each text."""
        return tuple(self.names[number] for number in self.logits.argmax(-1).tolist())


@dataclass(frozen=True)
class TokenClasses:
    """The logits [S,L] of the classes of each text's tokens, special ones among them; `names` names the classes."""

    names: tuple[str, ...]
    logits: tuple[Tensor, ...]
    recipe: Recipe
    run: Run

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The name of the likeliest class of each token."""
        return tuple(tuple(self.names[number] for number in each.argmax(-1).tolist()) for each in self.logits)


class Guess(NamedTuple):
    """A word that may stand in a masked place, and its probability among all words."""

    word: str
    token: int
    score: float


@dataclass(frozen=True)
class Guesses:
    """The likeliest words, best first, for each masked place of each text."""

    words: tuple[tuple[tuple[Guess, ...], ...], ...]
    recipe: Recipe
    run: Run


MASKS = ("[MASK]", "<mask>")
"""Words for a masked one: a tokenizer may be of another kind than most of the model's family."""


@on_its_encoders_device
def encode(
    model: Model,
    texts: Texts,
    recipe: RecipeLike = "all",
    *,
    pool: str | None = "mean",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    **batching: Any,
) -> Embeddings:
    """Embeddings of texts, in their order.

    `pool` is "mean" (of all tokens' last hidden states), "cls" (what the pooler makes of the first token, or its hidden
    state where there is no pooler) or None (the hidden states themselves). `batching` are the fields of `Batching`:
    `batch_tokens`, `batch_size` and `truncate`. `progress` is told of the texts that are done, after each pass.
    `cancel` ends the run between two ops, with Cancelled.

    Errors: PromptError, RecipeError, ModelError for a decoder, OutOfMemory, Cancelled.
    """
    if pool not in tuple(POOLS):  # which takes what cannot be hashed
        hint = did_you_mean(str(pool), filter(None, POOLS))
        raise PromptError(f"pool is {pool!r:.60}, but it must be 'mean', 'cls' or None for hidden states.{hint}")
    chosen, run = _read(model, texts, POOLS[pool], recipe, batching, progress, cancel)
    if pool is None:
        return Embeddings(run.values, chosen, run)
    return Embeddings(_stacked(run, model.config.hidden_size), chosen, run)


@on_its_encoders_device
def classify(
    model: Model,
    texts: Texts,
    recipe: RecipeLike = "all",
    *,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    **batching: Any,
) -> Classes:
    """The classes of texts, by the head of a checkpoint for sequence classification; keywords as of `encode`."""
    chosen, run = _read(model, texts, CLASSES, recipe, batching, progress, cancel)
    config = model.encoder.config
    logits = _stacked(run, len(config.labels))
    return Classes(config.labels, logits, scores_of(config, logits), chosen, run)


@on_its_encoders_device
def classify_tokens(
    model: Model,
    texts: Texts,
    recipe: RecipeLike = "all",
    *,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    **batching: Any,
) -> TokenClasses:
    """The classes of the tokens of texts, by the head of a checkpoint for token classification; keywords as of
    `encode`.
    """
    chosen, run = _read(model, texts, TOKEN_CLASSES, recipe, batching, progress, cancel)
    return TokenClasses(model.encoder.config.labels, tuple(run.values), chosen, run)


def scores_of(config: EncoderConfig, logits: Tensor) -> Tensor:
    """The scores of classes from their logits [N,L], as `Classes` has them."""
    if config.problem_type == "regression":
        return logits
    if config.problem_type == "multi_label_classification" or logits.shape[-1] == 1:
        return logits.sigmoid()
    return logits.softmax(-1)


@on_its_encoders_device
def fill_mask(
    model: Model,
    texts: Texts,
    recipe: RecipeLike = "all",
    *,
    top_k: int = 5,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    **batching: Any,
) -> Guesses:
    """The likeliest words for masked places, which texts mark by the tokenizer's word: "[MASK]", of RoBERTa "<mask>".

    Other keywords as of `encode`. A text without a masked place is a PromptError.
    """
    check_whole(PromptError, "top_k", top_k, 1, MOST)
    masked = as_masked(model, texts, bool(batching.get("truncate")))
    chosen, run = _read(model, masked, MLM, recipe, batching, progress, cancel)
    return Guesses(tuple(_guesses(model, logits, top_k) for logits in run.values), chosen, run)


def as_masked(model: Model, texts: Texts, truncate: bool = False) -> list[Text]:
    """Texts that ask for their masked places. Errors: PromptError for one without; ModelError."""
    MLM.check(model.encoder.config)
    usual, tokenizer = FAMILIES[model.config.family].MASK, model.tokenizer
    word = next((each for each in (usual, *MASKS) if tokenizer and tokenizer.id_of(each) is not None), None)
    if tokenizer is None or word is None:
        raise ModelError(
            f"{model.name} has no tokenizer with the word {usual}, which stands for a masked one; load it with its own."
        )
    mask = tokenizer.id_of(word)
    read: Any = as_texts(model, texts, truncate)
    marked = [text._replace(asked=[at for at, token in enumerate(text.ids) if token == mask]) for text in read]
    if bare := [number for number, text in enumerate(marked, 1) if not text.asked]:
        raise PromptError(f"Text {bare[0]} has no {word}; write it in place of the word that shall be guessed.")
    return marked


@on_its_encoders_device
def mask_logits(model: Model, texts: Sequence[Text], recipe: RecipeLike = "all", **batching: Any) -> tuple[Tensor, ...]:
    """The logits [N,V] of the words at each text's masked places, as `as_masked` found them. Errors: as of `encode`."""
    return tuple(_read(model, texts, MLM, recipe, batching, None, None)[1].values)


def as_images(model: Model, images: Any) -> list[Image]:
    """Pixels [N,channels,height,width], or a list of such images, as an engine reads them; PromptError for others."""
    read = []
    for number, image in enumerate(images if isinstance(images, (Tensor, np.ndarray, list, tuple)) else [None], 1):
        if not isinstance(image, (Tensor, np.ndarray)) or image.ndim != 3:
            raise PromptError(
                f"Image {number} is {told(image)}, but this model ({model.config.family}) reads pixels as an array of "
                "[channels,height,width], which its image processor makes: "
                "AutoImageProcessor.from_pretrained(folder)(images, return_tensors='pt').pixel_values."
            )
        read.append(Image(torch.as_tensor(image).cpu(), model.encoder.config.patch_size))
    return read


def as_texts(model: Model, texts: Texts, truncate: bool = False) -> Sequence[Readable]:
    """Texts, pairs of texts and lists of token ids as an engine reads them, or images; PromptError for what is none.

    With `truncate` pairs that are too long are cut here, where it is known which text a token belongs to.
    """
    if isinstance(model.config, VisionConfig):
        return as_images(model, texts)
    if not isinstance(texts, Iterable) or isinstance(texts, bytes):
        raise PromptError(f"texts is {texts!r:.60}, but it must be a text, or a list of texts or lists of token ids.")
    most = model.config.context if truncate else None
    return [_as_text(model, text, most) for text in ([texts] if isinstance(texts, str) else texts)]


def _as_text(model: Model, text: TextLike, most: int | None) -> Text:
    if isinstance(text, Text):  # it was read before
        return text
    pair = (text,) if isinstance(text, str) else text
    if not (isinstance(pair, tuple) and len(pair) in (1, 2) and all(isinstance(part, str) for part in pair)):
        return Text(model.encode(text))  # type: ignore[arg-type]  # what is no list of ids is told there
    if model.tokenizer is None:
        raise ModelError(
            f"{model.name} came without a tokenizer; give texts as lists of token ids, or load one with it."
        )
    for part in pair:
        check_characters(part)
    ids, types = model.tokenizer.read(pair[0], pair[1] if len(pair) > 1 else None, most)
    return Text(ids, types if model.encoder.config.num_types > 1 and any(types or ()) else None)


def _read(
    model: Model,
    texts: Texts,
    task: TextTask,
    recipe: RecipeLike,
    batching: dict[str, Any],
    progress: Progress | None,
    cancel: Cancel | None,
) -> tuple[Recipe, Run]:
    for name in batching:
        check_known(PromptError, "keyword", name, [each.name for each in fields(Batching)])
    how = Batching(**batching)
    read = as_texts(model, texts, how.truncate)
    chosen = as_recipe(recipe, model.device, model.config)
    with closing(EncoderEngine(model.encoder, chosen.parts)) as engine:
        engine.prepare(progress, cancel)
        return chosen, engine.read(read, task, how, progress=progress, cancel=cancel)


def _stacked(run: Run, width: int) -> Tensor:
    return run.values if isinstance(run.values, Tensor) else torch.empty(0, width)


def _guesses(model: Model, logits: Tensor, top_k: int) -> tuple[tuple[Guess, ...], ...]:
    best = logits.softmax(-1).topk(min(top_k, logits.shape[-1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        tuple(Guess(model.decode([token]).strip(), token, score) for token, score in zip(*row, strict=True))
        for row in rows
    )
