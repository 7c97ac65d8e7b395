"""Seq2SeqEngine: sources in, answers out. An encoder reads the sources first, and the decoder's slots look at them.

B sources, S tokens of all of them with pads, L layers, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from eet_lab.engine.base import FOR_OTHERS, check_model, check_parts
from eet_lab.engine.clock import RequestClock
from eet_lab.engine.engine import Engine
from eet_lab.engine.exclusive import exclusive
from eet_lab.engine.generation import Generation, StepEvent
from eet_lab.engine.meta_trace import META, MetaTracer, NoArithmetic, RequestShape
from eet_lab.engine.settings import (
    Settings,
    checked_each,
    checked_forced,
    checked_texts,
    of_all,
    one_each,
)
from eet_lab.engine.tasks import Task, next_tokens
from eet_lab.engine.token_buffer import RequestSettings
from eet_lab.errors import PromptError, RecipeError
from eet_lab.models.config import Seq2SeqConfig
from eet_lab.models.decoder import Decoder, mapped
from eet_lab.models.seq2seq import Seq2Seq, encode, forward
from eet_lab.ops.oom import OTHERS
from eet_lab.ops.types import Batch, Linear, Sampling, Source
from eet_lab.parts import Ops, Parts, unread
from eet_lab.parts.batches import left_padded
from eet_lab.parts.passes import Batching, Group, Text
from eet_lab.parts.staging import Staging, sent
from eet_lab.parts.trace import Trace, TracedPass, bounding
from eet_lab.progress import Cancel
from eet_lab.words import counted

REMEDY = f"Use fewer or shorter sources at a time, fewer new tokens, a smaller model, or half precision. {OTHERS}"
ALONE = "An encoder-decoder answers batches that begin together, with `generate`. Use a decoder for this."


class SourceTracer(MetaTracer):
    """The passes of a request whose sources are known: those of the encoder, and those of the decoder over them."""

    def request(
        self, lengths: Sequence[int], settings: Settings | Sequence[Settings], capacity: int | None = None
    ) -> RequestShape:
        shape = super().request(lengths, settings, capacity)
        return shape._replace(passes={"encode": bounding([*map(self._encode_pass, self.groups)]), **shape.passes})

    def read(self, groups: Sequence[Group]) -> Batch:
        """Get to know which sources the next request has; where their tokens will be."""
        self.groups = groups
        rows = {n: text.ids for group in groups for n, text in zip(group.numbers, group.texts, strict=True)}
        self.layout = left_padded([rows[number] for number in range(len(rows))])
        return self.layout

    def _key(self) -> tuple:
        return self.layout.keys.spans or ()

    def _hidden(self, model: Any, ops: Ops, attend: Callable, batch: Batch) -> Tensor:
        there = mapped(self.layout, lambda tensor: tensor.to(META))
        return forward(model, ops, attend(batch, source=Source(there, _store(model, there))), batch)

    def _encode_pass(self, group: Group) -> TracedPass:
        key = "encode", group.computed_tokens, tuple(len(text.ids) for text in group.texts), group.packed
        return TracedPass(key, partial(self._trace_encode, group))

    @torch.inference_mode()
    def _trace_encode(self, group: Group, trace: Trace) -> None:
        ops = self._parts.ops.bind_each(lambda op: partial(trace.empty, op=op))
        with nullcontext() if self._parts.ops.kernels else NoArithmetic():
            there = mapped(group.laid_out().batch, lambda tensor: tensor.to(META))
            attend = self._parts.attend(ops, there, None, empty=partial(trace.empty, op="mask"))
            for _ in encode(cast(Any, self.model), ops, attend, there):
                pass

    def _outlined(self, num_layers: int | None) -> Any:
        model: Any = self.model
        return model._replace(decoder=model.decoder._replace(layers=model.layers[:num_layers]))


class Seq2SeqEngine(Engine):
    """An encoder-decoder run by parts: `generate` answers each source, greedily or by draws.

    Sources are read as an encoder's texts are, in passes that `Parts.texts` lays out; the keys and values of cross
    attention are computed once, and kept for all steps. What a checkpoint says of its first and last token, and of
    tokens that it never generates, is done. Errors: RecipeError for parts that are for decoders alone.
    """

    network: ClassVar[type] = Seq2Seq
    model: Any  # a Seq2Seq
    tracer: Any  # a SourceTracer

    def __init__(self, model: Seq2Seq, parts: Parts | None = None) -> None:
        check_parts("Seq2SeqEngine", parts, "all")
        parts = parts or Parts()
        _check_read(parts)
        check_model("Seq2SeqEngine", model, (Seq2Seq,), "folder of a T5")
        super().__init__(cast(Any, model), parts, _allowed(model))
        self._layout = Staging(self.model.device)
        self._source: Source | None = None

    @property
    def config(self) -> Seq2SeqConfig:
        """The model's, under its own type."""
        return self.model.config

    @exclusive
    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Settings | Sequence[Settings] | None = None,
        *,
        on_step: Callable[[StepEvent], None] | None = None,
        cancel: Cancel | None = None,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> Generation:
        """Answer every source (token ids, ragged), and return the tokens with their timing, as `Engine.generate` does.

        The first pass takes the encoder's with it. The token with which the decoder starts is not returned. A last
        token that the checkpoint forces has the log-probability 0. Errors: PromptError before any work; OutOfMemory.
        """
        clock, settings = RequestClock(), checked_each(settings)
        sources = checked_texts(prompts, self.model.config)
        each = one_each(settings, len(sources))
        self._check_lengths(len(sources), each)
        if forced is not None:
            forced = checked_forced(forced, each, self.model.config)
        clock.once(lambda: self.prepare(cancel=cancel))
        starts = [[self.config.start_id]] * len(sources)
        with self._closed_on_error(lambda: starts, of_all([1] * len(sources), each, self.config.context)):
            self._source = None  # those of the last batch go first
            self.tracer.read([*self.parts.texts([Text(row) for row in sources], Batching())])
            return self._generate(starts, each, on_step or (lambda event: None), cancel, forced, clock)

    def _check_lengths(self, num_sources: int, each: Sequence[Settings]) -> None:
        """PromptError for settings that do not fit the sources, or pass the context."""
        if not num_sources:
            raise PromptError("There are no texts to answer; give at least one.")
        if len(each) != num_sources:
            raise PromptError(
                f"settings has {len(each)} Settings for {counted(num_sources, 'text')}; give each text its own, or one "
                "Settings for all."
            )
        most, room = max(settings.max_new_tokens for settings in each), self.config.context - 1
        if most > room:
            raise PromptError(
                f"max_new_tokens is {most:,}, but the decoder has room for {room:,} after its start token. Ask for "
                "fewer."
            )

    def _read_sources(self) -> Source:
        """Run the encoder, and keep what the decoder will look at."""
        layout, staging = self.tracer.layout, Staging(self.model.device)  # the decoder's first pass is staged already
        assert layout.spans is not None
        self._allocating = "the keys and values of sources"
        batch = sent(layout, self._layout)
        store = _store(self.model, batch)
        for group in self.tracer.groups:
            read = sent(group.laid_out(), staging)
            spans = zip(read.batch.spans or (), (layout.spans[number] for number in group.numbers), strict=True)
            here, there = (
                torch.cat([torch.arange(first, first + count) for first, count in side]).to(self.model.device)
                for side in zip(*spans, strict=True)
            )
            self.memory.enter("encode")
            attend = self.attend(read.batch, None)
            for kept, made in zip(store, encode(self.model, self.ops, attend, read.batch), strict=True):
                for part, new in zip(kept, made, strict=True):
                    part.index_copy_(0, there, new[here])
        return Source(batch, store)

    def _hidden(self, batch: Batch) -> Tensor:
        if self._source is None:
            self._source = self._read_sources()
            self.memory.enter("prefill")
        return forward(self.model, self.ops, self.attend(batch, self.cache, source=self._source), batch)

    def _asked(self, settings: Settings, row: int, known: Sequence[int]) -> RequestSettings:
        asked, config = super()._asked(settings, row, known), self.config
        if known:
            return asked
        first = () if config.forced_bos_id is None else (config.forced_bos_id,)
        return asked._replace(forced=first, last=config.forced_eos_id)

    def _remedy(self, rows: list[list[int]], settings: Settings) -> str:
        return REMEDY

    def _tracer(self) -> MetaTracer:
        return SourceTracer(self.model, self.parts, self.task)

    @property
    def kv_bytes(self) -> int:
        """Bytes held for keys and values, those of sources among them."""
        source = self._source.layers if self._source else ()
        return super().kv_bytes + sum(part.nbytes for kv in source for part in kv)

    def add(self, *args: Any, **keywords: Any) -> Any:
        """RecipeError: requests do not join."""
        raise RecipeError(ALONE)

    def reserve(self, *args: Any, **keywords: Any) -> None:
        """RecipeError: memory is held for the sources of a batch."""
        raise RecipeError(ALONE)

    def lifetimes(self, *args: Any, **keywords: Any) -> Any:
        """RecipeError: a run's plans are in `plans`."""
        raise RecipeError("An encoder-decoder's passes are known once it has run: see `plans` after `generate`.")

    def forecast(self, *args: Any, **keywords: Any) -> Any:
        """RecipeError: nothing is forecast yet."""
        raise RecipeError("The memory of an encoder-decoder is not forecast: run `generate`, and see `plans`.")

    def _free(self) -> None:
        super()._free()
        self._layout.close()
        self._source = None


def engine_of(network: Decoder | Seq2Seq, parts: Parts | None = None) -> Engine:
    """The engine that generates with such a model."""
    return Seq2SeqEngine(network, parts) if isinstance(network, Seq2Seq) else Engine(network, parts)


def _store(model: Any, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Each layer's keys and values [S,G,D] of sources. Zeros, since a mask multiplies what it hides by 0."""
    config, num_tokens = model.config, len(batch.ids)
    shape = len(model.layers), 2, num_tokens, config.num_kv_heads, config.head_dim
    slab = model.token_embedding.new_zeros(shape)
    return [(keys, values) for keys, values in slab]


def _allowed(model: Seq2Seq) -> Task:
    """The task that tells next tokens, but none that the checkpoint suppresses."""
    ids, (weight, bias, *_) = model.config.suppressed, model.head
    if not ids:
        return next_tokens
    bias = weight.new_zeros(len(weight)) if bias is None else bias.clone()
    head = Linear(weight, bias.index_fill_(0, torch.tensor(ids, device=bias.device), -torch.inf))

    def task(model: Any, ops: Ops, hidden: Tensor, batch: Batch, sampling: Sampling) -> Tensor:
        # A meta trace has a model of its own, whose head asks for the same memory.
        return next_tokens(model if hidden.is_meta else model._replace(head=head), ops, hidden, batch, sampling)

    return task


def _check_read(parts: Parts) -> None:
    """RecipeError for parts that would be on and do nothing, or serve other workloads."""
    names = (
        unread(parts, FOR_OTHERS)
        + ["schedule"] * (parts.schedule.max_rows is not None)
        + ["launch"] * parts.is_captured
    )
    if names:
        raise RecipeError(
            f"These parts change {' and '.join(names)}, which is for decoders. Leave out what changes them: an "
            "encoder-decoder answers batches that begin together, step by step."
        )
