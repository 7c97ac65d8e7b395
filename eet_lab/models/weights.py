"""Weights in: Hugging Face GPT-2 checkpoints, live models, or random ones of the same shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from eet_lab.errors import ModelError, did_you_mean
from eet_lab.models.checkpoint import read_json, read_tensors
from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder, Layer, mapped
from eet_lab.ops.oom import memory_for
from eet_lab.ops.types import Linear, Norm

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
SUPPORTED = "GPT-2 (model_type 'gpt2': GPT-2, DistilGPT-2, DialoGPT and others of that architecture)"
REMEDY = "Close other models, or use half precision or a smaller model."


def from_folder(folder: Path) -> Decoder:
    """A decoder from a folder with config.json and model.safetensors (or a .bin), on the CPU in its own dtype."""
    settings = read_json(folder / "config.json")
    return _decoder(_config(settings), settings, read_tensors(folder), str(folder))


def from_live(model: Any) -> Decoder:
    """A decoder from a live `GPT2LMHeadModel`, with a copy of its weights: training it on does not change this one."""
    if getattr(getattr(model, "config", None), "model_type", None) is None or not hasattr(model, "state_dict"):
        raise ModelError(
            f"load takes a name, a folder or a transformers model, not {type(model).__name__}. Supported: {SUPPORTED}."
        )
    settings = model.config.to_dict()
    with memory_for("a copy of the model's weights", remedy=REMEDY):
        return _decoder(_config(settings), settings, model.state_dict(), type(model).__name__)


def random_decoder(config: Config, seed: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder with weights drawn from N(0, 0.02), as GPT-2's are before training, made on its device.

    On "meta" it has shapes alone, for rehearsals.
    """
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    C, F = config.hidden_size, config.ffn_size

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(std=0.02, generator=generator)

    def linear(num_outputs: int, num_inputs: int) -> Linear:
        return Linear(normal(num_outputs, num_inputs), normal(num_outputs))

    def norm() -> Norm:
        return Norm(normal(C).add_(1), normal(C), config.eps)

    with _weights(config, dtype):
        layers = tuple(
            Layer(norm(), linear(3 * C, C), linear(C, C), norm(), linear(F, C), linear(C, F))
            for _ in range(config.num_layers)
        )
        words = normal(config.vocab_size, C)
        return Decoder(config, words, normal(config.context, C), layers, norm(), Linear(words, None))


def placed(decoder: Decoder, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The same decoder on a device, in a dtype."""
    with _weights(decoder.config, dtype):
        return mapped(decoder, lambda tensor: tensor.to(device, dtype))


def _weights(config: Config, dtype: torch.dtype) -> AbstractContextManager[None]:
    return memory_for(f"weights of {config.num_params * dtype.itemsize / 2**20:.0f} MiB", remedy=REMEDY)


def _config(settings: Mapping[str, Any]) -> Config:
    kind = settings.get("model_type")
    if kind != "gpt2":
        raise ModelError(f"The architecture {kind!r} is not supported. Supported: {SUPPORTED}.")
    if settings.get("add_cross_attention"):
        raise ModelError("The checkpoint has cross-attention; only decoder-only GPT-2 models are supported.")
    act = settings.get("activation_function", "gelu_new")
    if not isinstance(act, str) or act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(
            f"The activation {act!r} is not supported; supported: {known}.{did_you_mean(str(act), ACTIVATIONS)}"
        )
    hidden, heads, vocab = (_size(settings, name) for name in ("n_embd", "n_head", "vocab_size"))
    if hidden % heads:
        raise ModelError(
            f"n_embd is {hidden}, which n_head = {heads} does not divide; the checkpoint's config is damaged."
        )
    eps, bos = settings.get("layer_norm_epsilon", 1e-5), _token(settings, "bos_token_id")
    if not isinstance(eps, (int, float)) or not 0 < eps < math.inf:
        raise ModelError(f"layer_norm_epsilon is {eps!r}, but it must be a positive number; GPT-2's is 1e-5.")
    if bos is not None and bos >= vocab:
        raise ModelError(
            f"bos_token_id is {bos}, but the vocabulary ends at {vocab - 1}; correct it in the checkpoint's config."
        )
    return Config(
        num_layers=_size(settings, "n_layer"),
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=_size(settings, "n_inner") if settings.get("n_inner") is not None else 4 * hidden,
        vocab_size=vocab,
        context=_size(settings, "n_positions"),
        act=ACTIVATIONS[act],
        eps=float(eps),
        bos_id=bos or 0,
        eos_id=_token(settings, "eos_token_id"),
        tied_head=bool(settings.get("tie_word_embeddings", True)),
    )


def _size(settings: Mapping[str, Any], name: str) -> int:
    value = settings.get(name)
    if not _is_whole(value) or value < 1:
        raise ModelError(
            f"{name} is {value!r} in the checkpoint's config, but it must be a whole number of at least 1; GPT-2 needs "
            "n_layer, n_embd, n_head, vocab_size and n_positions."
        )
    return value


def _token(settings: Mapping[str, Any], name: str) -> int | None:
    """A token id, if the config has one; some checkpoints give a list of them."""
    value = settings.get(name)
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    if value is not None and (not _is_whole(value) or value < 0):
        raise ModelError(f"{name} is {value!r} in the checkpoint's config, but token ids are whole numbers from 0.")
    return value


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _decoder(config: Config, settings: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> Decoder:
    tensors = {name.removeprefix("transformer."): tensor.detach() for name, tensor in state.items()}
    # Buffers of old checkpoints (the causal mask), and a copy of the tied head: no weights of their own.
    for name in [n for n in tensors if n.endswith((".attn.bias", ".attn.masked_bias"))]:
        del tensors[name]
    if config.tied_head:
        tensors.pop("lm_head.weight", None)
    _check(tensors, _shapes(config), source)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ModelError(f"{name} in {source} holds {tensor.dtype}, but weights are floating-point numbers.")

    def own(name: str) -> Tensor:  # a copy: a live model's tensors may change
        return tensors[name].clone(memory_format=torch.contiguous_format)

    def norm(name: str) -> Norm:
        return Norm(own(f"{name}.weight"), own(f"{name}.bias"), config.eps)

    def linear(name: str) -> Linear:  # transformers keeps GPT-2's linears as [in, out]
        weight = tensors[f"{name}.weight"].t().clone(memory_format=torch.contiguous_format)
        return Linear(weight, own(f"{name}.bias"))

    layers = tuple(
        Layer(
            norm(f"h.{i}.ln_1"),
            _scaled_queries(linear(f"h.{i}.attn.c_attn"), _query_scale(config, settings, i)),
            linear(f"h.{i}.attn.c_proj"),
            norm(f"h.{i}.ln_2"),
            linear(f"h.{i}.mlp.c_fc"),
            linear(f"h.{i}.mlp.c_proj"),
        )
        for i in range(config.num_layers)
    )
    words = own("wte.weight")
    head = words if config.tied_head else own("lm_head.weight")
    return Decoder(config, words, own("wpe.weight"), layers, norm("ln_f"), Linear(head, None))


def _query_scale(config: Config, settings: Mapping[str, Any], layer: int) -> float:
    """GPT-2's two rare switches on how scores are scaled, as a factor beside the usual D**-0.5."""
    scale = 1.0 if settings.get("scale_attn_weights", True) else math.sqrt(config.head_dim)
    return scale / (layer + 1) if settings.get("scale_attn_by_inverse_layer_idx") else scale


def _scaled_queries(qkv: Linear, scale: float) -> Linear:
    if scale == 1.0 or qkv.bias is None:
        return qkv
    factor = torch.ones_like(qkv.bias)
    factor[: len(factor) // 3] = scale
    return Linear(qkv.weight * factor[:, None], qkv.bias * factor)


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    C, F = config.hidden_size, config.ffn_size
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocab_size, C),
        "wpe.weight": (config.context, C),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, C)
    for name in ["ln_f"] + [f"h.{i}.{part}" for i in range(config.num_layers) for part in ("ln_1", "ln_2")]:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (C,)
    sizes = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, F), "mlp.c_proj": (F, C)}
    for i in range(config.num_layers):
        for part, shape in sizes.items():
            shapes[f"h.{i}.{part}.weight"], shapes[f"h.{i}.{part}.bias"] = shape, shape[1:]
    return shapes


def _check(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    problems = [f"lacks {len(missing)} tensors ({_some(missing)})"] if missing else []
    problems += [f"has {len(extra)} that a GPT-2 has no place for ({_some(extra)})"] if extra else []
    for name in shapes.keys() & tensors.keys():
        if tuple(tensors[name].shape) != shapes[name]:
            problems.append(
                f"has {name} with shape {list(tensors[name].shape)} where config.json asks for {list(shapes[name])}"
            )
    if problems:
        told = f"{source} does not fit its config: it {'; it '.join(problems[:4])}."
        remedy = "Is it complete, and is the config its own? Download or save the model again."
        if len(problems) == 1 and extra:
            remedy = "Is the config its own? If so it is more than a GPT-2 and cannot run here: choose another model."
        raise ModelError(f"{told} {remedy}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
