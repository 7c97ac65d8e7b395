"""The encoder of images: patches behind a class token see each other, in layers whose norms come first.

T tokens, I images, P patches of all of them, N positions of one, C channels, L classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from eet_lab.models.config import VisionConfig
from eet_lab.models.decoder import num_bytes, op_by_op, tensors
from eet_lab.models.encoder import Encoder
from eet_lab.ops.norms import norm
from eet_lab.ops.types import Attend, Layer, Linear, Norm, fresh

if TYPE_CHECKING:
    from eet_lab.parts import Ops
    from eet_lab.parts.passes import Pass


class VisionEncoder(NamedTuple):
    """The weights, and what they are for. What a checkpoint lacks is None."""

    config: VisionConfig
    patches: Linear  # [C,channels,size,size]
    cls_token: Tensor  # [1,1,C]
    position_embedding: Tensor  # [1,N,C]
    layers: tuple[Layer, ...]
    norm: Norm  # of the last hidden states
    pooler: Linear | None = None  # of the class token, with tanh
    classes: Linear | None = None  # [L,C]

    @property
    def device(self) -> torch.device:
        return self.cls_token.device

    @property
    def dtype(self) -> torch.dtype:
        return self.cls_token.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return num_bytes(tensors(self))

    @property
    def inv_freq(self) -> None:
        """Positions are not rotary."""

    @property
    def class_weights(self) -> list[Tensor]:
        """All that `class_logits` reads."""
        return tensors((self.norm, self.classes))

    def hidden(self, ops: Ops, attend: Attend, read: Pass) -> Tensor:
        """The hidden states [T,C] of a pass, before the last norm: whoever needs few of them norms few."""
        assert read.patches is not None
        linear = Linear(self.patches.weight.flatten(1), self.patches.bias)
        made = ops.norm_linear(read.patches.to(self.dtype), None, linear)  # [P,C]
        table = torch.cat([self.cls_token[0], made])
        x = ops.embed(read.batch.ids, read.batch.positions, table, self.position_embedding[0])
        return op_by_op(self, ops, attend, x)

    def last(self, ops: Ops, states: Tensor) -> Tensor:
        """What embeddings are made of, from hidden states [T,C]: their norm."""
        return norm(states, self.norm, empty=fresh)

    def pooled(self, ops: Ops, first: Tensor) -> Tensor:
        """The pooler's output of class tokens [I,C]; their norm where there is none."""
        return self.last(ops, first) if self.pooler is None else ops.norm_linear(first, self.norm, self.pooler, "tanh")

    def class_logits(self, ops: Ops, first: Tensor) -> Tensor:
        """The logits [I,L] of the classes of images, whose class tokens are [I,C]."""
        assert self.classes is not None, "an encoder that classifies images"
        return ops.norm_linear(first, self.norm, self.classes)


AnyEncoder = Encoder | VisionEncoder
