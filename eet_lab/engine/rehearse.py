"""The passes of a request, rehearsed on meta tensors: no GPU is needed, and nothing is computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.functional import layer_norm, rms_norm
from torch.overrides import TorchFunctionMode

from eet_lab.engine.settings import Settings
from eet_lab.engine.tasks import Task
from eet_lab.models.decoder import Decoder, mapped, tensors
from eet_lab.models.encoder import Encoder
from eet_lab.ops.types import Sampling, Span, State, Step
from eet_lab.parts import Parts
from eet_lab.parts.kv_cache import KVCache
from eet_lab.parts.prompts import decode_step, nobody
from eet_lab.parts.trace import Rehearsal, Trace

Moved = TypeVar("Moved", State, Step)
META = torch.device("meta")

TELLING = 3
"""Layers that tell what any number of the same does: a first one, a last one, and one between others."""


class RequestShape(NamedTuple):
    """A request before anything is known of its tokens: its passes, {"prefill": ..., "decode": ...}, the latter the
    longest step; the pads of each row of its cache; how many columns this has, and how many the first pass reads.
    """

    passes: dict[str, Rehearsal]
    num_pad: list[int]
    capacity: int
    extent: int


class Rehearser:
    """A model without its data, the parts that run it, and what is made of a pass."""

    def __init__(self, model: Decoder, parts: Parts, task: Task) -> None:
        self._given, self._parts, self._task = model, parts, task

    @cached_property
    def model(self) -> Decoder:
        return mapped(self._given, lambda tensor: tensor.to(META))

    def request(self, prompts: Sequence[Sequence[int]], settings: Settings) -> RequestShape:
        """What a batch of such prompts does to memory, as `Engine.generate` runs it."""
        if (schedule := self._parts.schedule) is not None:
            schedule, capacity = schedule.of_at_most(len(prompts)), max(map(len, prompts)) + settings.max_new_tokens
            B, T = schedule.max_rows, schedule.most_tokens(capacity)
            return RequestShape(
                self.joined(B, capacity, settings.sampling(B), T, capacity), [0] * B, capacity, capacity
            )
        state, first = self._parts.prompts(prompts, settings.max_new_tokens)
        passes = self.passes(state, first, settings.sampling(len(prompts)))
        return RequestShape(passes, [span.num_pad for span in first.spans], state.tokens.shape[1], first.extent)

    def joined(self, B: int, capacity: int, sampling: Sampling, T: int, extent: int) -> dict[str, Rehearsal]:
        """Of B slots: a pass over T tokens, whosever they are, in columns [0, extent); and the longest decode step."""
        token, each = torch.zeros(T, dtype=torch.long), torch.zeros(B, dtype=torch.long)
        spans = (Span(0, T, 0), *[Span(0, 0, 0)] * (B - 1))
        step = Step(token, token, token, token, each, each, each, each, spans, extent, False)
        return self.passes(nobody(B, 1, each.device), step, sampling._replace(noise=each), capacity)

    def passes(
        self, state: State, first: Step, sampling: Sampling, capacity: int | None = None
    ) -> dict[str, Rehearsal]:
        """Of a batch on the host, in a session of `capacity` columns, if that is more than it takes itself."""
        longest = (capacity or state.tokens.shape[1]) - 1  # the last column is never read
        last = decode_step(state, first.num_pad, first.spans, longest)

        def rehearsal(name: str, step: Step, repeated: bool) -> Rehearsal:
            run = partial(self._rehearse, state, step, sampling)
            key = name, step.spans, len(step.ids), step.extent, sampling[:3]
            return Rehearsal(key, partial(run, None), partial(run, self._telling), repeated)

        return {"prefill": rehearsal("prefill", first, False), "decode": rehearsal("decode", last, True)}

    def new_cache(self) -> KVCache:
        """A KV cache without data."""
        return new_cache(self.model, self._parts)

    @cached_property
    def _telling(self) -> int | None:
        """How many layers tell what all of them do; None: all, since they differ."""
        return TELLING if are_alike(self._given) else None

    @torch.inference_mode()
    def _rehearse(self, state: State, step: Step, sampling: Sampling, num_layers: int | None, trace: Trace) -> None:
        """Run one pass; what its ops ask for comes from `trace`."""
        parts, model = self._parts, self.model._replace(layers=self.model.layers[:num_layers])
        ops = parts.ops.bind_each(lambda op: partial(trace.empty, op=op))
        mask = partial(parts.mask, empty=partial(trace.empty, op="mask"))
        cache, noise = new_cache(model, parts), sampling.noise.to(META)
        cache.open([0] * len(step.spans), step.extent)
        with nullcontext() if parts.ops.kernels else NoArithmetic():  # ops over kernels know a rehearsal themselves
            on_meta = moved(step, META)
            hidden = parts.forward(model, ops, mask, list(cache), on_meta)
            token = self._task(model, ops, hidden, on_meta, sampling._replace(noise=noise))
            ops.advance(moved(state, META), token, on_meta.count)


class NoArithmetic(TorchFunctionMode):
    """On meta tensors: what writes to a tensor that it is given, gives it back as it is; the rest is torch's business.

    Nothing could be written there; but for most of these calls, torch takes a millisecond to find that out.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function.__name__
        if kwargs.get("out") is not None:
            return kwargs["out"]
        if name == "__setitem__":
            return None
        if name.endswith("_") and not name.endswith("__"):  # in place, as torch names it
            return args[0]
        if function in (layer_norm, rms_norm):
            return torch.empty_like(args[0])
        return function(*args, **kwargs)


def new_cache(model: Decoder, parts: Parts) -> KVCache:
    """The KV cache that the parts ask for, on the model's device; nothing is held until it is opened."""
    return parts.kv_cache(len(model.layers), model.config.num_kv_heads, model.config.head_dim, model.words)


def are_alike(model: Decoder | Encoder) -> bool:
    """Whether all layers have the same shapes and types."""
    return len({tuple((t.shape, t.dtype) for t in tensors(layer)) for layer in model.layers}) <= 1


def moved(tree: Moved, device: torch.device) -> Moved:
    """The same state or step on another device."""
    return mapped(tree, lambda tensor: tensor.to(device))
