"""OPT: learned positions that begin in the third row of their table, layer norms, ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eet_lab.models.config import LINEARS, NORMS, Config
from eet_lab.models.families import reading
from eet_lab.models.table import Entry, affine, one

MODEL_TYPES = {"opt": ("OPT", "OPTForCausalLM")}
PREFIXES = ("model.decoder.", "decoder.")
BUFFERS = ("version",)  # of fairseq
LAYERS = "num_hidden_layers"
SIZES = (LAYERS, "hidden_size", "num_attention_heads", "ffn_dim", "vocab_size", "max_position_embeddings")
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh"}
FIRST_POSITION = 2
"""fairseq kept rows for two special tokens. They are loaded and saved, and never looked up."""


def config(settings: Mapping[str, Any]) -> Config:
    """Read a checkpoint's config. Errors: ModelError."""
    hidden, heads = reading.heads(settings, "hidden_size", "num_attention_heads", SIZES)
    projected = settings.get("word_embed_proj_dim") or hidden
    beyond = {
        f"word embeddings of another width (word_embed_proj_dim = {projected})": projected != hidden,
        "norms after the residual (do_layer_norm_before = false)": not settings.get("do_layer_norm_before", True),
        "no last norm": bool(settings.get("_remove_final_layer_norm")),
        "norms without weights": not settings.get("layer_norm_elementwise_affine", True),
    }
    reading.refuse(settings, beyond)
    vocab = reading.size(settings, "vocab_size", SIZES)
    return Config(
        num_layers=reading.size(settings, LAYERS, SIZES),
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=reading.size(settings, "ffn_dim", SIZES),
        vocab_size=vocab,
        context=reading.size(settings, "max_position_embeddings", SIZES),
        act=reading.choice(settings, "activation_function", "relu", ACTIVATIONS),
        **reading.bos(settings, vocab),
        eos_id=reading.token_id(settings, "eos_token_id"),
        tied_head=bool(settings.get("tie_word_embeddings", True)),
        family="opt",
        biases=(*NORMS, *LINEARS) if settings.get("enable_bias", True) else NORMS,
        first_position=FIRST_POSITION,
    )


def settings(config: Config) -> dict[str, Any]:
    """The other way round."""
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "word_embed_proj_dim": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "ffn_dim": config.ffn_size,
        "max_position_embeddings": config.context,
        "activation_function": reading.named(config.act, ACTIVATIONS),
        "enable_bias": "qkv" in config.biases,
    }


def table(config: Config) -> dict[str, Entry]:
    """Queries, keys and values are tensors of their own."""
    h, at = "layers.*.", "layers.*.self_attn."
    return {
        **one("token_embedding", "embed_tokens.weight"),
        **one("position_embedding", "embed_positions.weight"),
        **affine("layers.*.norm_1", h + "self_attn_layer_norm"),
        **affine("layers.*.qkv", *(f"{at}{x}_proj" for x in "qkv"), how="cat", sizes=(config.hidden_size,) * 3),
        **affine("layers.*.proj", at + "out_proj"),
        **affine("layers.*.norm_2", h + "final_layer_norm"),
        **affine("layers.*.fc_1", h + "fc1"),
        **affine("layers.*.fc_2", h + "fc2"),
        **affine("norm", "final_layer_norm"),
        **one("head.weight", "lm_head.weight"),
    }
