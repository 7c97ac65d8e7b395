"""Tiny encoders of every family, made by transformers, with random weights, and what transformers makes of texts."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from eet_lab.engine.encode import EncoderEngine
from eet_lab.models import load
from eet_lab.parts.passes import Text
from eet_lab.technique import Recipe

V, CONTEXT, LABELS = 97, 40, 3
LENGTHS = (3, 11, 1, 7, 14, 5, 7, 3, 40)
MASK = 4
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
}
DISTIL = {"vocab_size": V, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4, "max_position_embeddings": CONTEXT}
ROBERTA = SIZES | {"pad_token_id": 1, "max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1}
UNTIED = {"tie_word_embeddings": False}
CLASSES = {"id2label": {0: "bad", 1: "fair", 2: "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}
WHOLE, MLM, CLASS = "AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"
TOKEN_CLASS = "AutoModelForTokenClassification"
CONFIGS = {
    "bert": ("bert", SIZES, WHOLE),
    "bert-mlm": ("bert", SIZES | {"hidden_act": "gelu_new"}, MLM),
    "bert-untied": ("bert", SIZES | UNTIED, MLM),
    "bert-classes": ("bert", SIZES | CLASSES, CLASS),
    "bert-pretrained": ("bert", SIZES | {"hidden_act": "relu"}, "AutoModelForPreTraining"),
    "roberta": ("roberta", ROBERTA, WHOLE),
    "roberta-mlm": ("roberta", ROBERTA | {"hidden_act": "relu"}, MLM),
    "roberta-untied": ("roberta", ROBERTA | UNTIED, MLM),
    "roberta-classes": ("roberta", ROBERTA | CLASSES, CLASS),
    "distilbert": ("distilbert", DISTIL, WHOLE),
    "distilbert-mlm": ("distilbert", DISTIL | {"activation": "relu"}, MLM),
    "distilbert-classes": ("distilbert", DISTIL | CLASSES, CLASS),
    "bert-token-classes": ("bert", SIZES | CLASSES, TOKEN_CLASS),
    "roberta-token-classes": ("roberta", ROBERTA | CLASSES, TOKEN_CLASS),
    "distilbert-token-classes": ("distilbert", DISTIL | CLASSES, TOKEN_CLASS),
}
BODIES = [name for name in CONFIGS if "-" not in name]
WITH_MLM = [name for name, (*_, head) in CONFIGS.items() if head == MLM or name == "bert-pretrained"]
WITH_CLASSES = [name for name, (*_, head) in CONFIGS.items() if head == CLASS]

WITH_TOKEN_CLASSES = [name for name, (*_, head) in CONFIGS.items() if head == TOKEN_CLASS]


@cache
def theirs(name: str):
    """A model with random numbers for what transformers begins with 0 or 1: no mistake is hidden."""
    kind, sizes, head = CONFIGS[name]
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = getattr(transformers, head).from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and path.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.3 + is_norm)
        for path, parameter in model.named_parameters():  # one tensor by its meaning, of which only one is read
            if path.endswith("decoder.bias"):
                model.get_parameter(path.replace("decoder.bias", "bias")).copy_(parameter)
    return model


@cache
def ours(name: str):
    return load(theirs(name), device="cpu")


def rows() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(5, V) for _ in range(length)] for length in LENGTHS]


def texts() -> list[Text]:
    """With masked places, as many as a text has room for."""
    asked = [sorted({0, len(row) // 2, len(row) - 1}) for row in rows()]
    masked = [
        [MASK if at in places else token for at, token in enumerate(row)]
        for row, places in zip(rows(), asked, strict=True)
    ]
    return [Text(row, None, places) for row, places in zip(masked, asked, strict=True)]


def told(name: str, row: list[int], types: list[int] | None = None):
    """What transformers says of a text alone."""
    return _told(name, tuple(row), None if types is None else tuple(types))


@cache
def _told(name: str, row: tuple[int, ...], types: tuple[int, ...] | None):
    types = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        return theirs(name)(torch.tensor([row]), output_hidden_states=True, **types)


def padded_on_the_right(name: str, rows: list[list[int]]) -> list[torch.Tensor]:
    """The last hidden states of a batch as transformers reads it."""
    longest = max(map(len, rows))
    pad = theirs(name).config.pad_token_id
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        hidden = theirs(name)(ids, attention_mask=real, output_hidden_states=True).hidden_states[-1]
    return [states[: len(row)] for states, row in zip(hidden, rows, strict=True)]


@cache
def engine_of(name: str, recipe: str) -> EncoderEngine:
    return EncoderEngine(ours(name).encoder, Recipe.parse(recipe).parts)


def read(name, task, recipe="", batching=None, given=None):
    """What an engine makes of texts that may have read others before."""
    return engine_of(name, recipe).read(given or texts(), task, batching)


def close(got, exact):
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


class Late(NamedTuple):
    """Done once somebody waits for it."""

    number: int
    seen: list[tuple[str, int]]

    def query(self) -> bool:
        return ("come", self.number) in self.seen

    def synchronize(self) -> None:
        self.seen.append(("come", self.number))


def passes_that_are_late(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """When each pass is launched and comes from now on, where nothing comes before somebody waits for it."""
    seen: list[tuple[str, int]] = []
    launched = EncoderEngine._launched

    def late(engine: EncoderEngine, group: Any, task: Any) -> Any:
        number = sum(what == "launched" for what, _ in seen)
        seen.append(("launched", number))
        return launched(engine, group, task)._replace(event=Late(number, seen))

    monkeypatch.setattr(EncoderEngine, "_launched", late)
    return seen
