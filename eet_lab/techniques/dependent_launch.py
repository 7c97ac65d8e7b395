"""Dependent launch: a kernel begins before the one ahead of it has ended."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch

from eet_lab.ops import native
from eet_lab.ops.cuda.launching import can_be_dependent, dependent
from eet_lab.parts import Ops, Parts
from eet_lab.technique import Technique

OLDEST_GPU = (9, 0)
"""Compute capability: griddepcontrol, and launches that it works with."""


@dataclass(frozen=True)
class DependentLaunch(Technique):
    """Let a kernel begin, and request its weights, while the one ahead of it still works.

    Between two kernels the GPU is idle: the last block of the first must end and its results be written, the second
    must be started, and its first weights must arrive from memory. With this technique, the second one's blocks start
    as soon as a multiprocessor has room for them. They prefetch what no kernel of the step writes (weights, and keys
    and values of earlier steps), and only then wait for the previous kernel. The results are the same, bit for bit.

    All kernels of EET Lab take part. PyTorch's own kernels, which run around the layers without `fused_sampling`, and
    the matrix products of longer passes still start when everything before them has ended.

    Columns of the KV cache that earlier steps wrote are prefetched, so they must not move. That needs `memory_reuse`,
    since a growing cache is copied in every step.

    Expect each launch of a decode step to cost less. The gain is largest where kernels read few bytes each. Without
    `cuda_graphs` Python launches too slowly for any kernel to begin early.

    Source: NVIDIA's programmatic dependent launch (Hopper, 2022); prefetching weights before the wait as in
    TensorRT-LLM and in "Look Ma, No Bubbles!" (Hazy Research, 2025).
    """

    name: ClassVar[str] = "dependent_launch"
    title: ClassVar[str] = "Dependent launch"
    lesson: ClassVar[str] = "04_decode_speed"
    requires: ClassVar[tuple[str, ...]] = ("memory_reuse", "fused_kernels")
    wraps: ClassVar[bool] = True

    def apply(self, parts: Parts) -> Parts:
        # Safe in a prefill as well, and with any of the ops in plain PyTorch: csrc/eet/dependent.cuh says why.
        ops = {f.name: getattr(parts.ops, f.name) for f in fields(Ops)}
        early = {name: dependent(op) for name, op in ops.items() if can_be_dependent(op)}
        return replace(parts, ops=replace(parts.ops, **early))

    def unavailable(self, device: str = "cpu") -> str | None:
        needs = f"dependent launch needs compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]} (Hopper) or newer."
        if problem := native.available(device):
            return f"{problem.rstrip('.')}; {needs}"
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= OLDEST_GPU:
            return None
        return f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, but {needs}"
