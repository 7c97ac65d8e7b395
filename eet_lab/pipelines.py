"""pipeline: transformers' pipelines, with their argument names and outputs, on our engines.

S tokens of a text, C channels, V vocabulary, L classes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from threading import Event
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from eet_lab.encoding import TextLike, Texts, as_masked, as_texts, classify, encode, mask_logits
from eet_lab.engine.generation import StepEvent
from eet_lab.engine.settings import checked_texts
from eet_lab.engine.tasks import CLASSES, MLM
from eet_lab.errors import ModelError, PromptError, did_you_mean
from eet_lab.models import Model, load
from eet_lab.models.chat import ChatTemplate, as_messages, template_of
from eet_lab.models.on_device import checked_model
from eet_lab.models.transcript import StoppedText
from eet_lab.parts.passes import Text
from eet_lab.scheduling.whole import MOST, check_choice, check_whole, is_whole
from eet_lab.texts import RecipeLike, as_recipe, generate
from eet_lab.words import told

DEFAULT: Any = object()
"""An argument that was not given: None means something else."""
Chat = Sequence[Mapping[str, Any]]
SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
    "none": lambda logits: logits,
}


WHY = {
    "batch_size": "texts that are given together are read together. ",
    "max_length": "max_new_tokens says how many tokens follow the prompt. ",
    "num_beams": "there is no beam search. ",
}
"""What is to be said of options that transformers' pipelines have."""
Call = TypeVar("Call", bound=Callable[..., Any])


def _options_checked(call: Call) -> Call:
    """A pipeline's call that names an option which it does not have."""
    known = [name for name in signature(call).parameters if name != "self"]

    @wraps(call)
    def checked(self: Pipeline, *given: Any, **how: Any) -> Any:
        _check_options(how, known)
        return call(self, *given, **how)

    return cast(Call, checked)


def _check_options(how: Iterable[str], known: Sequence[str]) -> None:
    """PromptError for the first that is none; what is known begins with what is given by place."""
    for name in how:
        if name not in known:
            why, hint = WHY.get(name, ""), did_you_mean(name, known)
            options = f"The options are {', '.join(known[1:])}."
            raise PromptError(f"This pipeline has no option {name!r}: {why}{options}{hint}")


@dataclass(frozen=True)
class Pipeline:
    """A model with a recipe, to be called with a text or a list of texts."""

    model: Model
    recipe: RecipeLike

    @staticmethod
    def check(model: Model) -> None:
        """ModelError for a model that cannot do it."""
        _ = model.encoder


class TextGeneration(Pipeline):
    """What follows a text or a chat: `[{"generated_text": ...}]`, and a list of those for a list of them."""

    @staticmethod
    def check(model: Model) -> None:
        _ = model.decoder

    @_options_checked
    def __call__(
        self,
        text_inputs: str | Chat | Sequence[str | Chat],
        *,
        max_new_tokens: int = 256,
        do_sample: bool = True,
        temperature: float = 0.7,
        top_k: int = 50,
        top_p: float = 1.0,
        num_return_sequences: int = 1,
        return_full_text: bool = True,
        return_tensors: bool = False,
        stop_sequence: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> list[Any]:
        """Defaults are transformers', but for `seed`, which transformers does not have: None draws anew in each call.

        A stop sequence ends a text and is part of it. With `return_tensors` there are "generated_token_ids", with those
        of the prompt. Errors: PromptError, and those of `eet_lab.generate`.
        """
        check_whole(PromptError, "num_return_sequences", num_return_sequences, 1, MOST)
        switches = {"do_sample": do_sample, "return_full_text": return_full_text, "return_tensors": return_tensors}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise PromptError(f"{name} is {told(value)}, but it must be True or False.")
        if num_return_sequences > 1 and not do_sample:
            raise PromptError("num_return_sequences is above 1, but without do_sample all texts would be the same.")
        given: list[Any] = [text_inputs] if _is_chat(text_inputs) else _several("text_inputs", text_inputs)
        rows = [self._ids(one) for one in given for _ in range(num_return_sequences)]
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        if do_sample:
            check_whole(PromptError, "top_k", top_k, 0, MOST)
            if temperature == 0:
                raise PromptError("temperature is 0, which draws nothing. Give one above 0, or do_sample=False.")
            how |= {"temperature": temperature, "top_k": min(top_k, self.model.config.vocab_size), "top_p": top_p}
            how["seed"] = secrets.randbits(62) if seed is None else seed
        watch = _Stops(self.model, stop_sequence, len(rows))
        run = generate(self.model, rows, self.recipe, on_step=watch, cancel=watch.all_done, **how).run
        found = []
        for number, (row, tokens, end) in enumerate(zip(rows, run.tokens, watch.ends, strict=True)):
            new = tokens[:end]
            prompt = given[number // num_return_sequences] if return_full_text else ""
            text = _joined(prompt, self.model.decode(new, special=False))
            found.append({"generated_token_ids": [*row, *new]} if return_tensors else {"generated_text": text})
        each = [found[at : at + num_return_sequences] for at in range(0, len(found), num_return_sequences)]
        return each[0] if given == [text_inputs] else each

    def _ids(self, given: str | Chat) -> list[int]:
        if isinstance(given, str):
            return self.model.encode(given)
        template: ChatTemplate | None = template_of(self.model.folder)
        if template is None:
            raise ModelError(f"{self.model.name} has no chat template. Give texts, or load a checkpoint with one.")
        return template.ids(as_messages(given))


class FillMask(Pipeline):
    """The likeliest words for a masked place: dicts with score, token, token_str and sequence, best first.

    A text with several masked places gets a list for each of them.
    """

    @staticmethod
    def check(model: Model) -> None:
        MLM.check(model.encoder.config)

    @_options_checked
    def __call__(self, inputs: str | Sequence[str], *, top_k: int = 5, targets: str | Sequence[str] = ()) -> list[Any]:
        """`targets` are words to choose among. Errors: PromptError, and those of `eet_lab.fill_mask`."""
        check_whole(PromptError, "top_k", top_k, 1, MOST)
        texts = as_masked(self.model, inputs)
        only = self._ids([targets] if isinstance(targets, str) else list(targets))
        found = []
        for text, logits in zip(texts, mask_logits(self.model, texts, self.recipe), strict=True):
            scores = logits.softmax(-1)
            best = (scores[:, only] if only else scores).topk(min(top_k, len(only) or scores.shape[-1]))
            ranked = zip(text.asked, best.indices.tolist(), best.values.tolist(), strict=True)
            places = [
                [self._said(text, place, only[rank] if only else rank, score) for rank, score in zip(*row, strict=True)]
                for place, *row in ranked
            ]
            found.append(places[0] if len(places) == 1 else places)
        return found[0] if len(found) == 1 else found

    def _said(self, text: Text, place: int, token: int, score: float) -> dict[str, Any]:
        ids = [*text.ids[:place], token, *text.ids[place + 1 :]]
        has_others = len(text.asked) > 1  # which are special tokens
        sequence = self.model.decode(ids, special=has_others)
        return {"score": score, "token": token, "token_str": self.model.decode([token]), "sequence": sequence}

    def _ids(self, targets: Sequence[str]) -> list[int]:
        tokenizer = self.model.tokenizer
        ids = [None if tokenizer is None else tokenizer.id_of(target) for target in targets]
        if None in ids:
            raise PromptError(f"targets has {told(targets[ids.index(None)])}, which is no word of the vocabulary.")
        return sorted({token for token in ids if token is not None})


class TextClassification(Pipeline):
    """The likeliest class of a text: `[{"label": ..., "score": ...}]`."""

    @staticmethod
    def check(model: Model) -> None:
        CLASSES.check(model.encoder.config)

    @_options_checked
    def __call__(
        self,
        inputs: str | Mapping[str, str] | Sequence[str | Mapping[str, str]],
        *,
        top_k: int | None = DEFAULT,
        function_to_apply: str | None = None,
        truncation: bool = False,
    ) -> Any:
        """`top_k` is how many classes to tell, each text's in a list; None: all. Without it, one for each text.

        A pair of texts is `{"text": ..., "text_pair": ...}`, whose likeliest class is no list. Errors: PromptError, and
        those of `eet_lab.classify`.
        """
        is_plain = top_k is DEFAULT
        if not is_plain and top_k is not None:
            check_whole(PromptError, "top_k", top_k, 1, MOST)
        if function_to_apply is not None and function_to_apply not in tuple(SCORES):
            hint = did_you_mean(str(function_to_apply), SCORES)
            raise PromptError(f"function_to_apply is {told(function_to_apply)}; there are {', '.join(SCORES)}.{hint}")
        is_one = isinstance(inputs, (str, Mapping))
        given: list[Any] = [inputs] if is_one else _several("inputs", inputs)
        texts = _read(self.model, [_as_pair(text) for text in given], truncation)
        run = classify(self.model, texts, self.recipe, truncate=truncation)
        scores = run.scores if function_to_apply is None else SCORES[function_to_apply](run.logits)
        found = list[list[dict[str, Any]]]()
        for row in scores.tolist():
            ranked = sorted(zip(run.names, row, strict=True), key=lambda pair: -pair[1])
            found.append([{"label": name, "score": score} for name, score in ranked[: 1 if is_plain else top_k]])
        if is_plain:
            return found[0][0] if isinstance(inputs, Mapping) else [each[0] for each in found]
        return found[0] if is_one else found


class FeatureExtraction(Pipeline):
    """The last hidden states [1,S,C] of a text, as nested lists."""

    @_options_checked
    def __call__(self, inputs: str | Sequence[str], *, truncation: bool = False, return_tensors: bool = False) -> Any:
        """With `return_tensors` they are tensors. Errors: those of `eet_lab.encode`."""
        texts = _read(self.model, inputs, truncation)
        states = encode(self.model, texts, self.recipe, pool=None, truncate=truncation).vectors
        found = [each[None] if return_tensors else [each.tolist()] for each in states]
        return found[0] if isinstance(inputs, str) else found


TASKS: Mapping[str, type[Pipeline]] = {
    "text-generation": TextGeneration,
    "fill-mask": FillMask,
    "text-classification": TextClassification,
    "feature-extraction": FeatureExtraction,
}


def pipeline(
    task: str, model: Model | str | os.PathLike = "demo", *, recipe: RecipeLike = "all", **loading: Any
) -> Any:
    """A pipeline as transformers has it, to be called with a text or a list of texts.

    `model` is a loaded model, or what `eet_lab.load` takes, to which `loading` goes (device, dtype, tokenizer);
    `torch_dtype` is dtype's older name in transformers.
    Errors: PromptError for a task that does not exist; ModelError for a model that cannot do it; RecipeError.
    """
    check_choice(PromptError, "task", task, TASKS)
    if isinstance(model, Model) and loading:
        raise PromptError(f"model is loaded already, so that {next(iter(loading))} would do nothing; give it to load.")
    if "dtype" not in loading and "torch_dtype" in loading:
        loading["dtype"] = loading.pop("torch_dtype")
    if is_whole(number := loading.get("device"), -1, MOST):  # as in transformers
        loading["device"] = "cpu" if number == -1 else f"cuda:{number}"
    _check_options(loading, [*signature(load).parameters])
    loaded = checked_model(model) if isinstance(model, Model) else load(model, **loading)
    TASKS[task].check(loaded)
    return TASKS[task](loaded, as_recipe(recipe, loaded.device, loaded.config))


class _Stops:
    """Where texts end that hold a stop sequence, as they are generated."""

    def __init__(self, model: Model, stops: str | Sequence[str], num_rows: int) -> None:
        is_one = isinstance(stops, str) or not isinstance(stops, Iterable)
        self._stops: list[Any] = [stops] if is_one else [*stops]
        if not all(isinstance(stop, str) and stop for stop in self._stops):
            raise PromptError(f"stop_sequence is {told(stops)}, but it must be a text or a list of texts, none empty.")
        decode = partial(model.decode, special=False)
        self._rows = [StoppedText(decode, self._stops) for _ in range(num_rows)]
        self.all_done = Event()

    def __call__(self, event: StepEvent) -> None:
        if not self._stops:
            return
        for row, token in event.tokens:
            self._rows[row].add([token])
        if all(row.is_stopped for row in self._rows):
            self.all_done.set()

    @property
    def ends(self) -> list[int | None]:
        """How many tokens each text has, up to the one that completes a stop sequence; None: all of them."""
        return [row.num_tokens if row.is_stopped else None for row in self._rows]


def _read(model: Model, texts: Texts, truncation: bool) -> Sequence[Text]:
    """Texts as an encoder reads them; PromptError, with transformers' word for cutting, for one that is too long."""
    read: Any = as_texts(model, texts, truncation)
    if not truncation:
        checked_texts([text.ids for text in read if isinstance(text, Text)], model.config, cut_by="truncation=True")
    return read


def _several(name: str, given: Any) -> list[Any]:
    """A text as a list of one, and a list as it is; PromptError for what is neither."""
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
        raise PromptError(f"{name} is {told(given)}, but it must be a text, or a list of texts.")
    return [given] if isinstance(given, str) else [*given]


def _is_chat(given: object) -> bool:
    return isinstance(given, list) and len(given) > 0 and all(isinstance(each, Mapping) for each in given)


def _joined(prompt: str | Chat, text: str) -> str | list[Mapping[str, Any]]:
    """A prompt with what follows it: a chat has one message more."""
    return prompt + text if isinstance(prompt, str) else [*prompt, {"role": "assistant", "content": text}]


def _as_pair(text: str | Mapping[str, str]) -> TextLike:
    if not isinstance(text, Mapping):
        return text
    if not {"text"} <= set(text) <= {"text", "text_pair"}:
        raise PromptError(f"A pair has {told(list(text))}, but it must have 'text', and may have 'text_pair'.")
    return (text["text"], text["text_pair"]) if "text_pair" in text else text["text"]
