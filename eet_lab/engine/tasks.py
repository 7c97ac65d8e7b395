"""What is made of the hidden states of a pass. An engine's own task is to tell each row's next token.

T tokens, N of them asked for, B rows, C channels, V vocabulary, L classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from eet_lab.errors import ModelError
from eet_lab.models.config import HEADS, EncoderConfig
from eet_lab.models.decoder import Decoder
from eet_lab.models.vision import AnyEncoder
from eet_lab.ops.types import Batch, Sampling
from eet_lab.parts import Ops
from eet_lab.parts.passes import Pass, Readable


class Task(Protocol):
    """Hidden states [T,C], before the last norm -> the token [B] that each row goes on with.

    It picks the states that it needs before it takes their logits. A meta trace runs it too, on meta tensors.
    """

    def __call__(self, model: Decoder, ops: Ops, hidden: Tensor, batch: Batch, sampling: Sampling) -> Tensor: ...


def next_tokens(model: Decoder, ops: Ops, hidden: Tensor, batch: Batch, sampling: Sampling) -> Tensor:
    """Every row's next token: the task of generation."""
    return ops.next_token(hidden, batch, model.norm, model.head, sampling)


@dataclass(frozen=True)
class TextTask:
    """What an encoder's engine makes of texts. It says first which tokens' states it wants: norms and heads run on
    those alone.
    """

    name: str
    tokens: str
    """The tokens of each text whose states it reads: "first", "all", or "asked" (those in `Text.asked`)."""
    make: Callable[[Any, Ops, Tensor, Pass, Callable], Tensor]
    """The computation from the states [N,C] of these tokens. It gets its own memory from `empty`, and runs on meta
    tensors too.
    """
    one_each: bool = True
    """Whether that is one row for each text, else one for each of the tokens."""
    head: str = ""
    """What of `HEADS` it cannot do without."""

    def asking(self, text: Readable) -> Readable:
        """The text with the tokens that are wanted of it."""
        if self.tokens == "asked":
            return text
        return text._replace(asked=(0,) if self.tokens == "first" else range(len(text.ids)))

    def check(self, config: EncoderConfig) -> None:
        """ModelError where such a model cannot do it."""
        if self.head and self.head not in config.heads:
            has = " and ".join(HEADS[name] for name in config.heads) or "nothing on top of its layers"
            raise ModelError(
                f"This checkpoint lacks {HEADS[self.head]}: it has {has}. Load one that was saved with it, or take "
                "its embeddings (eet_lab.encode, or /v1/embeddings of a server)."
            )


def _mean(model: AnyEncoder, ops: Ops, states: Tensor, batch: Pass, empty: Callable) -> Tensor:
    """[B,C], summed in fp32."""
    out = empty("mean", (len(batch.sizes), states.shape[1]), states, torch.float32)
    if out.is_meta:
        return out
    # "unsafe" does not look at the lengths, for which the host would wait until the whole pass is done.
    found = model.last(ops, states).float()
    return out.copy_(torch.segment_reduce(found, "mean", lengths=batch.batch.count, unsafe=True))


HIDDEN = TextTask("hidden", "all", lambda model, ops, states, batch, empty: model.last(ops, states), one_each=False)
"""The last hidden states of every token."""
MEAN = TextTask("mean", "all", _mean)
"""The mean of the same over a text's tokens."""
CLS = TextTask("cls", "first", lambda model, ops, states, batch, empty: model.pooled(ops, states))
"""What the pooler makes of a text's first token; where there is none, that token's hidden state."""
MLM = TextTask(
    "mlm",
    "asked",
    lambda model, ops, states, batch, empty: model.mlm_logits(ops, states),
    one_each=False,
    head="mlm",
)
"""The logits of the tokens that may stand where `Text.asked` says."""
CLASSES = TextTask(
    "classes",
    "first",
    lambda model, ops, states, batch, empty: model.class_logits(ops, states),
    head="classes",
)
"""The logits of a text's classes."""
TOKEN_CLASSES = TextTask(
    "token classes",
    "all",
    lambda model, ops, states, batch, empty: model.token_class_logits(ops, states),
    one_each=False,
    head="token_classes",
)
"""The logits of each token's classes."""
