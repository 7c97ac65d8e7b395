"""load: a name, a folder or a live model in; a `Model` out."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from eet_lab.devices import checked_device
from eet_lab.errors import ModelError, did_you_mean
from eet_lab.files import folder_path
from eet_lab.models import checkpoint, values, weights
from eet_lab.models.config import ENCODER_PRESETS, PRESETS, SEQ2SEQ_PRESETS, Config
from eet_lab.models.decoder import Decoder
from eet_lab.models.families import settings_of
from eet_lab.models.seq2seq import Seq2Seq
from eet_lab.models.tokenizer import Tokenizer, decoded, encoded
from eet_lab.models.vision import AnyEncoder, VisionEncoder
from eet_lab.scheduling.whole import MOST_SEED, check_whole
from eet_lab.words import visible

DEMO = Path(__file__).parent / "demo"
DEMO_LABEL = "bundled demo model"
RANDOM_LABEL = "shape, random weights: for timing only"
"""The label's words after the shape's name."""
TRAINING_TIMED = "`eet-lab bench train:MODEL/b8` times its training"
SHAPES = (PRESETS, ENCODER_PRESETS, SEQ2SEQ_PRESETS)
Kind = Literal["demo", "random", "folder", "hub", "live"]
NAMES = ("demo", *(name for each in SHAPES for name in each))
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class UnknownModel(ModelError):
    """No model has this name; `names` are those that are offered in its place."""

    def __init__(self, name: str, names: Sequence[str] = NAMES) -> None:
        self.name = name
        why = "The model's name is empty."
        if name.startswith(("./", "../", "/", "~")):
            why = f"There is no folder {name!r}."
        elif name.strip():
            why = f"There is no model {name!r}.{did_you_mean(name, names)}"
        where = "a folder with config.json, or a hub name such as openai-community/gpt2"
        super().__init__(f"{why} Give one of {', '.join(names)}, {where}.")


@dataclass(frozen=True)
class Model:
    """A decoder, an encoder, or both, with its tokenizer.

    `label` says what it is, and that its weights are random where they are; `kind` is where they came from.
    """

    name: str
    label: str
    network: Decoder | AnyEncoder | Seq2Seq = field(repr=False)
    tokenizer: Tokenizer | None = field(repr=False)
    kind: Kind
    settings: Mapping[str, Any] | None = field(default=None, repr=False)
    """What its config.json says; None for random weights, whose config tells it."""
    folder: Path | None = field(default=None, repr=False)
    """Where it was read."""
    is_tokenizer_given: bool = field(default=False, repr=False)
    """Whether the tokenizer stands in for the checkpoint's own."""

    @property
    def generator(self) -> Decoder | Seq2Seq:
        """The weights of a model that generates; ModelError for an encoder."""
        if isinstance(self.network, VisionEncoder):
            raise ModelError(
                f"{self.name} is an encoder of images ({self.config.family}): it generates no text. Use eet_lab.encode "
                f"or classify; {TRAINING_TIMED}; or load a decoder such as 'demo' or 'gpt2'."
            )
        if isinstance(self.network, AnyEncoder):
            name = self.label if self.kind == "folder" else self.name
            raise ModelError(
                f"{self.name} is an encoder ({self.config.family}): it reads whole texts, and generates none. Use "
                "eet_lab.encode, classify, classify_tokens or fill_mask; to time it, eet_lab.compare in Python or "
                f"`eet-lab bench encode:{visible(name)}/t64/p5-500`; or load a decoder such as 'demo' or 'gpt2'."
            )
        return self.network

    @property
    def decoder(self) -> Decoder:
        """The weights of a model that goes on with texts; ModelError for an encoder and for an encoder-decoder."""
        if isinstance(network := self.generator, Seq2Seq):
            raise ModelError(
                f"{self.name} is an encoder-decoder ({self.config.family}), which this does not run: it answers a text "
                f"and does not go on with it. Use eet_lab.generate, Seq2SeqEngine or Trainer; {TRAINING_TIMED}; or "
                "load a decoder such as 'demo' or 'gpt2'."
            )
        return network

    @property
    def encoder(self) -> Any:
        """The weights of a model that reads whole texts, or images; ModelError for one that generates."""
        if isinstance(self.network, AnyEncoder):
            return self.network
        kind = "a decoder" if isinstance(self.network, Decoder) else "an encoder-decoder"
        raise ModelError(
            f"{self.name} is {kind} ({self.config.family}): it generates text. Use eet_lab.generate, or load an "
            "encoder such as 'bert-base'."
        )

    @property
    def config(self) -> Config:
        return self.network.config

    @property
    def device(self) -> str:
        """ "cpu" or "cuda", or "meta" for shapes without data."""
        return self.network.device.type

    @property
    def dtype(self) -> str:
        return str(self.network.dtype).removeprefix("torch.")

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a text; a list of ids is returned as it is. Errors: PromptError, ModelError (no tokenizer)."""
        return encoded(self.tokenizer, prompt, self.name)

    def decode(self, ids: Any, special: bool = True) -> str:
        """The text of token ids, with special tokens or without."""
        return decoded(self.tokenizer, ids, special)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of UTF-8 for which a token stands, which may be half a character."""
        return str(token).encode() if self.tokenizer is None else self.tokenizer.bytes_of(token)

    def save(self, folder: str | os.PathLike) -> None:
        """Write it as a Hugging Face checkpoint, in its present dtype: config.json, model.safetensors, and what its own
        checkpoint had of a tokenizer, or tokenizer.json; a tokenizer of transformers has a `save_pretrained` of its
        own. Errors: ModelError.

        Each weight is as it was, to the bit, where the checkpoint's dtype is the one loaded: on a CPU that is float32
        unless `dtype` says another, and a model has one dtype. Of a GPT-2 whose config scales scores in another way
        (`scale_attn_weights`, `scale_attn_by_inverse_layer_idx`) the scale is written into the queries' weights.
        """
        settings = settings_of(self.config) if self.settings is None else self.settings
        path = folder_path(folder, ModelError)
        weights.saved(self.network, settings, path)
        is_copied = self.folder is not None and not self.is_tokenizer_given
        if self.folder is None:
            weights.save_ends(self.config, settings, path)
        else:
            checkpoint.copy_others(self.folder, path, has_tokenizer=is_copied)
        if not is_copied and self.tokenizer is not None and (written := self.tokenizer.written()):
            checkpoint.write_tokenizer(written.json, self.config.family, path)


def load(
    model: Any = "demo",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: Any = None,
    seed: int = 0,
) -> Model:
    """Load a causal language model (GPT-2, OPT, Llama, Mistral, Qwen2, Qwen3), an encoder of texts (BERT, RoBERTa,
    DistilBERT) or of images (ViT), or an encoder-decoder (T5, BART, Marian).

    `model` is "demo" (bundled, trained), a preset of `PRESETS`, `ENCODER_PRESETS` or `SEQ2SEQ_PRESETS` (true size,
    random weights drawn from `seed`), a folder in Hugging Face format, a hub name with a slash (where the hub is
    reachable), or a live transformers model. Safetensors are preferred and code from a checkpoint is never run.
    `device` is "cuda", "cuda:1" or "cpu", also as a `torch.device` (default: the GPU where there is one), or "meta":
    shapes without data, whose needs can be told (`Engine.lifetimes`, `Engine.forecast`) and which cannot run. `dtype`
    is "float16", "bfloat16" or "float32" (default: float32 on the CPU, else float16, and bfloat16 for T5, whose states
    float16 does not hold). `tokenizer` is one of `tokenizers` or of transformers, used instead of the checkpoint's.
    Errors: ModelError, which names what is wrong and what would do; OutOfMemory.
    """
    device = "meta" if str(device) == "meta" else checked_device(device)
    kind = checked_dtype(dtype, device)
    check_whole(ModelError, "seed", seed, 0, MOST_SEED)
    if not isinstance(model, (str, os.PathLike)):
        model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        live = weights.from_live(model)
        loaded = Model(type(model).__name__, "live model", live.network, None, "live", live.settings)
    elif not str(model).strip():
        raise UnknownModel(str(model))
    elif str(model) == "demo":
        loaded = _from_folder(DEMO, "demo", DEMO_LABEL, "demo")
    elif isinstance(model, str) and (config := next((each[model] for each in SHAPES if model in each), None)):
        _check_no_folder(model)
        network = weights.random_decoder(config, seed, torch.device(device), kind)
        label = f"{model} {RANDOM_LABEL}"
        loaded = Model(model, label, network, demo_tokenizer(config.vocab_size), "random")
    elif (folder := Path(os.path.expanduser(model))).is_dir():
        loaded = _from_folder(folder, folder.resolve().name, str(folder), "folder")
    elif folder.is_file():
        named = f"the folder: {visible(str(Path(model).parent))!r}"
        remedy = named if (folder.parent / "config.json").is_file() else "one, or the name of a model: 'demo'"
        raise ModelError(
            f"{visible(str(model))} is a file, but a model is loaded from its whole folder, which has config.json and "
            f"the weights. Give {remedy}."
        )
    elif "/" in str(model) and not Path(model).exists() and str(model).count("/") == 1 and str(model)[0] not in "./~":
        loaded = _from_folder(
            checkpoint.downloaded(str(model)), str(model), f"{model} from the Hugging Face hub", "hub"
        )
    else:
        raise UnknownModel(str(model))
    if tokenizer is not None:
        loaded = replace(loaded, tokenizer=Tokenizer.of(tokenizer), is_tokenizer_given=True)
    if loaded.tokenizer is not None:
        loaded.tokenizer.check_fits(loaded.config.vocab_size)
    if dtype is None and kind.itemsize == 2:
        kind = DTYPES[loaded.config.half]
    placed = weights.placed(loaded.network, torch.device(device), kind)
    if loaded.kind != "random" and device != "meta":
        values.check_finite(placed, loaded.network)
    return replace(loaded, network=placed)


def _check_no_folder(preset: str) -> None:
    """ModelError where a model's folder has the name of a preset: which one is meant is not known."""
    if Path(preset, "config.json").is_file():
        raise ModelError(
            f"{preset!r} is a preset with random weights, and also a folder here with a model. Write './{preset}' for "
            "the folder. For the preset, rename the folder, or start in another one."
        )


def checked_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype:
    """The dtype; float32 on the CPU and else float16 unless said."""
    if dtype is None:
        return torch.float32 if device == "cpu" else torch.float16
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}, but it must be one of {', '.join(DTYPES)}.{did_you_mean(name, DTYPES)}")
    return DTYPES[name]


def is_demo(label: str) -> bool:
    """Whether a result's label is the demo model's. Its weights may be former ones; its vocabulary is the same."""
    return label.startswith(DEMO_LABEL)


def demo_tokenizer(vocab_size: float = math.inf) -> Tokenizer | None:
    """The demo model's tokenizer, which random presets borrow; None for a vocabulary that is too small for it."""
    tokenizer = Tokenizer.from_folder(DEMO)
    return tokenizer if tokenizer and tokenizer.num_words <= vocab_size else None


def _from_folder(folder: Path, name: str, label: str, kind: Kind) -> Model:
    read = weights.from_folder(folder)
    tokenizer = Tokenizer.from_folder(folder, read.network.config.family)
    return Model(name, label, read.network, tokenizer, kind, read.settings, folder)
