"""Weights in and out: Hugging Face checkpoints, live models, or random ones of the same shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from eet_lab.errors import ModelError, OutOfMemory
from eet_lab.models import checkpoint, table
from eet_lab.models.config import HEADS, Config, EncoderConfig, Seq2SeqConfig
from eet_lab.models.decoder import Decoder, mapped, tensors
from eet_lab.models.families import DECODERS, ENCODERS, FAMILIES, SEQ2SEQ, SUPPORTED, TITLES, family_of
from eet_lab.models.families.reading import OF_GENERATION, bos, ends
from eet_lab.models.seq2seq import Seq2Seq
from eet_lab.models.values import named
from eet_lab.models.vision import AnyEncoder
from eet_lab.monitor import free_bytes_of
from eet_lab.ops.oom import memory_for
from eet_lab.words import MiB, counted, some

REMEDY = "Close other models, or use half precision or a smaller model."
Network = Decoder | AnyEncoder | Seq2Seq
Placed = TypeVar("Placed", bound=Network)


class Loaded(NamedTuple):
    """A model, and what its config.json says."""

    network: Network
    settings: dict[str, Any]


def from_folder(folder: Path) -> Loaded:
    """Read a folder with config.json and model.safetensors (or shards, or a .bin), on the CPU in its own dtype."""
    settings = checkpoint.read_json(folder / "config.json")
    path, generates = folder / "generation_config.json", family_of(settings) not in ENCODERS
    told = checkpoint.read_json(path) if generates and path.exists() else {}
    return _loaded(settings, told, checkpoint.read_tensors(folder), str(folder))


def from_live(model: Any) -> Loaded:
    """Take a live model of transformers, with a copy of its weights: training it on changes nothing."""
    if getattr(getattr(model, "config", None), "model_type", None) is None or not hasattr(model, "state_dict"):
        raise ModelError(
            f"load takes a name, a folder or a transformers model, not {type(model).__name__}. Supported: {SUPPORTED}."
        )
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise ModelError(
            f"{type(model).__name__} has shapes and no data, on 'meta'. Load its weights with from_pretrained first, "
            "or give load the folder or name of its checkpoint."
        )
    with memory_for("a copy of the model's weights", remedy=REMEDY):
        told = getattr(model, "generation_config", None)
        told = {} if told is None else told.to_dict()
        return _loaded(model.config.to_dict(), told, model.state_dict(), type(model).__name__)


def random_decoder(config: Config, seed: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A decoder, or an encoder, with weights drawn from N(0, 0.02), biases and norms among them, made on its device.

    On "meta" it has shapes alone, for meta traces.
    """

    def begun(path: str, tensor: Tensor) -> Tensor:
        return tensor.add_(1) if _is_norm(path, tensor) else tensor

    return _random(config, seed, device, dtype, begun)


def untrained(config: Config, seed: int, device: torch.device, dtype: torch.dtype, spread: float = 1.0) -> Any:
    """A decoder, or an encoder, that is to be trained, with the weights that GPT-2 began with, made on its device.

    Matrices are drawn from N(0, 0.02), times `spread`; those whose products go into the residual stream are divided by
    the root of twice the layers. Biases are 0, norms 1.
    """

    def begun(path: str, tensor: Tensor) -> Tensor:
        if tensor.ndim == 1:
            return tensor.fill_(float(_is_norm(path, tensor)))
        if path.endswith((".proj.weight", ".fc_2.weight")):
            tensor.div_((2 * config.num_layers) ** 0.5)
        return tensor.mul_(spread)

    return _random(config, seed, device, dtype, begun)


def _is_norm(path: str, tensor: Tensor) -> bool:
    return tensor.ndim == 1 and path.endswith(".weight")


def _random(
    config: Config, seed: int, device: torch.device, dtype: torch.dtype, begun: Callable[[str, Tensor], Tensor]
) -> Any:
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def drawn(path: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, device=device, dtype=dtype)  # on meta it has no data to draw
        return tensor if generator is None else begun(path, tensor.normal_(std=0.02, generator=generator))

    with _weights(config, device, dtype):
        return table.built(config, {path: drawn(path, shape) for path, shape in table.shapes(config)})


def placed(network: Placed, device: torch.device, dtype: torch.dtype) -> Placed:
    """The same weights on a device, in a dtype; frequencies of rotary positions keep theirs."""
    is_there = network.device.type == device.type and device.index in (None, network.device.index)
    frequencies = network.inv_freq if isinstance(network, Decoder) else None
    if is_there and all(tensor.dtype == dtype for tensor in tensors(network) if tensor is not frequencies):
        return network
    with _weights(network.config, device, dtype):
        return mapped(network, lambda tensor: tensor.to(device, None if tensor is frequencies else dtype))


def saved(network: Network, settings: Mapping[str, Any], folder: Path) -> None:
    """Write config.json and model.safetensors, which transformers reads. Errors: ModelError."""
    dtype = str(network.dtype).removeprefix("torch.")
    if network.device.type == "meta":
        raise ModelError(
            "The model has shapes and no data, so that nothing could be saved; load it on 'cpu' or 'cuda'."
        )
    dtypes = [name for name in ("dtype", "torch_dtype") if name in settings] or ["dtype"]
    checkpoint.write(folder, {**settings, **dict.fromkeys(dtypes, dtype)}, state_of(network))


def save_ends(config: Config, settings: Mapping[str, Any], folder: Path) -> None:
    """Write generation_config.json where config.json, which holds `settings`, does not tell what ends a text.

    One that lies there, which would come first, goes. Errors: ModelError.
    """
    told = None
    if FAMILIES[config.family] not in ENCODERS and ends(settings, config.vocab_size) != config.ends:
        told = {name: settings[name] for name in OF_GENERATION if settings.get(name) is not None}
        told["eos_token_id"] = [*config.ends]
    checkpoint.write_generation(told, folder)


def state_of(network: Network) -> dict[str, Tensor]:
    """Every tensor under the name that transformers gives it, as views; a tied head comes once.

    An encoder without a masked language modeling or classification head has names without a prefix.
    """
    module, state = FAMILIES[network.config.family], dict(named(network))
    first, outside = module.PREFIXES[0], getattr(module, "HEADS", (table.HEAD,))
    if isinstance(network, AnyEncoder) and not any(name.startswith(outside) for name in state):
        return state
    return {name if name.startswith(outside) else first + name: tensor for name, tensor in state.items()}


@contextmanager
def _weights(config: Config, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """OutOfMemory where there is no room for them: the machine's own memory may be promised and then not be there."""
    needed = config.num_params * dtype.itemsize
    what = f"weights of {needed / MiB:.0f} MiB"
    if device.type != "meta" and needed > (free := free_bytes_of(device)):
        raise OutOfMemory(f"There is no room for {what}: {free / MiB:.0f} MiB are free. {REMEDY}")
    with memory_for(what, remedy=REMEDY):
        yield


def _loaded(
    settings: Mapping[str, Any], generation: Mapping[str, Any], state: Mapping[str, Tensor], source: str
) -> Loaded:
    """`generation` is what generation_config.json says, which comes first, as in transformers."""
    module = family_of(settings)
    if module in SEQ2SEQ and state and not any("decoder" in name for name in state):
        raise ModelError(
            f"{source} has no weights of a decoder: it is the encoder of an encoder-decoder alone, which does not run "
            "here. Load one that was saved with both (...ForConditionalGeneration, MarianMTModel), or an encoder, such "
            "as a BERT."
        )
    told = {**settings, **{name: generation[name] for name in OF_GENERATION if generation.get(name) is not None}}
    settings = told if module in SEQ2SEQ else settings
    config: Config = module.config(settings)
    if module not in ENCODERS:
        config = replace(config, eos_ids=ends(told, config.vocab_size))
    if module in DECODERS:
        config = replace(config, **bos(told, config.vocab_size))
    given = {_bare(name, module): tensor.detach() for name, tensor in state.items()}
    del state  # what was taken over can go
    for name in [n for n in given if n.endswith(module.BUFFERS)]:  # of old checkpoints
        del given[name]
    if module not in SEQ2SEQ:
        tied, copies = config.tied_head, getattr(module, "COPIES", (table.HEAD,))
        config = table.without_tied_head(given, config, module.table(config), copies)
        settings = settings if config.tied_head == tied else {**settings, "tie_word_embeddings": False}
    names = module.table(config)
    if isinstance(config, EncoderConfig):
        architectures = settings.get("architectures") or [""]
        config = table.with_heads(names, config, given, str(architectures[0]))
    if isinstance(config, Seq2SeqConfig):
        config = table.without_copies(given, config)
    _check_layers(given, config, names, module.LAYERS, source)
    wanted = list(table.entries(names, config))
    for twins in (entry.names for _, entry, _ in wanted if entry.how == "twin"):
        there = [given[name] for name in twins if name in given]
        given |= {name: there[0] for name in twins if there and name not in given}
    _check(given, wanted, config, source)
    ours = {path: entry.load([given.pop(name) for name in entry.names]) for path, entry, _ in wanted}
    network = table.built(config, ours)
    finished = getattr(module, "finished", lambda network, settings: (network, dict(settings)))
    return Loaded(*finished(network, settings))


def _bare(name: str, module: Any) -> str:
    """A name without the first of the family's prefixes that it begins with, and as checkpoints mostly have it."""
    name = name.removeprefix(next(filter(name.startswith, module.PREFIXES), ""))
    for old, new in getattr(module, "RENAMED", {}).items():
        name = re.sub(old, new, name)
    return name


def _check_layers(
    tensors: Mapping[str, Tensor], config: Config, names: table.Table, keys: str | tuple[str, ...], source: str
) -> None:
    """Before the names of all layers are made: a damaged config may ask for any number."""
    keys = (keys,) if isinstance(keys, str) else keys
    for key, (begin, (num_layers, shapes)) in zip(keys, config.stacks().items(), strict=True):
        if num_layers > len(tensors):
            each = sum(len(names[f"{begin}layers.*.{path}"].names) for path in shapes)
            raise ModelError(
                f"{source} does not fit its config: {key} is {num_layers:,}, but it has {len(tensors)} tensors in all, "
                f"and a layer has {each}. Is the config its own? Download or save the model again."
            )


OTHER_HEADS = ("score.", "classifier.", "qa_outputs.")
"""How transformers' heads of decoders begin that tell classes of texts or tokens, or where an answer is."""

AS_LANGUAGE_MODEL = "Load one that was saved as that (...ForCausalLM, ...LMHeadModel)"


def _check(tensors: Mapping[str, Tensor], wanted: list, config: Config, source: str) -> None:
    """ModelError where there is not exactly what the config asks for."""
    title = TITLES[config.family]
    shapes: dict[str, tuple[int, ...]] = {}
    for _, entry, shape in wanted:
        shapes |= dict(zip(entry.names, entry.shapes(shape), strict=True))
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    kind = f"{'an' if title[0] in 'AEIO' else 'a'} {title}"
    heads = [name for name in extra if name.startswith(OTHER_HEADS)]
    if heads and not isinstance(config, EncoderConfig | Seq2SeqConfig):
        raise ModelError(
            f"{source} has another head ({some(heads)}) than the one for the next token: {kind} runs here as a causal "
            f"language model alone. {AS_LANGUAGE_MODEL}, or an encoder, such as a BERT, to tell classes."
        )
    own_head = [name for path, entry, _ in wanted if path == "head.weight" for name in entry.names]
    if missing and missing == own_head and not extra:
        raise ModelError(
            f"{source} has no head for the next token ({some(missing)}), and its config does not tie one to the "
            f"embeddings (tie_word_embeddings): {kind} runs here as a causal language model. {AS_LANGUAGE_MODEL}."
        )
    problems = [f"lacks {counted(len(missing), 'tensor')} ({some(missing)})"] if missing else []
    problems += [f"has {len(extra)} that {kind} has no place for ({some(extra)})"] if extra else []
    for name in filter(tensors.__contains__, shapes):
        if tuple(tensors[name].shape) != shapes[name]:
            problems.append(
                f"has {name} with shape {list(tensors[name].shape)} where config.json asks for {list(shapes[name])}"
            )
    if problems:
        told = f"{source} does not fit its config: it {'; it '.join(problems[:4])}."
        remedy = "Is it complete, and is the config its own? Download or save the model again."
        if len(problems) == 1 and extra:
            remedy = f"Is the config its own? If so it is more than {kind} and cannot run here: choose another model."
            if isinstance(config, EncoderConfig):
                remedy += f" Supported: {title} as it is, or with {', '.join(HEADS.values())}."
        raise ModelError(f"{told} {remedy}")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ModelError(f"{name} in {source} holds {tensor.dtype}, but weights are floating-point numbers.")
