"""T5: an encoder and a decoder whose positions are only a bias of scores, RMS norms, ReLU or a gated GELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eet_lab.errors import ModelError
from eet_lab.models.config import Seq2SeqConfig
from eet_lab.models.families import reading
from eet_lab.models.table import HEAD, SHARED, Entry, affine, one
from eet_lab.ops.reference import GATED

MODEL_TYPES = {"t5": ("T5", "T5ForConditionalGeneration")}
PREFIXES = ("",)
BUFFERS = ("EncDecAttention.relative_attention_bias.weight",)  # of older checkpoints, which never read it
LAYERS = ("num_layers", "num_decoder_layers")
SIZES = (LAYERS[0], "d_model", "num_heads", "d_kv", "d_ff", "vocab_size")
ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu"}
ACTIVATIONS |= {"gated-gelu_new": "geglu", "gated-silu": "swiglu"}
CONTEXT = 2**31 - 1
"""Any: relative positions have no end."""


def config(settings: Mapping[str, Any]) -> Seq2SeqConfig:
    """Read a checkpoint's config. Errors: ModelError."""
    told = reading.generated(settings)
    buckets = reading.size(settings, "relative_attention_num_buckets", SIZES, default=32)
    distance = reading.size(settings, "relative_attention_max_distance", SIZES, default=128)
    if buckets % 4 or distance <= buckets // 2:
        raise ModelError(
            f"There are {buckets} buckets for relative positions up to {distance}, but it must be a multiple of 4, and "
            "the distance more than half of it; the checkpoint's config is damaged."
        )
    hidden, encoder_layers = (reading.size(settings, name, SIZES) for name in ("d_model", LAYERS[0]))
    # T5 scaled what its head reads; T5 1.1 does not, and was told by a head of its own.
    is_scaled = settings.get("scale_decoder_outputs", settings.get("tie_word_embeddings", True))
    return Seq2SeqConfig(
        **told,
        num_layers=reading.size(settings, LAYERS[1], SIZES, default=encoder_layers),
        encoder_layers=encoder_layers,
        hidden_size=hidden,
        num_heads=reading.size(settings, "num_heads", SIZES),
        head_dim=reading.size(settings, "d_kv", SIZES),
        ffn_size=reading.size(settings, "d_ff", SIZES),
        context=CONTEXT,
        act=reading.choice(settings, "feed_forward_proj", "relu", ACTIVATIONS),
        eps=reading.number(settings, "layer_norm_epsilon", 1e-6),
        family="t5",
        half="bfloat16",  # its residuals exceed 65,504
        biases=(),
        head_scale=hidden**-0.5 if is_scaled else 1.0,
        attention_scale=1.0,
        positions="relative",
        num_buckets=buckets,
        max_distance=distance,
    )


def settings(config: Seq2SeqConfig) -> dict[str, Any]:
    """The other way round."""
    return reading.generated_settings(config) | {
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.num_layers,
        "d_model": config.hidden_size,
        "num_heads": config.num_heads,
        "d_kv": config.head_dim,
        "d_ff": config.ffn_size,
        "feed_forward_proj": reading.named(config.act, ACTIVATIONS),
        "layer_norm_epsilon": config.eps,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "scale_decoder_outputs": config.head_scale != 1,
    }


def table(config: Seq2SeqConfig) -> dict[str, Entry]:
    """A block has its sub-layers in a list; queries, keys and values are tensors of their own."""
    ours, theirs = "decoder.layers.*.cross.", "decoder.block.*.layer.1."
    return {
        **one("token_embedding", SHARED),
        **_stack("encoder", config, ffn=1),
        **_stack("decoder", config, ffn=2),
        **affine(ours + "norm", theirs + "layer_norm"),
        **affine(ours + "q", theirs + "EncDecAttention.q"),
        **affine(ours + "kv", *(f"{theirs}EncDecAttention.{x}" for x in "kv"), how="cat"),
        **affine(ours + "proj", theirs + "EncDecAttention.o"),
        **one("head.weight", HEAD),
    }


def _stack(name: str, config: Seq2SeqConfig, ffn: int) -> dict[str, Entry]:
    h, at, inner = f"{name}.layers.*.", f"{name}.block.*.layer.0.", f"{name}.block.*.layer.{ffn}."
    first = ("wi_0", "wi_1") if config.act in GATED else ("wi",)
    return {
        **one(f"{name}.bias", f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        **affine(h + "norm_1", at + "layer_norm"),
        **affine(h + "qkv", *(f"{at}SelfAttention.{x}" for x in "qkv"), how="cat"),
        **affine(h + "proj", at + "SelfAttention.o"),
        **affine(h + "norm_2", inner + "layer_norm"),
        **affine(h + "fc_1", *(f"{inner}DenseReluDense.{x}" for x in first), how="cat"),
        **affine(h + "fc_2", inner + "DenseReluDense.wo"),
        **affine(f"{name}.norm", f"{name}.final_layer_norm"),
    }
