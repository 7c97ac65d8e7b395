"""The decoder of every family. It calls ops; what they cost and where they write is not its business.

T tokens, B rows, C channels, V vocabulary, S positions, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eet_lab.models.config import Config
from eet_lab.ops.types import Attend, Batch, Extras, Layer, Linear, Norm

if TYPE_CHECKING:
    from eet_lab.parts import Ops
    from eet_lab.parts.passes import Pass


class Decoder(NamedTuple):
    """The weights, and what they are for. Families differ in what is there, and in their config."""

    config: Config
    token_embedding: Tensor  # [V,C]
    position_embedding: Tensor | None  # [first_position + S,C]; None where positions are rotary
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear  # [V,C]
    inv_freq: Tensor | None = None  # [D/2] fp32 whatever the weights' type, where positions are rotary

    @property
    def device(self) -> torch.device:
        return self.token_embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.token_embedding.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied head is counted once."""
        return num_bytes(tensors(self))

    def hidden(self, ops: Ops, attend: Attend, read: Pass) -> Tensor:
        """The hidden states [T,C] of a pass over whole texts, before the last norm."""
        return forward(self, ops, attend, read.batch, op_by_op)


class Layers(Protocol):
    """How a pass goes through the layers."""

    def __call__(self, model: Decoder, ops: Ops, attend: Attend, x: Tensor, /) -> Tensor: ...


def forward(model: Decoder, ops: Ops, attend: Attend, batch: Batch, layers: Layers) -> Tensor:
    """The hidden states [T,C], before the last norm: whoever needs few of them norms few."""
    positions, first = model.position_embedding, model.config.first_position
    if positions is not None and first:
        positions = positions[first:]
    return layers(model, ops, attend, ops.embed(batch.ids, batch.positions, model.token_embedding, positions))


def op_by_op(model: Any, ops: Ops, attend: Attend, x: Tensor) -> Tensor:
    """The layers, each as five calls: x [T,C] -> [T,C]."""
    act, spec = model.config.act, model.config.spec
    for number, w in enumerate(model.layers):
        extras = Extras(w.q_norm, w.k_norm, model.inv_freq)
        # What one op makes for the next gets no name, which would keep its memory beyond that op.
        x = ops.linear_residual(attend(number, ops.norm_linear(x, w.norm_1, w.qkv), spec, extras), w.proj, x)
        x = ops.linear_residual(ops.norm_linear(x, w.norm_2, w.fc_1, act), w.fc_2, x)
    return x


def fused(
    model: Decoder, ops: Ops, attend: Attend, x: Tensor, *, takes: Callable[[Sequence[Layer], int], bool]
) -> Tensor:
    """The same, where `ops.fused_layer` takes so many tokens: what lies between two layers' attention is one op."""
    if not takes(model.layers, len(x)):
        return op_by_op(model, ops, attend, x)
    act, spec, first = model.config.act, model.config.spec, model.layers[0]
    qkv: Tensor | None = ops.norm_linear(x, first.norm_1, first.qkv)
    for number, (w, following) in enumerate(zip(model.layers, (*model.layers[1:], None), strict=True)):
        extras = Extras(w.q_norm, w.k_norm, model.inv_freq)
        assert qkv is not None, "the layer before this one made it"
        x, qkv = ops.fused_layer(attend(number, qkv, spec, extras), x, w, following, act)
    return x


def logits(model: Decoder, ops: Ops, hidden: Tensor) -> Tensor:
    """The logits [N,V] of any of the hidden states [N,C]."""
    return ops.norm_linear(hidden, model.norm, model.head)


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor of a decoder, or of other nested tuples, in reading order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [t for part in tree for t in tensors(part)] if isinstance(tree, tuple) else []


def num_bytes(weights: Sequence[Tensor]) -> int:
    """Bytes of tensors, with or without data; one that is there twice is counted once."""
    storages = {(t.untyped_storage()._cdata, t.storage_offset()): t.numel() * t.element_size() for t in weights}
    return sum(storages.values())


def mapped(tree: Any, change: Any) -> Any:
    """The same decoder with `change` applied to every tensor; a tensor that is used twice is changed once."""
    return _mapped(tree, change, {})


def _mapped(part: Any, change: Any, done: dict[int, Tensor]) -> Any:
    # Not a closure: one that calls itself is a cycle, and would keep the tensors until the collector comes by.
    if isinstance(part, Tensor):
        if id(part) not in done:
            done[id(part)] = change(part)
        return done[id(part)]
    if isinstance(part, tuple):
        items = [_mapped(item, change, done) for item in part]
        return type(part)(*items) if hasattr(part, "_fields") else tuple(items)
    return part
