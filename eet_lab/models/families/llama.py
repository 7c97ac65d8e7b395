"""Llama, Mistral (window), Qwen2 (biases of queries, keys and values) and Qwen3 (their norms): rotary positions, RMS
norms, a gated activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eet_lab.errors import ModelError
from eet_lab.models.config import Config
from eet_lab.models.families import reading
from eet_lab.models.rope import read_rope, rope_settings
from eet_lab.models.table import Entry, affine, one

MODEL_TYPES = {name.lower(): (name, f"{name}ForCausalLM") for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
PREFIXES = ("model.",)
BUFFERS = (".rotary_emb.inv_freq",)
LAYERS = "num_hidden_layers"
SIZES = (LAYERS, "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings")
ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
WINDOW, FULL_LAYERS = 4096, 28
"""Mistral's and Qwen's window, and how many first layers of Qwen have none, where a config does not tell."""


def config(settings: Mapping[str, Any]) -> Config:
    """Read a checkpoint's config. Errors: ModelError."""
    family, head_dim = settings["model_type"], settings.get("head_dim")
    hidden, heads = (reading.size(settings, name, SIZES) for name in ("hidden_size", "num_attention_heads"))
    if head_dim is None:
        reading.heads(settings, "hidden_size", "num_attention_heads", SIZES)
    kv_heads = reading.size(settings, "num_key_value_heads", SIZES, default=heads)
    head_dim = reading.size(settings, "head_dim", SIZES, default=hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"There are {heads} heads of {head_dim} and {kv_heads} KV heads, but the heads must be a multiple of the "
            "KV heads, and a head an even number; the checkpoint's config is damaged."
        )
    vocab, rope = reading.size(settings, "vocab_size", SIZES), read_rope(settings)
    return Config(
        num_layers=reading.size(settings, LAYERS, SIZES),
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=reading.size(settings, "intermediate_size", SIZES),
        vocab_size=vocab,
        context=rope.context(reading.size(settings, "max_position_embeddings", SIZES)),
        act=reading.choice(settings, "hidden_act", "silu", ACTIVATIONS),
        eps=reading.number(settings, "rms_norm_eps", 1e-6),
        **reading.bos(settings, vocab),
        eos_id=reading.token_id(settings, "eos_token_id"),
        tied_head=bool(settings.get("tie_word_embeddings", False)),
        family=family,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        biases=_biases(settings),
        qk_norm=family == "qwen3",
        window=_window(settings),
        rope=rope,
    )


def _biases(settings: Mapping[str, Any]) -> tuple[str, ...]:
    attention = ("qkv", "proj") if settings.get("attention_bias") else ()
    inner = ("fc_1", "fc_2") if settings.get("mlp_bias") else ()
    return ("qkv",) if settings["model_type"] == "qwen2" else attention + inner


def _window(settings: Mapping[str, Any]) -> int | None:
    """The window of all layers, or None; ModelError where layers differ.

    As in transformers it is read by model_type: Llama has none, whatever its config says, and Qwen's is off by default.
    """
    family, window = settings["model_type"], settings.get("sliding_window", WINDOW)
    is_used = family == "mistral" or ("qwen" in family and settings.get("use_sliding_window", False))
    if window is None or not is_used:
        return None
    num_layers, kinds = reading.size(settings, LAYERS, SIZES), settings.get("layer_types")
    before = 0 if family == "mistral" else settings.get("max_window_layers", FULL_LAYERS)
    before = min(before, num_layers) if isinstance(before, int) else 0
    num_sliding = kinds.count("sliding_attention") if isinstance(kinds, list) else num_layers - before
    if num_sliding not in (0, num_layers):
        raise ModelError(
            f"{num_sliding} of {num_layers:,} layers have a window, but only windows of all are supported. Choose "
            "another model, or set use_sliding_window to false in its config for texts no longer than the window."
        )
    return reading.size(settings, "sliding_window", SIZES, default=WINDOW) if num_sliding else None


def settings(config: Config) -> dict[str, Any]:
    """The other way round."""
    has_window = config.window is not None
    told = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.rope.max_position_embeddings(config.context)
        if config.rope
        else config.context,
        "hidden_act": reading.named(config.act, ACTIVATIONS),
        "rms_norm_eps": config.eps,
        "sliding_window": config.window,
        "attention_bias": "proj" in config.biases,
        "mlp_bias": "fc_1" in config.biases,
        **(rope_settings(config.rope) if config.rope else {}),
    }
    return told | ({"use_sliding_window": has_window, "max_window_layers": 0} if "qwen" in config.family else {})


def table(config: Config) -> dict[str, Entry]:
    """Queries, keys and values are tensors of their own, and so are the gate and what it lets through."""
    h, at, spec = "layers.*.", "layers.*.self_attn.", config.spec
    qkv = tuple(spec.head_dim * count for count in (spec.heads, spec.kv_heads, spec.kv_heads))
    return {
        **one("token_embedding", "embed_tokens.weight"),
        **affine("layers.*.norm_1", h + "input_layernorm"),
        **affine("layers.*.qkv", *(f"{at}{x}_proj" for x in "qkv"), how="cat", sizes=qkv),
        **affine("layers.*.q_norm", at + "q_norm"),
        **affine("layers.*.k_norm", at + "k_norm"),
        **affine("layers.*.proj", at + "o_proj"),
        **affine("layers.*.norm_2", h + "post_attention_layernorm"),
        **affine("layers.*.fc_1", h + "mlp.gate_proj", h + "mlp.up_proj", how="cat", sizes=(config.ffn_size,) * 2),
        **affine("layers.*.fc_2", h + "mlp.down_proj"),
        **affine("norm", "norm"),
        **one("head.weight", "lm_head.weight"),
    }
