"""A GPT-2 decoder. It calls ops; what they cost and where they write is not its business.

T tokens, B rows, C channels, V words, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.models.config import Config
from eet_lab.ops.pads import serves_any_pads
from eet_lab.ops.types import KVLayer, Layer, Linear, Norm, Sampling, Step

if TYPE_CHECKING:
    from eet_lab.parts import Ops


class Decoder(NamedTuple):
    """The weights, and what they are for."""

    config: Config
    words: Tensor  # [V,C]
    places: Tensor  # [S,C]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear  # [V,C]

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def dtype(self) -> torch.dtype:
        return self.words.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied head is counted once."""
        return num_bytes(tensors(self))


@serves_any_pads
def forward(model: Decoder, ops: Ops, mask: Any, cache: Sequence[KVLayer], step: Step, sampling: Sampling) -> Tensor:
    """The next token of every row, [B]."""
    act = model.config.act
    x = ops.embed(step.ids, step.positions, model.words, model.places)
    attend = mask(ops, step, like=x)
    for w, kv in zip(model.layers, cache, strict=True):
        # What one op makes for the next gets no name, which would keep its memory beyond that op.
        x = ops.linear_residual(attend(ops.norm_linear(x, w.norm_1, w.qkv), kv, step), w.proj, x)
        x = ops.linear_residual(ops.norm_linear(x, w.norm_2, w.fc_1, act), w.fc_2, x)
    return ops.next_token(x, step, model.norm, model.head, sampling)


@serves_any_pads
def forward_by_layer(
    model: Decoder,
    ops: Ops,
    mask: Any,
    cache: Sequence[KVLayer],
    step: Step,
    sampling: Sampling,
    *,
    takes: Callable[[Sequence[Layer], int], bool],
) -> Tensor:
    """The same, where `ops.rest_of_layer` takes as many tokens as the step has: what lies between two layers' attention
    is one op.
    """
    if not takes(model.layers, len(step.ids)):
        return forward(model, ops, mask, cache, step, sampling)
    act, first = model.config.act, model.layers[0]
    x = ops.embed(step.ids, step.positions, model.words, model.places)
    attend = mask(ops, step, like=x)
    qkv = ops.norm_linear(x, first.norm_1, first.qkv)
    for w, kv, following in zip(model.layers, cache, (*model.layers[1:], None), strict=True):
        x, qkv = ops.rest_of_layer(attend(qkv, kv, step), x, w, following, act)
    return ops.next_token(x, step, model.norm, model.head, sampling)


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor of a decoder, in reading order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [t for part in tree for t in tensors(part)] if isinstance(tree, tuple) else []


def num_bytes(weights: Sequence[Tensor]) -> int:
    """Bytes of tensors, with or without data; one that is there twice is counted once."""
    places = {(t.untyped_storage()._cdata, t.storage_offset()): t.numel() * t.element_size() for t in weights}
    return sum(places.values())


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
