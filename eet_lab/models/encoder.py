"""The encoder of every family: all tokens of a text see each other. It calls ops, as a decoder does.

T tokens, B rows, C channels, V vocabulary, S positions, L classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from eet_lab.models.config import EncoderConfig
from eet_lab.models.decoder import num_bytes, tensors
from eet_lab.ops.types import Attend, Batch, Layer, Linear, Norm

if TYPE_CHECKING:
    from eet_lab.parts import Ops


class Encoder(NamedTuple):
    """The weights, and what they are for. What a checkpoint lacks is None."""

    config: EncoderConfig
    token_embedding: Tensor  # [V,C]
    position_embedding: Tensor  # [first_position + S,C]
    type_embedding: Tensor | None  # [types,C]
    norm: Norm  # of the embeddings
    layers: tuple[Layer, ...]
    pooler: Linear | None = None  # of a text's first token, with tanh
    mlm_transform: Linear | None = None  # with its norm before the head
    mlm_norm: Norm | None = None
    head: Linear | None = None  # [V,C]
    next_sentence: Linear | None = None  # loaded and saved, and not run
    class_dense: Linear | None = None
    classes: Linear | None = None  # [L,C]
    token_classes: Linear | None = None  # [L,C]

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


def forward(model: Encoder, ops: Ops, attend: Attend, batch: Batch, types: Tensor | None = None) -> Tensor:
    """The hidden states [T,C] of a pass; `types` [T] of its tokens, None where all are of type 0."""
    act, spec, positions = model.config.act, model.config.spec, model.position_embedding[model.config.first_position :]
    tables = model.token_embedding, positions, model.type_embedding
    x = ops.embed_norm(batch.ids, batch.positions, types, *tables, model.norm)
    for number, w in enumerate(model.layers):
        # What one op makes for the next gets no name, which would keep its memory beyond that op.
        x = ops.linear_residual_norm(attend(number, ops.norm_linear(x, None, w.qkv), spec), w.proj, x, w.norm_1)
        x = ops.linear_residual_norm(ops.norm_linear(x, None, w.fc_1, act), w.fc_2, x, w.norm_2)
    return x


def pooled(model: Encoder, ops: Ops, first: Tensor) -> Tensor:
    """What stands for texts: the pooler's output of their first tokens' states [B,C], or these where it has none."""
    return first if model.pooler is None else ops.norm_linear(first, None, model.pooler, "tanh")


def mlm_logits(model: Encoder, ops: Ops, states: Tensor) -> Tensor:
    """The logits [N,V] of masked tokens, from their hidden states [N,C]."""
    transformed = ops.norm_linear(states, None, model.mlm_transform, model.config.mlm_act)
    return ops.norm_linear(transformed, model.mlm_norm, model.head)


def token_class_logits(model: Encoder, ops: Ops, states: Tensor) -> Tensor:
    """The logits [N,L] of the classes of tokens, from their hidden states [N,C]."""
    return ops.norm_linear(states, None, model.token_classes)


def class_logits(model: Encoder, ops: Ops, first: Tensor) -> Tensor:
    """The logits [B,L] of the classes of texts, whose first tokens' states are [B,C]."""
    if model.class_dense is None:
        return ops.norm_linear(pooled(model, ops, first), None, model.classes)
    return ops.norm_linear(ops.norm_linear(first, None, model.class_dense, model.config.class_act), None, model.classes)
