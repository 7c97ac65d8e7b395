"""The encoder of every family: all tokens of a text see each other. It calls ops, as a decoder does.

T tokens, B rows, C channels, V vocabulary, S positions, L classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from eet_lab.models.config import EncoderConfig
from eet_lab.models.decoder import num_bytes, tensors
from eet_lab.ops.types import Attend, Layer, Linear, Norm

if TYPE_CHECKING:
    from eet_lab.parts import Ops
    from eet_lab.parts.passes import Pass


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

    @property
    def class_weights(self) -> list[Tensor]:
        """All that `class_logits` reads."""
        return tensors((self.pooler if self.class_dense is None else self.class_dense, self.classes))

    def hidden(self, ops: Ops, attend: Attend, read: Pass) -> Tensor:
        """The hidden states [T,C] of a pass, whose texts tell the types of their tokens, or have type 0."""
        config, batch, positions = self.config, read.batch, self.position_embedding[self.config.first_position :]
        tables = self.token_embedding, positions, self.type_embedding
        x = ops.embed_norm(batch.ids, batch.positions, read.types, *tables, self.norm)
        for number, w in enumerate(self.layers):
            # What one op makes for the next gets no name, which would keep its memory beyond that op.
            x = ops.linear_residual_norm(
                attend(number, ops.norm_linear(x, None, w.qkv), config.spec), w.proj, x, w.norm_1
            )
            x = ops.linear_residual_norm(ops.norm_linear(x, None, w.fc_1, config.act), w.fc_2, x, w.norm_2)
        return x

    def last(self, ops: Ops, states: Tensor) -> Tensor:
        """What embeddings are made of, from hidden states [T,C]: these are normed already."""
        return states

    def pooled(self, ops: Ops, first: Tensor) -> Tensor:
        """What stands for texts: the pooler's output of their first tokens' states [B,C], or these without one."""
        return first if self.pooler is None else ops.norm_linear(first, None, self.pooler, "tanh")

    def mlm_logits(self, ops: Ops, states: Tensor) -> Tensor:
        """The logits [N,V] of masked tokens, from their hidden states [N,C]."""
        assert self.mlm_transform is not None and self.head is not None, "an encoder that fills masks"
        transformed = ops.norm_linear(states, None, self.mlm_transform, self.config.mlm_act)
        return ops.norm_linear(transformed, self.mlm_norm, self.head)

    def class_logits(self, ops: Ops, first: Tensor) -> Tensor:
        """The logits [B,L] of the classes of texts, whose first tokens' states are [B,C]."""
        assert self.classes is not None, "an encoder that classifies texts"
        if self.class_dense is None:
            return ops.norm_linear(self.pooled(ops, first), None, self.classes)
        return ops.norm_linear(
            ops.norm_linear(first, None, self.class_dense, self.config.class_act), None, self.classes
        )

    def token_class_logits(self, ops: Ops, states: Tensor) -> Tensor:
        """The logits [N,L] of the classes of tokens, from their hidden states [N,C]."""
        assert self.token_classes is not None, "an encoder that classifies tokens"
        return ops.norm_linear(states, None, self.token_classes)
