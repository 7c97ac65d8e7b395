"""Weights in: Hugging Face GPT-2 checkpoints, live models, or random ones of the same shape."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eet_lab.errors import ModelError, did_you_mean
from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder, Layer, mapped
from eet_lab.ops.types import Linear, Norm

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
SUPPORTED = "GPT-2 (model_type 'gpt2': GPT-2, DistilGPT-2, DialoGPT and others of that architecture)"
HUB_FILES = [
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
]


def from_folder(folder: Path) -> Decoder:
    """A decoder from a folder with config.json and model.safetensors (or a .bin), on the CPU in its own dtype."""
    settings = _read_json(folder / "config.json")
    config = _config(settings)
    return _decoder(config, settings, _read_tensors(folder), str(folder))


def from_live(model: Any) -> Decoder:
    """A decoder from a live `GPT2LMHeadModel`."""
    if getattr(getattr(model, "config", None), "model_type", None) is None or not hasattr(model, "state_dict"):
        raise ModelError(
            f"load takes a name, a folder or a transformers model, not {type(model).__name__}. Supported: {SUPPORTED}."
        )
    settings = model.config.to_dict()
    return _decoder(_config(settings), settings, model.state_dict(), type(model).__name__)


def random_decoder(config: Config, seed: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder with weights drawn from N(0, 0.02), as GPT-2's are before training, made on its device."""
    generator = torch.Generator(device).manual_seed(seed)
    C, F = config.hidden_size, config.ffn_size

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(std=0.02, generator=generator)

    def linear(num_outputs: int, num_inputs: int) -> Linear:
        return Linear(normal(num_outputs, num_inputs), normal(num_outputs))

    def norm() -> Norm:
        return Norm(normal(C).add_(1), normal(C), config.eps)

    layers = tuple(
        Layer(norm(), linear(3 * C, C), linear(C, C), norm(), linear(F, C), linear(C, F))
        for _ in range(config.num_layers)
    )
    words = normal(config.vocab_size, C)
    return Decoder(config, words, normal(config.context, C), layers, norm(), Linear(words, None))


def placed(decoder: Decoder, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The same decoder on a device, in a dtype."""
    try:
        return mapped(decoder, lambda tensor: tensor.to(device, dtype))
    except torch.OutOfMemoryError as error:
        need = decoder.config.num_params * dtype.itemsize
        raise ModelError(
            f"The weights need {need / 2**20:.0f} MiB and do not fit into the GPU's memory; close other models, or use "
            "half precision or a smaller model."
        ) from error


def downloaded(name: str) -> Path:
    """The local folder of a hub model, downloaded if need be."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's client raises many kinds; all mean that it is not to be had
        raise ModelError(
            f"{name} could not be fetched from the Hugging Face hub ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}). Check the name and the network, or give the path of a local "
            "folder; 'demo' needs no network."
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}; a model folder holds config.json and model.safetensors."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / name for name in _read_json(index)["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelError(
            f"{folder} has neither model.safetensors nor pytorch_model.bin; save the model with save_pretrained."
        )
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= _read_file(path)
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # both readers raise many kinds, and every one means a damaged file
        raise ModelError(f"{path} is damaged or incomplete ({error}); download or save it again.") from error


def _config(settings: Mapping[str, Any]) -> Config:
    kind = settings.get("model_type")
    if kind != "gpt2":
        raise ModelError(f"The architecture {kind!r} is not supported. Supported: {SUPPORTED}.")
    if settings.get("add_cross_attention"):
        raise ModelError("The checkpoint has cross-attention; only decoder-only GPT-2 models are supported.")
    act = settings.get("activation_function", "gelu_new")
    if act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(
            f"The activation {act!r} is not supported; supported: {known}.{did_you_mean(act, ACTIVATIONS)}"
        )
    try:
        hidden, heads = int(settings["n_embd"]), int(settings["n_head"])
        config = Config(
            num_layers=int(settings["n_layer"]),
            hidden_size=hidden,
            num_heads=heads,
            ffn_size=int(settings.get("n_inner") or 4 * hidden),
            vocab_size=int(settings["vocab_size"]),
            context=int(settings["n_positions"]),
            act=ACTIVATIONS[act],
            eps=float(settings.get("layer_norm_epsilon", 1e-5)),
            bos_id=_first(settings.get("bos_token_id"), 0),
            eos_id=_first(settings.get("eos_token_id"), None),
            tied_head=bool(settings.get("tie_word_embeddings", True)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"config.json lacks or garbles {error}; GPT-2 needs n_layer, n_embd, n_head, vocab_size, n_positions."
        ) from None
    if hidden % heads:
        raise ModelError(
            f"n_embd is {hidden}, which n_head = {heads} does not divide; the checkpoint's config is damaged."
        )
    return config


def _first(value: Any, default: Any) -> Any:
    """A token id; some checkpoints give a list of them."""
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return default if value is None else int(value)


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

    def norm(name: str) -> Norm:
        return Norm(tensors[f"{name}.weight"], tensors[f"{name}.bias"], config.eps)

    def linear(name: str) -> Linear:  # transformers keeps GPT-2's linears as [in, out]
        return Linear(tensors[f"{name}.weight"].t().contiguous(), tensors[f"{name}.bias"])

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
    words = tensors["wte.weight"]
    head = words if config.tied_head else tensors["lm_head.weight"]
    return Decoder(config, words, tensors["wpe.weight"], layers, norm("ln_f"), Linear(head, None))


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
        raise ModelError(
            f"{source} does not fit its config: it {'; it '.join(problems[:4])}. "
            "Is it complete, and is the config its own?"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
