"""The forward pass of training, on the device: from what a pass reads to its loss, and which parts it reads.

T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from eet_lab.engine.base import check_parts
from eet_lab.errors import RecipeError
from eet_lab.models import seq2seq
from eet_lab.models.config import Config, Seq2SeqConfig
from eet_lab.ops.noise import Dropout, token_keys
from eet_lab.ops.types import Batch, Source, autograd
from eet_lab.parts import Ops, Parts, unread
from eet_lab.parts.passes import Pass
from eet_lab.training.batch import Given
from eet_lab.training.tasks import TrainTask

UNREAD = ("ops", "weights", "kv_cache", "memory", "launch", "layers")
"""Slots that training does not read: parts that change them alone would be on and do nothing."""


def check_trained(parts: Parts, config: Config) -> None:
    """RecipeError for what are no parts, and for parts that would be on and do nothing."""
    check_parts("Trainer", parts, "all")
    if names := unread(parts, UNREAD if isinstance(config, Seq2SeqConfig) else (*UNREAD, "cross_kv")):
        raise RecipeError(
            f"These parts change {' and '.join(names)}, which training this model does not use. Leave out what changes "
            "them."
        )


def loss_of(model: Any, config: Config, parts: Parts, task: TrainTask, given: Given) -> Tensor:
    """The sum of the losses of a pass that is on the device; it can be differentiated."""
    settings, ops = given.settings, parts.train_ops

    def ops_of(batch: Batch, is_source: bool = False) -> Ops:
        """The ops of a pass, which drop what belongs to its tokens."""
        if not (settings.dropout or settings.attention_dropout):
            return ops.differentiable(None)
        numbers = given.numbers[batch.rows]
        # A source has noise of its own.
        keys = token_keys(given.noise, ~numbers if is_source else numbers, batch.positions)
        return ops.differentiable(Dropout(settings.dropout, settings.attention_dropout, keys, batch.positions))

    states = _hidden(model, config, parts, ops_of, given.read).index_select(0, given.read.asked)
    head = task.head(model, ops.differentiable(None))
    return parts.loss(states, given.labels, head, settings.label_smoothing)


def _hidden(model: Any, config: Config, parts: Parts, ops_of: Callable[..., Ops], read: Pass) -> Tensor:
    """Hidden states [T,C]; an encoder-decoder's are those of its answers."""
    made, ops = partial(parts.attend, empty=autograd, window=config.spec.window), ops_of(read.batch)
    if read.source is None:
        return model.hidden(ops, made(ops, read.batch, None), read)
    of_source = ops_of(read.source, is_source=True)
    looks = made(of_source, read.source, None)
    encoded = seq2seq.encode(model, of_source, looks, read.source, parts.cross_kv)
    attend = made(ops, read.batch, None, source=Source(read.source, tuple(encoded)))
    return seq2seq.forward(model, ops, attend, read.batch)
