"""CUDA graphs: one launch a token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.parts import Parts
from eet_lab.parts.launch import GraphLaunch
from eet_lab.technique import Technique, knob


@dataclass(frozen=True)
class CudaGraphs(Technique):
    """Record a decode step's launches once, and replay them with a single call.

    Without it, Python launches every kernel of every step; a small model's GPU spends most of its time waiting for
    the next launch. With it, the step is captured into a CUDA graph and replayed: the kernels follow each other at
    the GPU's pace.

    A replay repeats addresses and grid sizes, so it needs `memory_reuse`, whose buffers do not move, and each graph
    serves a bucket of lengths: the kernels read the true length from device memory.

    Expect the time per token to fall to the sum of the kernels' own times. Small models gain most.

    Source: CUDA graphs for decoding as in gpt-fast and vLLM.
    """

    name: ClassVar[str] = "cuda_graphs"
    title: ClassVar[str] = "CUDA graphs"
    lesson: ClassVar[str] = "04_decode_speed"
    requires: ClassVar[tuple[str, ...]] = ("memory_reuse",)
    numerics: ClassVar[str] = "reordered"

    bucket: int = knob(
        256,
        "Each captured graph covers this many columns of the KV cache.",
        label="Columns per graph",
        unit="columns",
        low=16,
        high=4096,
    )

    def apply(self, parts: Parts) -> Parts:
        return replace(parts, launch=GraphLaunch(self.bucket))

    def unavailable(self, device: str = "cpu") -> str | None:
        return None if device == "cuda" else "CUDA graphs need an NVIDIA GPU."
