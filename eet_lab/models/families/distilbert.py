"""DistilBERT: BERT with half the layers, without token types and without a pooler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eet_lab.models.config import EncoderConfig
from eet_lab.models.families import reading
from eet_lab.models.table import Entry, affine, one

MODEL_TYPES = {"distilbert": ("DistilBERT", "DistilBertModel")}
PREFIXES = ("distilbert.",)
BUFFERS = (".position_ids",)
HEADS = ("vocab_", "pre_classifier.", "classifier.")
COPIES = ("vocab_projector.weight",)
MASK = "[MASK]"
LAYERS = "n_layers"
SIZES = (LAYERS, "dim", "n_heads", "hidden_dim", "vocab_size", "max_position_embeddings")
EPS = 1e-12  # its config has none


def config(settings: Mapping[str, Any]) -> EncoderConfig:
    """Read a checkpoint's config. Errors: ModelError."""
    hidden, heads = reading.heads(settings, "dim", "n_heads", SIZES)
    act = reading.choice(settings, "activation", "gelu", reading.ENCODER_ACTIVATIONS)
    return EncoderConfig(
        num_layers=reading.size(settings, LAYERS, SIZES),
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=reading.size(settings, "hidden_dim", SIZES),
        vocab_size=reading.size(settings, "vocab_size", SIZES),
        context=reading.size(settings, "max_position_embeddings", SIZES),
        act=act,
        eps=EPS,
        tied_head=bool(settings.get("tie_word_embeddings", True)),
        family="distilbert",
        num_types=0,
        **reading.classes(settings),
        mlm_act=act,
        class_act="relu",
    )


def settings(config: EncoderConfig) -> dict[str, Any]:
    """The other way round."""
    return {
        "n_layers": config.num_layers,
        "dim": config.hidden_size,
        "n_heads": config.num_heads,
        "hidden_dim": config.ffn_size,
        "max_position_embeddings": config.context,
        "activation": reading.named(config.act, reading.ENCODER_ACTIVATIONS),
        **reading.classes_settings(config),
    }


def table(config: EncoderConfig) -> dict[str, Entry]:
    """Queries, keys and values are tensors of their own."""
    h, at = "transformer.layer.*.", "transformer.layer.*.attention."
    return {
        **one("token_embedding", "embeddings.word_embeddings.weight"),
        **one("position_embedding", "embeddings.position_embeddings.weight"),
        **affine("norm", "embeddings.LayerNorm"),
        **affine("layers.*.qkv", *(f"{at}{x}_lin" for x in "qkv"), how="cat"),
        **affine("layers.*.proj", at + "out_lin"),
        **affine("layers.*.norm_1", h + "sa_layer_norm"),
        **affine("layers.*.fc_1", h + "ffn.lin1"),
        **affine("layers.*.fc_2", h + "ffn.lin2"),
        **affine("layers.*.norm_2", h + "output_layer_norm"),
        **affine("mlm_transform", "vocab_transform"),
        **affine("mlm_norm", "vocab_layer_norm"),
        **affine("head", "vocab_projector"),
        **affine("class_dense", "pre_classifier"),
        **affine("classes", "classifier"),
        **affine("token_classes", "classifier"),
    }
