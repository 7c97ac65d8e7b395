"""The encoder-decoder of every family: a decoder whose layers look at what an encoder has read.

T tokens, S tokens of sources, B rows, C channels, V vocabulary, P positions, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from eet_lab.models.config import Seq2SeqConfig
from eet_lab.models.decoder import num_bytes, tensors
from eet_lab.ops.types import KV, Attend, Batch, Cross, Extras, Layer, Linear, Norm, Spec

if TYPE_CHECKING:
    from eet_lab.parts import Ops


class Stack(NamedTuple):
    """The layers of an encoder or of a decoder, and what is before and behind them. What a family lacks is None."""

    position_embedding: Tensor | None  # [first_position + P,C]
    embedding_norm: Norm | None
    bias: Tensor | None  # [buckets,H]  of scores, by relative positions, in all layers
    layers: tuple[Layer, ...]
    norm: Norm | None


class Seq2Seq(NamedTuple):
    """The weights, and what they are for. Families differ in what is there, and in their config."""

    config: Seq2SeqConfig
    token_embedding: Tensor  # [V,C]  of sources, and of what is generated
    encoder: Stack
    decoder: Stack
    head: Linear  # [V,C]

    @property
    def device(self) -> torch.device:
        return self.token_embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.token_embedding.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; what is tied is counted once."""
        return num_bytes(tensors(self))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Those of the decoder."""
        return self.decoder.layers

    @property
    def norm(self) -> Norm | None:
        """The norm before the head, whose weight takes in the scale of the states that the head reads."""
        norm, scale = self.decoder.norm, self.config.head_scale
        return norm if norm is None or scale == 1 else norm._replace(weight=norm.weight * scale)


class CrossKV(Protocol):
    """How the keys and values of the decoder's layers are made of what the encoder has read."""

    def __call__(self, model: Seq2Seq, ops: Ops, x: Tensor, /) -> Iterator[KV]:
        """The encoder's hidden states [S,C], before its last norm -> keys and values [S,G,D], layer by layer."""


def layer_by_layer(model: Seq2Seq, ops: Ops, x: Tensor) -> Iterator[KV]:
    """A product for each layer."""
    for cross in _crosses(model):
        kv = ops.norm_linear(x, model.encoder.norm, cross.kv)
        keys, values = kv.unflatten(-1, (-1, model.config.head_dim)).chunk(2, 1)
        yield keys, values


def all_layers_at_once(model: Seq2Seq, ops: Ops, x: Tensor) -> Iterator[KV]:
    """One product for all layers, whose keys and values are views of it.

    Source: LightSeq2 (Wang et al., SC 2022), "layer-batched cross attention".
    """
    linears = [cross.kv for cross in _crosses(model)]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    whole = Linear(torch.cat([linear.weight for linear in linears]), torch.cat(biases) if biases else None)
    kv = ops.norm_linear(x, model.encoder.norm, whole)
    parts = kv.unflatten(-1, (2 * len(linears), -1, model.config.head_dim)).unbind(1)
    yield from zip(parts[::2], parts[1::2], strict=True)


def _crosses(model: Seq2Seq) -> list[Cross]:
    return [layer.cross for layer in model.decoder.layers if layer.cross is not None]


def encode(model: Seq2Seq, ops: Ops, attend: Attend, batch: Batch, cross_kv: CrossKV = layer_by_layer) -> Iterator[KV]:
    """Read sources: the keys and values [S,G,D] that each layer of the decoder will look at, one after the other."""
    return cross_kv(model, ops, _run(model, model.encoder, model.config.encoder_spec, ops, attend, batch))


def forward(model: Seq2Seq, ops: Ops, attend: Attend, batch: Batch) -> Tensor:
    """The decoder's hidden states [T,C], before its last norm. `attend` knows what was encoded."""
    return _run(model, model.decoder, model.config.spec, ops, attend, batch)


def _run(model: Seq2Seq, stack: Stack, spec: Spec, ops: Ops, attend: Attend, batch: Batch) -> Tensor:
    config, cross_spec, extras = model.config, model.config.cross_spec, Extras(bias=stack.bias)
    x = _embedded(model, stack, ops, batch)

    def branch(x: Tensor, norm: Norm, first: Linear, last: Linear, between: Callable, act: str | None = None) -> Tensor:
        """x with what a sub-layer adds to it, where its norm is."""
        made = between(ops.norm_linear(x, None if config.post_norm else norm, first, act))
        return ops.linear_residual_norm(made, last, x, norm) if config.post_norm else ops.linear_residual(made, last, x)

    for i, w in enumerate(stack.layers):
        x = branch(x, w.norm_1, w.qkv, w.proj, lambda qkv, i=i: attend(i, qkv, spec, extras))
        if (cross := w.cross) is not None:
            x = branch(x, cross.norm, cross.q, cross.proj, lambda q, i=i: attend.cross(i, q, cross_spec))
        x = branch(x, w.norm_2, w.fc_1, w.fc_2, lambda inner: inner, config.act)
    return x


def _embedded(model: Seq2Seq, stack: Stack, ops: Ops, batch: Batch) -> Tensor:
    config, words, positions = model.config, model.token_embedding, stack.position_embedding
    how = {"scale": config.embedding_scale, "padding": config.padding_id}
    if stack.embedding_norm is None or positions is None:
        return ops.embed(batch.ids, batch.positions, words, positions, **how)
    positions = positions[config.first_position :]
    return ops.embed_norm(batch.ids, batch.positions, None, words, positions, None, stack.embedding_norm, **how)


def sinusoids(config: Seq2SeqConfig, like: Tensor) -> Tensor:
    """Positions as sines, then cosines, of angles that grow with them: [P,C].

    Source: Vaswani et al. (2017), section 3.5, in the order of transformers' Marian, to the bit.
    """
    place, channel = np.arange(config.context)[:, None], np.arange(0, config.hidden_size, 2)
    angles = place / np.power(10000, channel / config.hidden_size)
    both = np.concatenate((np.sin(angles), np.cos(angles)), 1)[:, : config.hidden_size]
    return torch.from_numpy(both).float().to(like.device, like.dtype)
