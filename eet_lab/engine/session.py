"""A batch in flight: its canvas, its KV cache, and how its steps are launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import pad

from eet_lab.engine.prompts import decode_spans, decode_step
from eet_lab.ops import native
from eet_lab.ops.types import Sampling, State, Step

if TYPE_CHECKING:
    from eet_lab.engine.engine import Engine


MOST_SESSIONS = 16
"""Numbers of rows whose captured steps a reservation keeps."""


class Session:
    """Prefill and decode for batches of as many rows, and of at most `capacity` columns.

    The tensors keep their addresses from batch to batch (`restart`), so what was captured stays valid. States, steps
    and seeds come from the host.
    """

    def __init__(self, engine: Engine, key: tuple, state: State, first: Step, sampling: Sampling) -> None:
        self.key, self.capacity = key, key[1]
        self._engine = engine
        self.state, num_pad, seed = self._begin(state, first, sampling)
        self._sampling = sampling._replace(seed=seed)
        self._next = decode_step(self.state, num_pad, first.spans, self.capacity)
        self.layers = list(engine.cache)
        self.launch = self._new_launch()

    def restart(self, state: State, first: Step, sampling: Sampling) -> None:
        """Begin another batch in the same memory."""
        engine, spans = self._engine, decode_spans(first.spans)
        self._begin(state, first, sampling)
        moved, other_pads = engine.cache.generation != self._generation, spans != self._next.spans
        if moved or (other_pads and not engine.parts.serve_any_pads):
            self.launch = self._new_launch()  # what was captured is void
        self._next = self._next._replace(spans=spans)

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

    def _begin(self, state: State, first: Step, sampling: Sampling) -> tuple[State, Tensor, Tensor]:
        """Send a batch to the device: its state, pads and seed, at the same addresses each time."""
        engine = self._engine
        engine.cache.open([span.num_pad for span in first.spans], self.capacity)
        tensors = [part for part in first if isinstance(part, Tensor)]
        arrived: list[Any] = engine.inbox.receive(tensors)
        self._first = Step(*arrived, *first[len(tensors) :])  # tensors come first
        columns = pad(state.tokens.t(), (0, 0, 0, self.capacity - state.tokens.shape[1]))  # those to come stay unseen
        tokens, *others, num_pad, seed = engine.canvas.receive([columns, *state[1:], first.num_pad, sampling.seed])
        return State(tokens.t(), *others), num_pad, seed

    def _new_launch(self) -> Any:
        self._generation = self._engine.cache.generation
        return self._engine.parts.launch(self._decode, self.capacity - 1)  # the last column is never read

    def _decode(self, extent: int, exact: bool = True) -> None:
        self._run("decode", self._next._replace(extent=extent, exact=exact))

    def _run(self, name: str, step: Step) -> None:
        engine = self._engine
        engine.memory.enter(name)
        token = engine.parts.forward(engine.model, engine.ops, engine.mask, self.layers, step, self._sampling)
        engine.ops.advance(self.state, token)


def session_key(engine: Engine, num_rows: int, capacity: int, sampling: Sampling) -> tuple:
    """Equal for batches that can share a session, and what it has captured."""
    return num_rows, capacity, sampling[:3], libraries(engine.parts.ops.kernels)


def libraries(kernels: Sequence[str]) -> tuple:
    """What is loaded for these sources; something else once one was edited."""
    return tuple(native.loaded(name).path for name in kernels)
