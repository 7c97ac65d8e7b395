"""What each slot of `Parts` has to do. A function or an object with such a `__call__` fits.

T tokens, B rows, C channels, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Concatenate, Protocol, runtime_checkable

import torch
from torch import Tensor

from eet_lab.models.decoder import Decoder
from eet_lab.ops.types import KV, Attend, Batch, Empty, Extras, Layer, Linear, Norm, Sampling, Source, Spec, TokenBuffer
from eet_lab.parts.buffers import Buffered
from eet_lab.parts.kv_cache import KVCache
from eet_lab.parts.launch import GraphPool
from eet_lab.parts.losses import Head
from eet_lab.parts.memory import FreshMemory
from eet_lab.parts.passes import Batching, Group, Readable

# Of each op in `ops.reference`: what a model gives it, in order, and gets. What else it takes is left open, for
# `Ops.bind` fills in `empty`, and some ops have options.
Embed = Callable[Concatenate[Tensor, Tensor, Tensor, Tensor | None, ...], Tensor]
EmbedNorm = Callable[Concatenate[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Norm, ...], Tensor]
NormLinear = Callable[Concatenate[Tensor, Norm | None, Linear, ...], Tensor]
LinearResidual = Callable[Concatenate[Tensor, Linear, Tensor, ...], Tensor]
LinearResidualNorm = Callable[Concatenate[Tensor, Linear, Tensor, Norm, ...], Tensor]
FusedLayer = Callable[Concatenate[Tensor, Tensor, Layer, Layer | None, str, ...], tuple[Tensor, Tensor | None]]
Attention = Callable[Concatenate[Tensor, KV | None, Batch, Spec, Extras, ...], Tensor]
CrossAttention = Callable[Concatenate[Tensor, KV, Batch, Batch, Spec, ...], Tensor]
NextToken = Callable[Concatenate[Tensor, Batch, Norm, Linear, Sampling, ...], Tensor]
Advance = Callable[Concatenate[TokenBuffer, Tensor, Tensor, ...], None]


class ChangesWeights(Protocol):
    """A pass over weights."""

    def __call__(self, model: Decoder, /) -> Decoder:
        """The model with other weights."""


@runtime_checkable
class KeepsWeights(ChangesWeights, Protocol):
    """One that keeps what it made of a model, for the next engine of that model."""

    def held(self, model: Decoder, /) -> list[Tensor]:
        """What is kept of this model already."""


class LaysOutTexts(Protocol):
    """Which texts an encoder reads in one pass, and where their tokens sit."""

    def __call__(self, texts: Sequence[Readable], batching: Batching, /) -> Iterator[Group]:
        """Groups that together hold each text once."""


class MakesAttend(Protocol):
    """How attention knows what a query may see."""

    def __call__(
        self,
        ops: Any,
        batch: Batch,
        cache: KVCache | None,
        /,
        *,
        empty: Empty,
        window: int | None = None,
        source: Source | None = None,
    ) -> Attend:
        """The attention of one pass; without a cache its tokens see each other. `window` is that of all layers, and
        `source` what layers with cross attention look at.
        """


class MakesCache(Protocol):
    """How keys and values are kept."""

    def __call__(self, num_layers: int, num_heads: int, head_dim: int, like: Tensor, /) -> KVCache:
        """A cache that holds nothing yet; `like` tells the device and the dtype."""


class MakesMemory(Protocol):
    """Where activations lie."""

    def __call__(self) -> FreshMemory:
        """A source of memory for one engine."""


class TakesLoss(Protocol):
    """What training minimizes."""

    def __call__(self, states: Tensor, labels: Tensor, head: Head, smoothing: float = 0.0, /) -> Tensor:
        """The sum of the losses of hidden states [N,C], with labels [N]; it can be differentiated.

        One that takes the cross entropy of logits has it by the keyword `cross_entropy`.
        """


class MakesOptimizer(Protocol):
    """What updates weights by their gradients."""

    def __call__(self, params: Any, name: str, /, *, seed: int, **settings: Any) -> Buffered:
        """The optimizer of that name, of groups of parameters, each with its own `weight_decay`."""


class LaunchedWork(Protocol):
    """Work that is launched for whatever it is given."""

    @property
    def is_captured(self) -> bool:
        """Whether it is launched as one thing."""

    def __call__(self, given: Any, /) -> Tensor:
        """The work's result. What is `given` is a tree of named tuples, with tensors on the host or the device."""

    def kind(self, given: Any, /) -> Hashable:
        """The same for what is launched in the same way."""

    def close(self) -> None:
        """Give back what was made for launches."""


class LaunchesSteps(Protocol):
    """How passes of training and updates are launched."""

    def __call__(self, work: Callable[[Any], Tensor], device: torch.device, /) -> LaunchedWork:
        """Work as something to call. It is called with the same tree on the device, and changes nothing but tensors."""


class Launches(Protocol):
    """How a decode step is launched. A part may declare `is_captured`: the host then launches a step as one thing."""

    def __call__(self, decode: Callable[[int], None], longest: int, pool: GraphPool, /) -> Callable[[int], None]:
        """A function of the step's `max_kv`, which is at most `longest`; `decode(max_kv)` runs a step.

        What is captured may take its memory from `pool`, as other passes of the same requests do.
        """


@runtime_checkable
class CapturesPasses(Launches, Protocol):
    """One that captures an encoder's passes, too, and those of requests that join."""

    @property
    def is_captured(self) -> bool:
        """Whether it captures anything."""

    @property
    def tokens(self) -> int:
        """The most tokens of a pass that is captured."""

    @property
    def graphs(self) -> int:
        """The most graphs that are kept."""
