"""BERT: an encoder with learned positions, token types, layer norms behind the residuals, and GELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eet_lab.models.config import EncoderConfig
from eet_lab.models.families import reading
from eet_lab.models.table import Entry, affine, one

MODEL_TYPES = {"bert": ("BERT", "BertModel")}
PREFIXES = ("bert.",)
BUFFERS = (".position_ids", ".token_type_ids")
RENAMED = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}  # TensorFlow's
HEADS = ("cls.", "classifier.")
COPIES = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
MASK = "[MASK]"
LAYERS = "num_hidden_layers"
SIZES = (LAYERS, "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings")


def config(settings: Mapping[str, Any]) -> EncoderConfig:
    """Read a checkpoint's config. Errors: ModelError."""
    return EncoderConfig(**sizes(settings), mlm_act=activation(settings), family="bert")


def sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What BERT's config tells, and RoBERTa's in the same words."""
    hidden, heads = reading.heads(settings, "hidden_size", "num_attention_heads", SIZES)
    kind = settings.get("position_embedding_type") or "absolute"
    beyond = {
        "causal attention (is_decoder = true)": bool(settings.get("is_decoder")),
        "cross-attention": bool(settings.get("add_cross_attention")),
        f"{kind} positions (position_embedding_type)": kind != "absolute",
    }
    reading.refuse(settings, beyond)
    return {
        "num_layers": reading.size(settings, LAYERS, SIZES),
        "hidden_size": hidden,
        "num_heads": heads,
        "ffn_size": reading.size(settings, "intermediate_size", SIZES),
        "vocab_size": reading.size(settings, "vocab_size", SIZES),
        "context": reading.size(settings, "max_position_embeddings", SIZES),
        "act": activation(settings),
        "eps": reading.number(settings, "layer_norm_eps", 1e-12),
        "tied_head": bool(settings.get("tie_word_embeddings", True)),
        "num_types": reading.size(settings, "type_vocab_size", SIZES, default=2),
        **reading.classes(settings),
    }


def activation(settings: Mapping[str, Any]) -> str:
    """The activation of the layers, and of BERT's masked language modeling head."""
    return reading.choice(settings, "hidden_act", "gelu", reading.ENCODER_ACTIVATIONS)


def settings(config: EncoderConfig) -> dict[str, Any]:
    """The other way round."""
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.context + config.first_position,
        "hidden_act": reading.named(config.act, reading.ENCODER_ACTIVATIONS),
        "layer_norm_eps": config.eps,
        "type_vocab_size": config.num_types,
        **reading.classes_settings(config),
    }


def layers() -> dict[str, Entry]:
    """The embeddings, the layers and the pooler, as RoBERTa has them too."""
    e, h, at = "embeddings.", "encoder.layer.*.", "encoder.layer.*.attention."
    return {
        **one("token_embedding", e + "word_embeddings.weight"),
        **one("position_embedding", e + "position_embeddings.weight"),
        **one("type_embedding", e + "token_type_embeddings.weight"),
        **affine("norm", e + "LayerNorm"),
        **affine("layers.*.qkv", *(f"{at}self.{x}" for x in ("query", "key", "value")), how="cat"),
        **affine("layers.*.proj", at + "output.dense"),
        **affine("layers.*.norm_1", at + "output.LayerNorm"),
        **affine("layers.*.fc_1", h + "intermediate.dense"),
        **affine("layers.*.fc_2", h + "output.dense"),
        **affine("layers.*.norm_2", h + "output.LayerNorm"),
        **affine("pooler", "pooler.dense"),
    }


def table(config: EncoderConfig) -> dict[str, Entry]:
    """Queries, keys and values are tensors of their own."""
    mlm = "cls.predictions."
    return {
        **layers(),
        **affine("mlm_transform", mlm + "transform.dense"),
        **affine("mlm_norm", mlm + "transform.LayerNorm"),
        **head(config, mlm + "decoder", mlm + "bias"),
        **affine("next_sentence", "cls.seq_relationship"),
        **affine("classes", "classifier"),
        **affine("token_classes", "classifier"),
    }


def head(config: EncoderConfig, name: str, bias: str) -> dict[str, Entry]:
    """The last linear of the masked language modeling head.

    Its bias has two names for one tensor; a checkpoint whose head is not tied holds it twice.
    """
    twin = one("head.bias", f"{name}.bias", bias, how="twin")
    return one("head.weight", f"{name}.weight") | (one("head.bias", bias) if config.tied_head else twin)
