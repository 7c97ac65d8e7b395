"""Tiny encoder-decoders of every family, made by transformers, with random weights that let tokens vary."""

from __future__ import annotations

import random
from functools import cache

import torch
import transformers

from eet_lab.models import load

V, CONTEXT, NEW = 97, 64, 10
SOURCES = (3, 11, 1, 7, 14, 7, 5)
TARGETS = (4, 1, 9, 6, 2, 9, 12)
T5 = {"vocab_size": V, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 9, "decoder_start_token_id": 0}
WIDTHS = {"attention_heads": 4, "ffn_dim": 48}
BART = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in WIDTHS.items()}
BART |= {"vocab_size": V, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": CONTEXT}
MARIAN = BART | {"pad_token_id": V - 1, "decoder_start_token_id": V - 1, "scale_embedding": True, "eos_token_id": 0}
MARIAN |= {"activation_function": "swish", "forced_eos_token_id": None, "encoder_layers": 3}
GENERATION = {"bart": {"forced_bos_token_id": 5}, "marian-odd": {"bad_words_ids": [[V - 1], [3], [51], [58]]}}
CONFIGS = {
    "t5": ("t5", T5),
    "t5-gated": ("t5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("bart", BART),
    "bart-head": ("bart", BART | {"scale_embedding": True, "forced_eos_token_id": None}),
    "marian": ("marian", MARIAN | {"forced_eos_token_id": 0}),
    "marian-odd": ("marian", MARIAN | {"d_model": 36, "decoder_layers": 1}),
}


@cache
def theirs(name: str):
    """A model with random numbers for what transformers begins with 0 or 1: no mistake is hidden."""
    kind, sizes = CONFIGS[name]
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    if name in ("t5-gated", "bart-head"):  # as T5 1.1 has it, which transformers sees when it reads a checkpoint
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        model.all_tied_weights_keys.pop("lm_head.weight")
    std = 0.2 if name == "t5-gated" else 0.3  # with larger ones fp32 itself is 3e-4 off in gradients
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and path.endswith("weight")
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * (std if parameter.ndim > 1 else 0.1) + is_norm)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.3)
    for key, value in GENERATION.get(name, {}).items():
        setattr(model.generation_config, key, value)
    return model


@cache
def ours(name: str):
    return load(theirs(name), device="cpu")


def rows(lengths=SOURCES, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(6, V - 1) for _ in range(length)] for length in lengths]


@cache
def expected(name: str) -> list[tuple[int, ...]]:
    """What transformers answers, sources padded on the right: greedy, and never at an end before the last token."""
    sources, longest = rows(), max(SOURCES)
    ids = torch.tensor([row + [1] * (longest - len(row)) for row in sources])
    real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in sources])
    how = {"do_sample": False, "num_beams": 1, "eos_token_id": None}
    told = theirs(name).generate(ids, attention_mask=real, max_new_tokens=NEW, **how)
    return [tuple(row) for row in told[:, 1:].tolist()]
