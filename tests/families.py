"""Tiny models of every family, made by transformers, with random weights that let tokens vary."""

from __future__ import annotations

import random
from functools import cache

import torch
import transformers

from eet_lab.models import load

V, CONTEXT, NEW = 97, 64, 12
WINDOW = 6
LENGTHS = (3, 11, 1, 7, 14, 5)
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    **IDS,
}
SCALINGS = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}
OPT = {"vocab_size": V, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 3}
OPT |= {"num_attention_heads": 4, "max_position_embeddings": CONTEXT, **IDS}
GPT2 = {"vocab_size": V, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, **IDS}
LLAMA = {"tie_word_embeddings": False}
CONFIGS = {
    "gpt2": ("gpt2", GPT2),
    "opt": ("opt", OPT),
    "opt-bare": ("opt", OPT | {"enable_bias": False, "tie_word_embeddings": False}),
    "llama": ("llama", SIZES | LLAMA),
    "llama-tied": ("llama", SIZES | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    **{
        f"llama-{kind}": ("llama", SIZES | {"rope_theta": 100.0, "rope_scaling": {"rope_type": kind, **numbers}})
        for kind, numbers in SCALINGS.items()
    },
    "mistral": ("mistral", SIZES | {"sliding_window": WINDOW, "head_dim": 8}),
    "qwen2": ("qwen2", SIZES),
    "qwen2-window": ("qwen2", SIZES | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}),
    "qwen3": ("qwen3", SIZES | {"head_dim": 12, "hidden_act": "gelu_pytorch_tanh"}),
}
KINDS = ("gpt2", "opt", "llama", "llama-dynamic", "mistral", "qwen2-window", "qwen3")
"""One of each computation; the others have other numbers in it."""


@cache
def theirs(name: str):
    """A model with random numbers for what transformers begins with 0 or 1, and larger ones: no mistake is hidden."""
    kind, sizes = CONFIGS[name]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes)).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and path.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.3 + is_norm)
    return model


@cache
def ours(name: str):
    return load(theirs(name), device="cpu")


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(1, V) for _ in range(length)] for length in LENGTHS]


@cache
def expected(name: str) -> list[tuple[int, ...]]:
    """What transformers goes on with, padded on the left."""
    rows, longest = prompts(), max(LENGTHS)
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    attended = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    told = theirs(name).generate(ids, attention_mask=attended, max_new_tokens=NEW, **how)
    return [tuple(row) for row in told[:, longest:].tolist()]
