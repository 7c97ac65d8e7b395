"""BART and Marian: the first transformer, whose norms follow the residuals. Marian's positions are sinusoids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eet_lab.models.config import CROSS, LINEARS, NORMS, Seq2SeqConfig
from eet_lab.models.families import reading
from eet_lab.models.table import HEAD, SHARED, Entry, affine, one

MODEL_TYPES = {"bart": ("BART", "BartForConditionalGeneration"), "marian": ("Marian", "MarianMTModel")}
PREFIXES = ("model.",)
BUFFERS = ("coder.version",)  # of fairseq
HEADS = (HEAD, "final_logits_bias")
LAYERS = ("encoder_layers", "decoder_layers")
SIZES = (*LAYERS, "d_model", "decoder_attention_heads", "decoder_ffn_dim", "vocab_size", "max_position_embeddings")
ACTIVATIONS = {**reading.ENCODER_ACTIVATIONS, "silu": "silu", "swish": "silu"}
FIRST_POSITION = 2
"""fairseq kept rows of BART's positions for two special tokens, as of OPT's."""


def config(settings: Mapping[str, Any]) -> Seq2SeqConfig:
    """Read a checkpoint's config. Errors: ModelError."""
    hidden, heads = reading.heads(settings, "d_model", "decoder_attention_heads", SIZES)
    is_bart, ffn = settings["model_type"] == "bart", reading.size(settings, "decoder_ffn_dim", SIZES)
    vocab = reading.size(settings, "vocab_size", SIZES)
    beyond = {
        "an encoder with other heads than the decoder": settings.get("encoder_attention_heads", heads) != heads,
        "an encoder with another FFN width than the decoder": settings.get("encoder_ffn_dim", ffn) != ffn,
        "a vocabulary for each of its two languages (share_encoder_decoder_embeddings = false)": not settings.get(
            "share_encoder_decoder_embeddings", True
        )
        or (settings.get("decoder_vocab_size") or vocab) != vocab,
        "norms before the sub-layers (normalize_before)": bool(settings.get("normalize_before")),
        "norms behind the layers (add_final_layer_norm)": bool(settings.get("add_final_layer_norm")),
        "sinusoids for BART (static_position_embeddings)": is_bart and bool(settings.get("static_position_embeddings")),
    }
    reading.refuse(settings, beyond)
    return Seq2SeqConfig(
        **reading.generated(settings),
        num_layers=reading.size(settings, LAYERS[1], SIZES),
        encoder_layers=reading.size(settings, LAYERS[0], SIZES),
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=ffn,
        context=reading.size(settings, "max_position_embeddings", SIZES),
        act=reading.choice(settings, "activation_function", "gelu", ACTIVATIONS),
        tied_head=bool(settings.get("tie_word_embeddings", True)),
        family=settings["model_type"],
        biases=(*NORMS, *LINEARS, *CROSS, "embedding_norm"),
        first_position=FIRST_POSITION if is_bart else 0,
        post_norm=True,
        embedding_norm=is_bart,
        trains_pads=False,
        embedding_scale=hidden**0.5 if settings.get("scale_embedding") else 1.0,
        positions="learned" if is_bart else "sinusoidal",
    )


def settings(config: Seq2SeqConfig) -> dict[str, Any]:
    """The other way round."""
    each = {"attention_heads": config.num_heads, "ffn_dim": config.ffn_size}
    return reading.generated_settings(config) | {
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.num_layers,
        **{f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in each.items()},
        "d_model": config.hidden_size,
        "max_position_embeddings": config.context,
        "activation_function": reading.named(config.act, ACTIVATIONS),
        "scale_embedding": config.embedding_scale != 1,
    }


def table(config: Seq2SeqConfig) -> dict[str, Entry]:
    """Queries, keys and values are tensors of their own. What is added to logits is a matrix of one row."""
    ours, theirs = "decoder.layers.*.cross.", "decoder.layers.*.encoder_attn"
    return {
        **one("token_embedding", SHARED),
        **_stack("encoder"),
        **_stack("decoder"),
        **affine(ours + "norm", theirs + "_layer_norm"),
        **affine(ours + "q", theirs + ".q_proj"),
        **affine(ours + "kv", *(f"{theirs}.{x}_proj" for x in "kv"), how="cat"),
        **affine(ours + "proj", theirs + ".out_proj"),
        **one("head.weight", HEAD),
        **one("head.bias", "final_logits_bias", how="row"),
    }


def _stack(name: str) -> dict[str, Entry]:
    h = f"{name}.layers.*."
    return {
        **one(f"{name}.position_embedding", f"{name}.embed_positions.weight"),
        **affine(f"{name}.embedding_norm", f"{name}.layernorm_embedding"),
        **affine(h + "qkv", *(f"{h}self_attn.{x}_proj" for x in "qkv"), how="cat"),
        **affine(h + "proj", h + "self_attn.out_proj"),
        **affine(h + "norm_1", h + "self_attn_layer_norm"),
        **affine(h + "fc_1", h + "fc1"),
        **affine(h + "fc_2", h + "fc2"),
        **affine(h + "norm_2", h + "final_layer_norm"),
    }
