"""A batch in flight: its canvas, its KV cache, and how its passes are launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import pad

from eet_lab.ops import native, pads
from eet_lab.ops.types import Sampling, Span, State, Step
from eet_lab.parts.prompts import decode_spans, decode_step

if TYPE_CHECKING:
    from eet_lab.engine.engine import Engine


MOST_SESSIONS = 16
"""Numbers of rows whose captured steps a reservation keeps."""


class Runner:
    """Runs the passes of a batch, at addresses that stay: so what was captured stays valid."""

    def __init__(
        self, engine: Engine, state: State, num_pad: Tensor, sampling: Sampling, spans: Sequence[Span], capacity: int
    ) -> None:
        """For at most `capacity` columns. All tensors are on the device; `spans` are those of a first pass."""
        self._engine, self.capacity = engine, capacity
        self.state, self._sampling = state, sampling
        self._next = decode_step(state, num_pad, spans, capacity)
        self.layers = list(engine.cache)
        self.launch = self._new_launch()

    def close(self) -> None:
        """Let go of graphs now: they and the session refer to each other, so nothing else would free them."""
        self.layers, self.launch = [], None

    def _new_launch(self) -> Any:
        self._generation = self._engine.cache.generation
        return self._engine.parts.launch(self._decode, self.capacity - 1)  # the last column is never read

    def _decode(self, extent: int, exact: bool = True) -> None:
        self._run("decode", self._next._replace(extent=extent, exact=exact))

    def _run(self, name: str, step: Step) -> None:
        engine = self._engine
        engine.memory.enter(name)
        hidden = engine.parts.forward(engine.model, engine.ops, engine.mask, self.layers, step)
        token = engine.task(engine.model, engine.ops, hidden, step, self._sampling)
        engine.ops.advance(self.state, token, step.count)


class Session(Runner):
    """Prefill and decode for batches of as many rows, which begin together, and of at most `capacity` columns.

    States, steps and noise keys come from the host.
    """

    def __init__(self, engine: Engine, key: tuple, state: State, first: Step, sampling: Sampling) -> None:
        self._engine, self.key, self.capacity = engine, key, key[1]
        on_device, num_pad, noise = self._begin(state, first, sampling)
        super().__init__(engine, on_device, num_pad, sampling._replace(noise=noise), first.spans, self.capacity)

    def restart(self, state: State, first: Step, sampling: Sampling) -> None:
        """Begin another batch in the same memory."""
        engine, spans = self._engine, decode_spans(first.spans)
        self._begin(state, first, sampling)
        moved, other_pads = engine.cache.generation != self._generation, spans != self._next.spans
        serves_others = engine.parts.serve_any_pads and pads.declared(engine.task)
        if moved or (other_pads and not serves_others):
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

    def _begin(self, state: State, first: Step, sampling: Sampling) -> tuple[State, Tensor, Tensor]:
        """Send a batch to the device: its state, pads and noise keys, at the same addresses each time."""
        engine = self._engine
        num_pads = [span.num_pad for span in first.spans]
        engine.cache.check_room(num_pads, self.capacity)
        engine.cache.open(num_pads, self.capacity)
        tensors = [part for part in first if isinstance(part, Tensor)]
        arrived: list[Any] = engine.inbox.receive(tensors)
        self._first = Step(*arrived, *first[len(tensors) :])  # tensors come first
        columns = pad(state.tokens.t(), (0, 0, 0, self.capacity - state.tokens.shape[1]))  # those to come stay unseen
        tokens, *others, num_pad, noise = engine.canvas.receive([columns, *state[1:], first.num_pad, sampling.noise])
        return State(tokens.t(), *others), num_pad, noise


def session_key(engine: Engine, num_rows: int, capacity: int, sampling: Sampling) -> tuple:
    """Equal for batches that can share a session, and what it has captured."""
    return num_rows, capacity, sampling[:3], libraries(engine.parts.ops.kernels)


def libraries(kernels: Sequence[str]) -> tuple:
    """What is loaded for these sources; something else once one was edited."""
    return tuple(native.loaded(name).path for name in kernels)
