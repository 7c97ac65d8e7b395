"""Persistent layers: one launch from one layer's attention to the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.models import decoder
from eet_lab.ops import cuda, native
from eet_lab.ops.cuda.launching import with_options
from eet_lab.parts import Parts
from eet_lab.technique import Technique


@dataclass(frozen=True)
class PersistentLayers(Technique):
    """Keep one kernel running from a layer's attention to the next: four products, one stream of weights.

    A decode step of one or two rows waits more than it computes: each product needs all results of the one before, and
    while these are exchanged, memory is idle. Here a thread block stays on its multiprocessor through the output
    projection, the feed-forward network and the next layer's queries, keys and values. Its ring buffer of weights is
    filled across all of them, so that memory is read while results are exchanged. Results go from block to block
    through the L2 cache. Each value is its own flag that it has arrived, so that no block waits for a kernel to end.

    It supports one or two rows in 16 bits, of models whose layers have 48 MiB of weights or more and whose feed-forward
    activations fit in shared memory beside the ring buffer. In all other cases, prefill included, the layers run as
    without it: a layer that takes a few microseconds has too little to hide. Thread blocks wait for each other, so all
    of them have to be on the GPU at once: do not generate on two CUDA streams at the same time, nor in two processes
    that share the GPU's multiprocessors (MPS).

    Expect two launches per layer instead of five. A single row of a model with large layers gains most.

    Source: persistent kernels with a continuous stream of weights, as in "Look Ma, No Bubbles!" (Hazy Research, 2025);
    data that is its own flag as in NCCL's LL protocol.
    """

    name: ClassVar[str] = "persistent_layers"
    title: ClassVar[str] = "Persistent layers"
    lesson: ClassVar[str] = "04_decode_speed"
    requires: ClassVar[tuple[str, ...]] = ("fused_kernels",)
    numerics: ClassVar[str] = "reordered"

    def apply(self, parts: Parts) -> Parts:
        layers = with_options(decoder.fused, takes=cuda.takes_layers)
        return replace(parts, ops=replace(parts.ops, fused_layer=cuda.fused_layer), layers=layers)

    def unavailable(self, device: str = "cpu") -> str | None:
        return native.available(device)
