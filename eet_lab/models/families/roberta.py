"""RoBERTa: BERT whose positions begin behind the pads' row of their table, and whose heads are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eet_lab.errors import ModelError
from eet_lab.models.config import EncoderConfig
from eet_lab.models.families import bert, reading
from eet_lab.models.table import Entry, affine

MODEL_TYPES = {"roberta": ("RoBERTa", "RobertaModel")}
PREFIXES = ("roberta.",)
BUFFERS = bert.BUFFERS
HEADS = ("lm_head.", "classifier.")
COPIES = ("lm_head.decoder.weight", "lm_head.decoder.bias")
MASK = "<mask>"
LAYERS = bert.LAYERS


def config(settings: Mapping[str, Any]) -> EncoderConfig:
    """Read a checkpoint's config. Errors: ModelError."""
    told, pad = bert.sizes(settings), reading.token_id(settings, "pad_token_id")
    first = 2 if pad is None else pad + 1  # fairseq counts positions from behind the pads' id
    context = told["context"] - first
    if context < 1:
        raise ModelError(
            f"max_position_embeddings is {told['context']}, but positions begin at {first} (pad_token_id + 1); the "
            "checkpoint's config is damaged."
        )
    return EncoderConfig(**told | {"context": context}, first_position=first, class_act="tanh", family="roberta")


def settings(config: EncoderConfig) -> dict[str, Any]:
    """The other way round."""
    return bert.settings(config) | {"pad_token_id": config.first_position - 1}


def table(config: EncoderConfig) -> dict[str, Entry]:
    """Classes have a linear of their own before them, and no pooler."""
    return {
        **bert.layers(),
        **affine("mlm_transform", "lm_head.dense"),
        **affine("mlm_norm", "lm_head.layer_norm"),
        **bert.head(config, "lm_head.decoder", "lm_head.bias"),
        **affine("class_dense", "classifier.dense"),
        **affine("classes", "classifier.out_proj"),
        **affine("token_classes", "classifier"),
    }
