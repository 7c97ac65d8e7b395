"""Parts: what an engine is built from, each with its plain PyTorch default. `Parts()` is the baseline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from inspect import isfunction, signature
from typing import Any

import torch

from eet_lab.models import decoder, seq2seq
from eet_lab.models.config import Config
from eet_lab.ops import fits, pieces, reference
from eet_lab.ops.noise import Dropout
from eet_lab.ops.residuals import Residuals, passes_on
from eet_lab.ops.types import Empty, autograd
from eet_lab.parts import attend, kv_cache, launch, losses, memory, optimizers, passes, steps
from eet_lab.parts import protocols as p
from eet_lab.scheduling import TOKEN_BY_TOKEN, Schedule

DROPPING = (
    "embed",
    "embed_norm",
    "linear_residual",
    "linear_residual_norm",
    "masked_attention",
    "attention",
    "cross_attention",
)
"""The ops in which a training pass may drop numbers."""


@dataclass(frozen=True)
class Ops:
    """What a model calls, cut where fusion can happen. Each op takes `empty`, its only source of memory."""

    embed: p.Embed = reference.embed
    norm_linear: p.NormLinear = reference.norm_linear
    linear_residual: p.LinearResidual = reference.linear_residual
    fused_layer: p.FusedLayer = reference.fused_layer
    masked_attention: p.Attention = reference.masked_attention
    attention: p.Attention = reference.attention
    next_token: p.NextToken = reference.next_token
    advance: p.Advance = reference.advance
    embed_norm: p.EmbedNorm = reference.embed_norm
    linear_residual_norm: p.LinearResidualNorm = reference.linear_residual_norm
    cross_attention: p.CrossAttention = reference.cross_attention

    def bind(self, empty: Empty) -> Ops:
        """The same ops with `empty` filled in."""
        return self.bind_each(lambda name: empty)

    def bind_each(self, empty_of: Callable[[str], Empty]) -> Ops:
        """The same ops, each with an `empty` of its own; `empty_of` is told the op's name."""
        return self.wrapped(lambda name, op: partial(op, empty=empty_of(name)))

    def wrapped(self, around: Callable[[str, Callable], Callable]) -> Ops:
        """What `around` makes of each op, by its name."""
        return Ops(**{f.name: around(f.name, getattr(self, f.name)) for f in fields(self)})

    def differentiable(self, drop: Dropout | None) -> Ops:
        """The same ops for a training pass: PyTorch chooses memory and differentiates, and some numbers are dropped. A
        norm that can add the residual's gradient to its own does so.
        """
        bound = self.bind(autograd)
        if drop is not None:
            bound = replace(bound, **{name: partial(getattr(bound, name), drop=drop) for name in DROPPING})
        norm = passes_on(pieces.composed(self.norm_linear)[1].get("norm"))
        if norm is None:
            return bound
        residuals = Residuals(norm)
        return replace(
            bound,
            norm_linear=partial(bound.norm_linear, norm=residuals.norm),
            linear_residual=partial(residuals.linear_residual, linear_residual=bound.linear_residual),
        )

    def unfit(self, config: Config) -> str | None:
        """Why some of these ops do not take such a model, or None."""
        return fits.told(fits.unfit(getattr(self, f.name), config) for f in fields(self))

    def untrainable(self, dtype: torch.dtype) -> str | None:
        """Why some of these ops do not train weights of such a type, or None."""
        return fits.told(fits.untrainable(getattr(self, f.name), dtype) for f in fields(self))

    @cached_property
    def kernels(self) -> tuple[str, ...]:
        """The CUDA sources that these ops need built, in order and without repetition."""
        needed = (name for f in fields(self) for name in pieces.kernels(getattr(self, f.name)))
        return tuple(dict.fromkeys(needed))


@dataclass(frozen=True)
class Parts:
    """One field per decision; a technique replaces fields, engines read them. `protocols` says what each has to do."""

    ops: Ops = field(default_factory=Ops)
    weights: tuple[p.ChangesWeights, ...] = ()  # applied in order
    schedule: Schedule = TOKEN_BY_TOKEN  # which requests share a pass, and how much of their prompts it reads
    texts: p.LaysOutTexts = passes.text_by_text
    attend: p.MakesAttend = attend.DenseMask
    kv_cache: p.MakesCache = kv_cache.GrowingKV
    memory: p.MakesMemory = memory.FreshMemory
    launch: p.Launches = launch.eager
    layers: decoder.Layers = decoder.op_by_op
    cross_kv: seq2seq.CrossKV = seq2seq.layer_by_layer  # of training: what a decoder's layers look at
    train_ops: Ops = field(default_factory=Ops)  # the same names, each of which can be differentiated
    loss: p.TakesLoss = losses.whole
    optimizer: p.MakesOptimizer = optimizers.tensor_by_tensor
    step_launch: p.LaunchesSteps = steps.Eager  # of training

    def ops_of(self, stage: str) -> Ops:
        """The ops that a model calls in what it is run for: one of `Config.stage`."""
        return self.train_ops if stage == "train" else self.ops

    @property
    def is_captured(self) -> bool:
        """Whether a decode step is captured, and replayed for other rows: its ops then see no numbers of the host."""
        return getattr(self.launch, "is_captured", False)

    @property
    def captures_passes(self) -> p.CapturesPasses | None:
        """The launch part, where it captures passes that are no decode steps."""
        return self.launch if self.is_captured and isinstance(self.launch, p.CapturesPasses) else None

    @property
    def has_rows_on_device(self) -> bool:
        """Whether attention reads on the device where the rows of a pass are."""
        return fits.has_rows_on_device(getattr(self.ops, getattr(self.attend, "op", ""), None))

    @property
    def captures_prompts(self) -> p.CapturesPasses | None:
        """The launch part, where it captures passes that read prompts, too: attention reads rows on the device."""
        return self.captures_passes if self.has_rows_on_device else None

    @property
    def num_warm_ups(self) -> int:
        """Runs before one that counts: a pass that is captured runs as it is at first, and is captured next."""
        return 1 + self.is_captured


def replaced(before: Any, after: Any, prefix: str = "") -> Iterator[str]:
    """The names of the leaf slots in which two `Parts` differ, e.g. "memory", "ops.attention"; of an op that has other
    pieces than before, theirs: "train_ops.norm_linear.norm".

    Passes appended to `weights` stack, so they replace nothing.
    """
    for f in fields(before):
        old, new, slot = getattr(before, f.name), getattr(after, f.name), f"{prefix}{f.name}"
        if is_dataclass(old) and isinstance(old, Ops):
            yield from replaced(old, new, f"{slot}.")
        elif f.name == "weights" and new[: len(old)] == old:
            continue
        elif old != new:
            (op, bound), (other, others) = pieces.composed(old), pieces.composed(new)
            changed = [name for name in {**bound, **others} if bound.get(name) != others.get(name)]
            yield from (f"{slot}.{name}" for name in changed) if op == other else (slot,)


def unread(parts: Parts, slots: Collection[str]) -> list[str]:
    """Those of the `slots` that an engine does not read which are not plain: they would be on and do nothing."""
    plain = Parts()
    return [name for name in slots if getattr(parts, name) != getattr(plain, name)]


def misfit(parts: Parts) -> str | None:
    """Which slot holds what cannot be there, and what must, in words; None where all fit."""
    for name in ("ops", "train_ops"):
        if not isinstance(found := getattr(parts, name), Ops):
            return f"{name} is {found!r:.60}, but it must be Ops"
    if not isinstance(parts.weights, tuple):
        return f"weights is {parts.weights!r:.60}, but it must be a tuple of functions"
    slots = {
        f"{name}.{f.name}": getattr(getattr(parts, name), f.name) for name in ("ops", "train_ops") for f in fields(Ops)
    }
    if not isinstance(parts.schedule, Schedule):
        return f"schedule is {parts.schedule!r:.60}, but it must be a Schedule"
    others = ("ops", "train_ops", "weights", "schedule")
    slots |= {f.name: getattr(parts, f.name) for f in fields(Parts) if f.name not in others}
    slots |= {f"weights[{i}]": change for i, change in enumerate(parts.weights)}
    wrong = next(((name, value) for name, value in slots.items() if not callable(value)), None)
    if wrong:
        return f"{wrong[0]} is {wrong[1]!r:.60}, but it must be a function"
    try:
        if isfunction(parts.launch):
            signature(parts.launch).bind(None, 0, None)
    except TypeError as error:
        return f"launch cannot be called as launch(decode, longest, pool): {error}"
    return None
