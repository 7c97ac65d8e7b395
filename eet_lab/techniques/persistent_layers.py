"""Persistent layers: one launch from one layer's attention to the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.models.decoder import forward_by_layer
from eet_lab.ops import cuda, native
from eet_lab.ops.cuda.launching import with_options
from eet_lab.parts import Parts
from eet_lab.technique import Technique


@dataclass(frozen=True)
class PersistentLayers(Technique):
    """Keep one kernel running from a layer's attention to the next: four products, one stream of weights.

    A decode step of one or two rows waits more than it computes: each product needs all numbers of the one before, and
    while these are passed on, the memory has nothing to do. Here a thread block keeps its multiprocessor through the
    output projection, the feed-forward network and the next layer's queries, keys and values. Its ring of weights goes
    on from one to the next, so that memory is read while results are exchanged; and these go from block to block
    through the L2 cache, each number telling by itself that it has arrived, so that nobody waits for a kernel to end.

    It takes one or two rows in 16 bits, of models whose layers have 48 MiB of weights or more and whose feed-forward
    activations fit in shared memory beside the ring. For all else, prefill among it, the layers run as they did before:
    a layer that takes a few microseconds has too little to hide. Thread blocks wait for each other, so all of them
    have to be on the GPU at once: do not generate on two CUDA streams at the same time, nor in two processes that
    share the GPU's multiprocessors (MPS).

    Expect two launches a layer instead of five, and the most for a single row of a model with large layers.

    Source: persistent kernels with a continuous stream of weights, as in "Look Ma, No Bubbles!" (Hazy Research, 2025);
    data that is its own flag as in NCCL's LL protocol.
    """

    name: ClassVar[str] = "persistent_layers"
    title: ClassVar[str] = "Persistent layers"
    requires: ClassVar[tuple[str, ...]] = ("fused_kernels",)
    numerics: ClassVar[str] = "reordered"

    def apply(self, parts: Parts) -> Parts:
        forward = with_options(forward_by_layer, takes=cuda.takes_layers)
        return replace(parts, ops=replace(parts.ops, rest_of_layer=cuda.rest_of_layer), forward=forward)

    def unavailable(self, device: str = "cpu") -> str | None:
        return native.available(device)
