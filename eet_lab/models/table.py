"""Weight tables: a family's names for the weights, as data. The same table loads and saves.

It maps a path of ours ("layers.*.qkv.weight") to an `Entry`; "*" stands for the number of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.errors import ModelError
from eet_lab.models.config import HEADS, Config, EncoderConfig, Seq2SeqConfig, VisionConfig
from eet_lab.models.decoder import Decoder, Layer
from eet_lab.models.encoder import Encoder
from eet_lab.models.seq2seq import Seq2Seq, Stack, sinusoids
from eet_lab.models.vision import AnyEncoder, VisionEncoder
from eet_lab.ops.types import Cross, Linear, Norm


class Entry(NamedTuple):
    """How a checkpoint keeps one of our tensors, or a part of each of several.

    `how`: "same"; "t", transposed; "cat", several one after the other, of `sizes` rows each, or of as many; "twin", the
    same under several names, of which a checkpoint may lack some; "row", the only row of a matrix.
    """

    names: tuple[str, ...]
    how: str = "same"
    sizes: tuple[int, ...] = ()

    def load(self, parts: list[Tensor]) -> Tensor:
        """Ours, in memory of its own."""
        if self.how == "cat":
            return torch.cat(parts)
        one = {"t": parts[0].t, "row": parts[0].flatten}.get(self.how, lambda: parts[0])()
        return one.clone(memory_format=torch.contiguous_format)

    def save(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Theirs, which are views of ours."""
        if self.how == "cat":
            return tensor.split(self._sizes(len(tensor)))
        if self.how == "twin":
            return tuple(tensor.clone() for _ in self.names)
        if self.how == "row":
            return (tensor[None],)
        return (tensor.t() if self.how == "t" else tensor,)

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes of theirs, where ours has `shape`."""
        if self.how == "cat":
            return tuple((size, *shape[1:]) for size in self._sizes(shape[0]))
        if self.how == "twin":
            return (shape,) * len(self.names)
        if self.how == "row":
            return ((1, *shape),)
        return (shape[::-1] if self.how == "t" else shape,)

    def _sizes(self, num_rows: int) -> tuple[int, ...]:
        return self.sizes or (num_rows // len(self.names),) * len(self.names)


Table = Mapping[str, Entry]
LAYER = re.compile(r"(?<=\blayers\.)\d+")
SHARED, HEAD = "shared.weight", "lm_head.weight"
"""What encoder-decoders call the word embeddings of both, and their head."""


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
    for begin, (num_layers, layer) in config.stacks().items():
        for i in range(num_layers):
            yield from ((f"{begin}layers.{i}.{path}", shape) for path, shape in layer.items())
    yield from config.outer_shapes().items()


def entries(table: Table, config: Config) -> Iterator[tuple[str, Entry, tuple[int, ...]]]:
    """What the table says of each tensor that such a decoder has: its path, its entry, its shape."""
    for path, shape in shapes(config):
        layer = "".join(LAYER.findall(path))
        entry = table[LAYER.sub("*", path)]
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


def without_tied_head(given: dict[str, Tensor], config: Config, table: Table, copies: Collection[str]) -> Config:
    """The config of a checkpoint with these tensors, from which `copies` of a tied head are taken.

    As in transformers, a head that differs from the word embeddings has weights of its own, whatever the config says.
    """
    if not config.tied_head:
        return config
    embedding, head = (table[path].names[0] for path in ("token_embedding", "head.weight"))
    if embedding not in given and head in given:
        given[embedding] = given[head]
    if head in given and not _is_same(given[embedding], given[head]):
        return replace(config, tied_head=False)
    for name in filter(given.__contains__, copies):
        copy = given.pop(name)
        if name.endswith(".bias"):  # the one of the two that the head reads
            given[table["head.bias"].names[0]] = copy
    return config


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and torch.equal(tensor, other.to(tensor))


def without_copies(given: dict[str, Tensor], config: Seq2SeqConfig) -> Seq2SeqConfig:
    """The config of a checkpoint with these tensors, from which copies of the shared word embeddings are taken.

    As in transformers, a head that differs from them has weights of its own. Errors: ModelError where the encoder or
    the decoder has.
    """
    if config.positions == "sinusoidal":  # older checkpoints hold them
        for name in ("encoder.embed_positions.weight", "decoder.embed_positions.weight"):
            given.pop(name, None)
    embeddings = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    for name in filter(given.__contains__, [*embeddings, *[HEAD] * config.tied_head]):
        if torch.equal(given.setdefault(SHARED, given[name]), given[name]):
            del given[name]
        elif name in embeddings:
            raise ModelError(
                f"{name} differs from {SHARED}: the checkpoint has word embeddings for each of encoder and decoder, "
                "which is not supported. Choose a model that shares them."
            )
    return replace(config, tied_head=config.tied_head and HEAD not in given, head_bias="final_logits_bias" in given)


def constants(model: Any) -> list[Tensor]:
    """What no checkpoint has to hold, and nothing trains: frequencies or sinusoids of positions."""
    ours = dict(flat(model))
    weights = {id(ours[path]) for path, _ in shapes(model.config)}
    return [tensor for tensor in ours.values() if id(tensor) not in weights]


def theirs(table: Table, model: Decoder | AnyEncoder | Seq2Seq) -> Iterator[tuple[str, Tensor]]:
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
    """A decoder, an encoder, or both, of tensors by their paths."""

    def part(path: str) -> Any:
        weight, bias = ours.get(f"{path}.weight"), ours.get(f"{path}.bias")
        if weight is None:
            return None
        return Norm(weight, bias, config.eps) if "norm" in path else Linear(weight, bias)

    def layers(begin: str, num_layers: int) -> tuple[Layer, ...]:
        paths = [f"{begin}layers.{i}." for i in range(num_layers)]
        found = [Layer(*(part(path + name) for name in Layer._fields)) for path in paths]
        crosses = [Cross(*(part(f"{path}cross.{name}") for name in Cross._fields)) for path in paths]
        both = zip(found, crosses, strict=True)
        return tuple(layer if cross.q is None else layer._replace(cross=cross) for layer, cross in both)

    if isinstance(config, VisionConfig):
        patches = part("patches"), ours["cls_token"], ours["position_embedding"]
        heads = {name: part(name) for name in config.heads}
        return VisionEncoder(config, *patches, layers("", config.num_layers), part("norm"), **heads)
    token_embedding = ours["token_embedding"]
    head = Linear(ours.get("head.weight", token_embedding), ours.get("head.bias"))
    if isinstance(config, Seq2SeqConfig):
        sines = sinusoids(config, token_embedding) if config.positions == "sinusoidal" else None

        def stack(name: str, num_layers: int) -> Stack:
            positions, norm = ours.get(f"{name}.position_embedding", sines), part(f"{name}.embedding_norm")
            found = layers(f"{name}.", num_layers)
            return Stack(positions, norm, ours.get(f"{name}.bias"), found, part(f"{name}.norm"))

        both = stack("encoder", config.encoder_layers), stack("decoder", config.num_layers)
        return Seq2Seq(config, token_embedding, *both, head)
    own_layers, norm = layers("", config.num_layers), part("norm")
    if isinstance(config, EncoderConfig):
        names = {path.partition(".")[0] for name in config.heads for path in config.head_shapes(name)}
        heads = {name: head if name == "head" else part(name) for name in names}
        embeddings = token_embedding, ours["position_embedding"], ours.get("type_embedding")
        return Encoder(config, *embeddings, norm, own_layers, **heads)
    inv_freq = config.rope and config.rope.inv_freq(config.head_dim)
    inv_freq = None if inv_freq is None else inv_freq.to(token_embedding.device)
    return Decoder(config, token_embedding, ours.get("position_embedding"), own_layers, norm, head, inv_freq)
