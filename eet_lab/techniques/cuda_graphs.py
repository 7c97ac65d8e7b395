"""CUDA graphs: one launch a token, or a pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from eet_lab.models.config import Config, VisionConfig
from eet_lab.parts import Parts
from eet_lab.parts.launch import GraphLaunch
from eet_lab.technique import Technique, knob


@dataclass(frozen=True)
class CudaGraphs(Technique):
    """Record the launches of a decode step, or of an encoder's pass, once, and replay them with a single call.

    Without it, Python launches every kernel of every step; a small model's GPU spends most of its time waiting for
    the next launch. With it, the step is captured into a CUDA graph and replayed: the kernels follow each other at
    the GPU's pace.

    A replay repeats addresses and grid sizes, so it needs `memory_reuse`, whose buffers do not move, and each graph
    serves a bucket of lengths: the kernels read the true length from device memory.

    An encoder's pass of up to `tokens` tokens is filled up to a bucket with padding rows, at most an eighth of more
    than 1,024, which no text sees. One graph serves all texts that fall into a bucket, packed or with pads; it holds
    the task's head, too. That takes attention that reads lengths on the device, as `fused_kernels` with `mask_removal`
    does; other attention has a graph for each list of lengths. A pass runs as it is the first time, and is captured the
    second; graphs share one memory, which the largest pass decides. Larger passes run as they are: the GPU takes longer
    for them than Python to launch. Images are not captured.

    Passes that read prompts are captured in the same way, if attention reads lengths on the device. Where requests join
    (`continuous_batching`), one graph serves all of a size. A batch that begins together has a graph for prompts of the
    very same lengths, so that no token is added: its first token is sooner from the third such batch on. A
    batch with another number of rows or columns drops the graphs, unless `Engine.reserve` made room for both.

    Expect the time per token to fall to the sum of the kernels' own times, and encoders to serve few texts at a time in
    a fraction of it; the time to the first token falls where the GPU needs less for the prompts than Python for its
    launches. Small models gain most.

    Source: CUDA graphs for decoding as in gpt-fast and vLLM; buckets of sizes as in TensorRT's optimization profiles.
    """

    name: ClassVar[str] = "cuda_graphs"
    title: ClassVar[str] = "CUDA graphs"
    lesson: ClassVar[str] = "04_decode_speed"
    requires: ClassVar[tuple[str, ...]] = ("memory_reuse",)
    numerics: ClassVar[str] = "reordered"
    stages: ClassVar[tuple[str, ...]] = ("generate", "encode")

    bucket: int = knob(
        256,
        "Each captured graph covers this many columns of the KV cache.",
        label="Columns per graph",
        unit="columns",
        low=16,
        high=4096,
    )
    tokens: int = knob(
        GraphLaunch.tokens,
        "Passes of at most so many tokens are captured: an encoder's, and those that read prompts.",
        label="Captured passes",
        unit="tokens",
        low=1,
        high=2**20,
    )
    graphs: int = knob(
        GraphLaunch.graphs,
        "How many captured passes are kept; beyond that, the least recently used is dropped.",
        label="Graphs",
        low=1,
        high=4096,
    )

    def apply(self, parts: Parts) -> Parts:
        return replace(parts, launch=GraphLaunch(self.bucket, self.tokens, self.graphs))

    def unfit(self, config: Config) -> str | None:
        if isinstance(config, VisionConfig):
            return "it captures passes of texts, and this model reads images"
        return super().unfit(config)

    def unavailable(self, device: str = "cpu") -> str | None:
        return None if device == "cuda" and torch.cuda.is_available() else "CUDA graphs need an NVIDIA GPU."
