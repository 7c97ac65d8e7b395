"""GPT-2 and DistilGPT-2: learned positions, layer norms, GELU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder
from eet_lab.models.families import reading
from eet_lab.models.table import Entry, affine, one
from eet_lab.ops.types import Linear

MODEL_TYPES = {"gpt2": ("GPT-2", "GPT2LMHeadModel")}
PREFIXES = ("transformer.",)
BUFFERS = (".attn.bias", ".attn.masked_bias")  # old checkpoints have the causal mask
LAYERS = "n_layer"
SIZES = (LAYERS, "n_embd", "n_head", "vocab_size", "n_positions")
ACTIVATIONS = {**reading.ENCODER_ACTIVATIONS, "gelu_fast": "gelu_tanh"}


def config(settings: Mapping[str, Any]) -> Config:
    """Read a checkpoint's config. Errors: ModelError."""
    reading.refuse(settings, {"cross-attention": bool(settings.get("add_cross_attention"))})
    act = reading.choice(settings, "activation_function", "gelu_new", ACTIVATIONS)
    hidden, heads = reading.heads(settings, "n_embd", "n_head", SIZES)
    vocab = reading.size(settings, "vocab_size", SIZES)
    return Config(
        num_layers=reading.size(settings, LAYERS, SIZES),
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=reading.size(settings, "n_inner", SIZES, default=4 * hidden),
        vocab_size=vocab,
        context=reading.size(settings, "n_positions", SIZES),
        act=act,
        eps=reading.number(settings, "layer_norm_epsilon", 1e-5),
        **reading.bos(settings, vocab),
        eos_id=reading.token_id(settings, "eos_token_id"),
        tied_head=bool(settings.get("tie_word_embeddings", True)),
    )


def settings(config: Config) -> dict[str, Any]:
    """The other way round."""
    return {
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_heads,
        "n_inner": config.ffn_size,
        "n_positions": config.context,
        "activation_function": reading.named(config.act, ACTIVATIONS),
        "layer_norm_epsilon": config.eps,
    }


def table(config: Config) -> dict[str, Entry]:
    """Linears are kept as [in,out]."""
    h = "h.*."
    return {
        **one("token_embedding", "wte.weight"),
        **one("position_embedding", "wpe.weight"),
        **affine("layers.*.norm_1", h + "ln_1"),
        **affine("layers.*.qkv", h + "attn.c_attn", how="t"),
        **affine("layers.*.proj", h + "attn.c_proj", how="t"),
        **affine("layers.*.norm_2", h + "ln_2"),
        **affine("layers.*.fc_1", h + "mlp.c_fc", how="t"),
        **affine("layers.*.fc_2", h + "mlp.c_proj", how="t"),
        **affine("norm", "ln_f"),
        **one("head.weight", "lm_head.weight"),
    }


def finished(decoder: Decoder, settings: Mapping[str, Any]) -> tuple[Decoder, dict[str, Any]]:
    """GPT-2's two rare switches on how scores are scaled, moved into the weights of the queries.

    They are factors beside the usual D**-0.5; kernels know that one alone.
    """
    by_layer = bool(settings.get("scale_attn_by_inverse_layer_idx"))
    scale = 1.0 if settings.get("scale_attn_weights", True) else math.sqrt(decoder.config.head_dim)
    if not by_layer and scale == 1.0:
        return decoder, dict(settings)
    layers = tuple(
        w._replace(qkv=_scaled(w.qkv, scale / (i + 1 if by_layer else 1))) for i, w in enumerate(decoder.layers)
    )
    usual = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    return decoder._replace(layers=layers), {**settings, **usual}


def _scaled(qkv: Linear, scale: float) -> Linear:
    factor = torch.ones(len(qkv.weight), dtype=qkv.weight.dtype)
    factor[: len(factor) // 3] = scale
    return Linear(qkv.weight * factor[:, None], None if qkv.bias is None else qkv.bias * factor)
