"""Weight tables: a family's names for the weights, as data. The same table loads and saves.

It maps a path of ours ("layers.*.qkv.weight") to an `Entry`; "*" stands for the number of a layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.models.config import HEADS, Config, EncoderConfig, VisionConfig
from eet_lab.models.decoder import Decoder, Layer
from eet_lab.models.encoder import Encoder
from eet_lab.models.vision import AnyEncoder, VisionEncoder
from eet_lab.ops.types import Linear, Norm


class Entry(NamedTuple):
    """How a checkpoint keeps one of our tensors, or a part of each of several.

    `how`: "same"; "t", transposed; "cat", several one after the other, of `sizes` rows each, or of as many; "twin", the
    same under several names, of which a checkpoint may lack some.
    """

    names: tuple[str, ...]
    how: str = "same"
    sizes: tuple[int, ...] = ()

    def load(self, parts: list[Tensor]) -> Tensor:
        """Ours, in memory of its own."""
        if self.how == "cat":
            return torch.cat(parts)
        return (parts[0].t() if self.how == "t" else parts[0]).clone(memory_format=torch.contiguous_format)

    def save(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Theirs, which are views of ours."""
        if self.how == "cat":
            return tensor.split(self._sizes(len(tensor)))
        if self.how == "twin":
            return tuple(tensor.clone() for _ in self.names)
        return (tensor.t() if self.how == "t" else tensor,)

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes of theirs, where ours has `shape`."""
        if self.how == "cat":
            return tuple((size, *shape[1:]) for size in self._sizes(shape[0]))
        if self.how == "twin":
            return (shape,) * len(self.names)
        return (shape[::-1] if self.how == "t" else shape,)

    def _sizes(self, num_rows: int) -> tuple[int, ...]:
        return self.sizes or (num_rows // len(self.names),) * len(self.names)


Table = Mapping[str, Entry]


def one(path: str, *names: str, how: str = "same", sizes: tuple[int, ...] = ()) -> dict[str, Entry]:
    """A single tensor."""
    return {path: Entry(names, how, sizes)}


def affine(path: str, *names: str, how: str = "same", sizes: tuple[int, ...] = ()) -> dict[str, Entry]:
    """A norm or a linear: its weight, and its bias where there is one."""
    weight = one(f"{path}.weight", *(f"{name}.weight" for name in names), how=how, sizes=sizes)
    how = "same" if how == "t" else how
    return weight | one(f"{path}.bias", *(f"{name}.bias" for name in names), how=how, sizes=sizes)


def shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a model by its path; in this order random ones are drawn."""
    layer = config.layer_shapes()
    for i in range(config.num_layers):
        yield from ((f"layers.{i}.{path}", shape) for path, shape in layer.items())
    yield from config.outer_shapes().items()


def entries(table: Table, config: Config) -> Iterator[tuple[str, Entry, tuple[int, ...]]]:
    """What the table says of each tensor that such a decoder has: its path, its entry, its shape."""
    for path, shape in shapes(config):
        first, _, rest = path.partition(".")
        layer, _, part = rest.partition(".") if first == "layers" else ("", "", "")
        entry = table[f"layers.*.{part}" if layer else path]
        yield path, entry._replace(names=tuple(name.replace("*", layer) for name in entry.names)), shape


def with_heads(table: Table, config: EncoderConfig, names: Collection[str], architecture: str = "") -> EncoderConfig:
    """The config of a checkpoint that has these names: with the heads of which it has some tensor."""

    def is_there(*paths: str) -> bool:
        return any(name in names for path in paths if path in table for name in table[path].names)

    heads = [head for head in HEADS if is_there(*config.head_shapes(head))]
    if {"classes", "token_classes"} <= {*heads}:  # under one name: a text's have a linear before them
        has_before = is_there("pooler.weight" if config.class_act is None else "class_dense.weight")
        of_tokens = architecture.endswith("ForTokenClassification") or not has_before
        heads.remove("classes" if of_tokens else "token_classes")
    return replace(config, heads=tuple(heads))


def theirs(table: Table, model: Decoder | AnyEncoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under the names of a checkpoint, as views; a tied head comes once, as the word embeddings."""
    ours = dict(flat(model))
    for path, entry, _ in entries(table, model.config):
        yield from zip(entry.names, entry.save(ours[path]), strict=True)


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model under its path."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, tuple):
        names = getattr(tree, "_fields", range(len(tree)))
        for name, part in zip(names, tree, strict=True):
            yield from flat(part, f"{path}.{name}" if path else str(name))


def built(config: Config, ours: Mapping[str, Tensor]) -> Any:
    """A decoder, or an encoder, of tensors by their paths."""

    def part(path: str) -> Any:
        weight, bias = ours.get(f"{path}.weight"), ours.get(f"{path}.bias")
        if weight is None:
            return None
        return Norm(weight, bias, config.eps) if "norm" in path else Linear(weight, bias)

    layers = tuple(Layer(*(part(f"layers.{i}.{name}") for name in Layer._fields)) for i in range(config.num_layers))
    norm = part("norm")
    if isinstance(config, VisionConfig):
        parts = part("patches"), ours["cls_token"], ours["position_embedding"], layers, norm
        return VisionEncoder(config, *parts, **{name: part(name) for name in config.heads})
    token_embedding = ours["token_embedding"]
    head = Linear(ours.get("head.weight", token_embedding), ours.get("head.bias"))
    if isinstance(config, EncoderConfig):
        names = {path.partition(".")[0] for name in config.heads for path in config.head_shapes(name)}
        heads: dict[str, Any] = {name: head if name == "head" else part(name) for name in names}
        embeddings = token_embedding, ours["position_embedding"], ours.get("type_embedding")
        return Encoder(config, *embeddings, norm, layers, **heads)
    inv_freq = config.rope and config.rope.inv_freq(config.head_dim)
    inv_freq = None if inv_freq is None else inv_freq.to(token_embedding.device)
    return Decoder(config, token_embedding, ours.get("position_embedding"), layers, norm, head, inv_freq)
