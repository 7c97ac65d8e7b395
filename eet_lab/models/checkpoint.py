"""Checkpoints as they lie on disk or on the hub: config.json, and tensors by name. Nothing in them is ever run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eet_lab.errors import ModelError, first_line

HUB_FILES = [
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
]
PICKLED = "pytorch_model*.bin"
"""Weights of older checkpoints, read only where there are no safetensors, and as tensors only."""


def downloaded(name: str) -> Path:
    """The local folder of a hub model, downloaded if need be."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*HUB_FILES, PICKLED]))
        return folder
    except Exception as error:  # the hub's client raises many kinds; all mean that it is not to be had
        raise ModelError(
            f"{name} could not be fetched from the Hugging Face hub ({type(error).__name__}: {first_line(error)}). "
            "Check the name and the network, or give the path of a local folder; 'demo' needs no network."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}; a model folder holds config.json and model.safetensors."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Download or save the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds {str(content)[:40]!r}, not an object; download or save the model again.")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors, of its shards, or of pytorch_model.bin, on the CPU."""
    index = folder / "model.safetensors.index.json"
    files = _shards(index) if index.exists() else sorted(folder.glob("*.safetensors")) or sorted(folder.glob(PICKLED))
    if not files:
        raise ModelError(
            f"{folder} has neither model.safetensors nor pytorch_model.bin; save the model with save_pretrained."
        )
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= _read_file(path)
    return tensors


def _shards(index: Path) -> list[Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{index} has no weight_map from tensors to files; download or save the model again.")
    return sorted({index.parent / name for name in names.values()})


def _read_file(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    except Exception as error:  # both readers raise many kinds, and every one means a damaged file
        raise ModelError(f"{path} is damaged or incomplete ({error}); download or save it again.") from error
