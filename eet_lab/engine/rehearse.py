"""The passes of a request, ready to run on meta tensors."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.functional import layer_norm, rms_norm
from torch.overrides import TorchFunctionMode

from eet_lab.engine.prompts import decode_step
from eet_lab.engine.trace import Rehearsal, Trace
from eet_lab.models.decoder import Decoder, mapped, tensors
from eet_lab.ops.types import Sampling, State, Step

if TYPE_CHECKING:
    from eet_lab.engine.engine import Engine

Moved = TypeVar("Moved", State, Step)

TELLING = 3
"""Layers that tell what any number of the same does: a first one, a last one, and one between others."""


def rehearsals(
    engine: Engine, state: State, first: Step, sampling: Sampling, capacity: int | None = None
) -> dict[str, Rehearsal]:
    """Of a batch on the host: its prefill, and its longest decode step in a session of `capacity` columns."""
    capacity = capacity or state.tokens.shape[1]
    last = decode_step(state, first.num_pad, first.spans, capacity - 1)  # the last column is never read

    def rehearsal(name: str, step: Step, repeated: bool) -> Rehearsal:
        def run(layers: slice, trace: Trace) -> None:
            model = engine.meta_model._replace(layers=engine.meta_model.layers[layers])
            rehearse(engine, model, trace, state, step, sampling)

        key = name, step.spans, len(step.ids), step.extent, sampling[:3]
        telling = slice(TELLING if engine.layers_are_alike else None)
        return Rehearsal(key, partial(run, slice(None)), partial(run, telling), repeated)

    return {"prefill": rehearsal("prefill", first, False), "decode": rehearsal("decode", last, True)}


@torch.inference_mode()
def rehearse(engine: Engine, model: Decoder, trace: Trace, state: State, step: Step, sampling: Sampling) -> None:
    """Run one pass of a model on meta tensors; what its ops ask for comes from `trace`."""
    parts, meta = engine.parts, torch.device("meta")
    ops = parts.ops.bind_each(lambda op: partial(trace.empty, op=op))
    mask = partial(parts.mask, empty=partial(trace.empty, op="mask"))
    layers = engine.new_cache(len(step.spans), step.extent, model.words)[: len(model.layers)]
    seed = sampling.seed.to(meta)
    with nullcontext() if parts.ops.kernels else NoArithmetic():  # ops over kernels know a rehearsal themselves
        token = parts.forward(model, ops, mask, layers, moved(step, meta), sampling._replace(seed=seed))
        ops.advance(moved(state, meta), token)


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


def are_alike(model: Decoder) -> bool:
    """Whether all layers have the same shapes and types."""
    return len({tuple((t.shape, t.dtype) for t in tensors(layer)) for layer in model.layers}) <= 1


def moved(tree: Moved, device: torch.device) -> Moved:
    """The same state or step on another device."""
    return mapped(tree, lambda tensor: tensor.to(device))
