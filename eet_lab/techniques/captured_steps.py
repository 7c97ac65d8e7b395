"""Captured steps: one launch a pass of training, and one an update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.parts import Parts, steps
from eet_lab.technique import Technique, knob


@dataclass(frozen=True)
class CapturedSteps(Technique):
    """Record a training step's launches once, forward, backward and update, and replay them with two calls.

    Without it, Python and autograd launch every kernel of every step, and where batches are small the launches take
    several times as long as the kernels. With it, a pass is captured into a CUDA graph, and so is the update: what
    differs from step to step, such as tokens, learning rate, clipping and the key of dropout, they read from device
    memory, and the host waits once a step, for the loss. `cuda_graphs` is another technique: it captures decode steps
    and needs an arena, which training has not.

    A replay repeats shapes. Passes whose texts are equally long have few of them; others are filled up with pads, which
    nothing is learned from, to a `bucket` of tokens and of labels, and need `varlen_attention`, which reads lengths
    from device memory. All graphs share one memory, which the largest pass decides: `Trainer.reserve` captures it
    first. The first step of a shape runs as it is, the second is captured.

    Expect small models and small batches to gain most, up to the sum of the kernels' own times. Pads cost half a bucket
    a pass on average, and each graph some megabytes.

    Source: LightSeq2 (Wang et al., SC 2022) for memory by a scan of the largest shape; whole-step CUDA graphs as in
    PyTorch's `make_graphed_callables` and MLPerf's BERT.
    """

    name: ClassVar[str] = "captured_steps"
    title: ClassVar[str] = "Captured steps"
    requires: ClassVar[tuple[str, ...]] = ("pre_padding", "mask_removal", "packed_prefill", "varlen_attention")
    numerics: ClassVar[str] = "reordered"
    stages: ClassVar[tuple[str, ...]] = ("train",)

    bucket: int = knob(
        128,
        "The tokens and the labels of a pass are rounded up to a multiple of it, which is the least that a pass has.",
        label="Bucket",
        unit="tokens",
        low=16,
        high=65536,
    )
    graphs: int = knob(
        32,
        "How many graphs are kept, that of the update among them; beyond that, the least recently used is dropped.",
        label="Graphs",
        low=2,
        high=1024,
    )

    def apply(self, parts: Parts) -> Parts:
        return replace(
            parts, texts=steps.Bucketed(parts.texts, self.bucket), step_launch=steps.CapturedSteps(self.graphs)
        )

    def unavailable(self, device: str = "cpu") -> str | None:
        return None if device == "cuda" else "CUDA graphs need an NVIDIA GPU."
