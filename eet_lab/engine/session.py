"""A batch in flight: its canvas, its KV cache, and how its steps are launched."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from eet_lab.engine.prompts import decode_step
from eet_lab.engine.trace import Rehearsal
from eet_lab.models.decoder import mapped
from eet_lab.ops import native
from eet_lab.ops.types import Sampling, State, Step

if TYPE_CHECKING:
    from eet_lab.engine.engine import Engine


Moved = TypeVar("Moved", State, Step)


class Session:
    """Prefill and decode for batches of one shape.

    The tensors keep their addresses from batch to batch (`restart`), so what was captured stays valid.
    """

    def __init__(self, engine: Engine, key: tuple, state: State, first: Step, sampling: Sampling) -> None:
        self.key = key
        self._engine, self._sampling, self.state, self._first = engine, sampling, state, first
        self.capacity = state.tokens.shape[1]
        engine.cache.open([span.num_pad for span in first.spans], self.capacity)
        self.layers = list(engine.cache)
        self._next = decode_step(state, first.num_pad, first.spans, self.capacity)
        self.launch = engine.parts.launch(self._decode, self.capacity)

    def restart(self, state: State, first: Step, sampling: Sampling) -> None:
        """Begin another batch of the same shape in the same memory."""
        for old, new in zip(self.state, state, strict=True):
            old.copy_(new)
        self._sampling.seed.copy_(sampling.seed)
        self._first = first
        self._engine.cache.open([span.num_pad for span in first.spans], self.capacity)

    def prefill(self) -> None:
        """Read the first columns and write each row's next token."""
        self._engine.cache.reach(self._first.extent)
        self._run("prefill", self._first)

    def decode(self, extent: int) -> None:
        """One step, in which columns [0, extent) exist."""
        self._engine.cache.reach(extent)
        self.launch(extent)

    def close(self) -> None:
        """Let go of graphs now: they and the session refer to each other, so nothing else would free them."""
        self.layers, self.launch = [], None

    def _decode(self, extent: int, exact: bool = True) -> None:
        self._run("decode", self._next._replace(extent=extent, exact=exact))

    def _run(self, name: str, step: Step) -> None:
        engine = self._engine
        engine.memory.enter(name)
        token = engine.parts.forward(engine.model, engine.ops, engine.mask, self.layers, step, self._sampling)
        engine.ops.advance(self.state, token)


def session_key(engine: Engine, state: State, first: Step, sampling: Sampling) -> tuple:
    """Equal for batches that can share a session, and what it has captured."""
    pads = tuple(span.num_pad for span in first.spans)
    libraries = tuple(native.loaded(name).path for name in engine.parts.ops.kernels)  # others once a source is edited
    return tuple(state.tokens.shape), pads, sampling[:3], libraries


def rehearsals(engine: Engine, state: State, first: Step, sampling: Sampling) -> dict[str, Rehearsal]:
    """The passes of a run, ready to run on meta tensors: prefill, and decode at its longest."""
    num_rows, capacity = state.tokens.shape
    last = decode_step(state, first.num_pad, first.spans, capacity)

    def rehearse(step: Step) -> None:
        model = engine.meta_model
        cache = engine.new_cache(num_rows, step.extent, model.words)
        meta_sampling = sampling._replace(seed=sampling.seed.to("meta"))
        with torch.inference_mode():
            engine.parts.forward(
                model, engine.ops, engine.mask, cache, moved(step, torch.device("meta")), meta_sampling
            )

    def rehearsal(name: str, step: Step) -> Rehearsal:
        return Rehearsal((name, step.spans, len(step.ids), step.extent, sampling[:3]), partial(rehearse, step))

    return {"prefill": rehearsal("prefill", first), "decode": rehearsal("decode", last)}


def moved(tree: Moved, device: torch.device) -> Moved:
    """The same state or step on another device."""
    return mapped(tree, lambda tensor: tensor.to(device))
