"""load: a name, a folder or a live model in; a `Model` out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from eet_lab.errors import ModelError, PromptError, did_you_mean
from eet_lab.models import checkpoint, weights
from eet_lab.models.config import PRESETS, Config
from eet_lab.models.decoder import Decoder
from eet_lab.models.tokenizer import Tokenizer

DEMO = Path(__file__).parent / "demo"
DEMO_LABEL = "bundled demo model"
RANDOM_LABEL = "shape, random weights: for timing only"
"""After the shape's name."""
Kind = Literal["demo", "random", "folder", "hub", "live"]
NAMES = ("demo", *PRESETS)
SOME_MODEL = f"one of {', '.join(NAMES)}, a folder with config.json, or a hub name such as openai-community/gpt2"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Model:
    """A decoder with its tokenizer.

    `label` says what it is, and that its weights are random where they are; `kind` is where they came from.
    """

    name: str
    label: str
    decoder: Decoder = field(repr=False)
    tokenizer: Tokenizer | None = field(repr=False)
    kind: Kind

    @property
    def config(self) -> Config:
        return self.decoder.config

    @property
    def device(self) -> str:
        """ "cpu" or "cuda", or "meta" for shapes without data."""
        return self.decoder.device.type

    @property
    def dtype(self) -> str:
        return str(self.decoder.dtype).removeprefix("torch.")

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a text; a list of ids is returned as it is. Errors: PromptError, ModelError (no tokenizer)."""
        if not isinstance(prompt, Iterable):
            raise PromptError(f"A prompt is {prompt!r}, but it must be a text or a list of token ids.")
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ModelError(
                f"{self.name} came without a tokenizer; give prompts as lists of token ids, or load one with it."
            )
        return self.tokenizer.encode(prompt)

    def decode(self, ids: Any) -> str:
        """The text of token ids."""
        return " ".join(map(str, ids)) if self.tokenizer is None else self.tokenizer.decode(list(ids))


def load(
    model: Any = "demo",
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: Any = None,
    seed: int = 0,
) -> Model:
    """Load a GPT-2-family model.

    `model` is "demo" (bundled, trained), a preset of `PRESETS` (true size, random weights drawn from `seed`), a
    folder in Hugging Face format, a hub name with a slash (where the hub is reachable), or a live `GPT2LMHeadModel`.
    Safetensors are preferred and code from a checkpoint is never run. `device` is "cuda" or "cpu" (default: the GPU
    where there is one), or "meta": shapes without data, whose needs can be told (`Engine.lifetimes`,
    `Engine.forecast`) and which cannot run. `dtype` is "float16", "bfloat16" or "float32" (default: float32 on the
    CPU, else float16). Errors: ModelError, which names what is wrong and what would do; OutOfMemory.
    """
    device = device if device == "meta" else checked_device(device)
    kind = checked_dtype(dtype, device)
    if not isinstance(model, (str, os.PathLike)):
        loaded = Model(type(model).__name__, "live model", weights.from_live(model), None, "live")
    elif not str(model).strip():
        raise ModelError(f"The model's name is empty. Give {SOME_MODEL}.")
    elif str(model) == "demo":
        loaded = _from_folder(DEMO, "demo", DEMO_LABEL, "demo")
    elif str(model) in PRESETS:
        decoder = weights.random_decoder(PRESETS[str(model)], seed, torch.device(device), kind)
        label = f"{model} {RANDOM_LABEL}"
        loaded = Model(str(model), label, decoder, demo_tokenizer(), "random")
    elif Path(model).is_dir():
        loaded = _from_folder(Path(model), Path(model).resolve().name, str(model), "folder")
    elif "/" in str(model) and not Path(model).exists() and str(model).count("/") == 1 and str(model)[0] not in "./~":
        loaded = _from_folder(
            checkpoint.downloaded(str(model)), str(model), f"{model} from the Hugging Face hub", "hub"
        )
    else:
        raise ModelError(f"There is no model {str(model)!r}.{did_you_mean(str(model), NAMES)} Give {SOME_MODEL}.")
    if tokenizer is not None:
        loaded = replace(loaded, tokenizer=Tokenizer.of(tokenizer))
    return replace(loaded, decoder=weights.placed(loaded.decoder, torch.device(device), kind))


def default_device() -> str:
    """ "cuda" where torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def checked_device(device: str | None) -> str:
    """The device's kind; ModelError where it is not there."""
    device = device or default_device()
    if device not in ("cpu", "cuda"):
        raise ModelError(f"device is {device!r}, but it must be 'cuda' or 'cpu'.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "device is 'cuda', but torch sees no NVIDIA GPU here; use device='cpu', and see `eet-lab doctor`."
        )
    return device


def checked_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype:
    """The dtype; float32 on the CPU and else float16 unless said."""
    if dtype is None:
        return torch.float32 if device == "cpu" else torch.float16
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}, but it must be one of {', '.join(DTYPES)}.{did_you_mean(name, DTYPES)}")
    return DTYPES[name]


def demo_tokenizer() -> Tokenizer | None:
    """The demo model's tokenizer, which the random presets borrow."""
    return Tokenizer.from_folder(DEMO)


def _from_folder(folder: Path, name: str, label: str, kind: Kind) -> Model:
    return Model(name, label, weights.from_folder(folder), Tokenizer.from_folder(folder), kind)
