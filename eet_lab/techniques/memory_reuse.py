"""Memory reuse: a static KV cache, and activations at planned offsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.engine.arena import PlannedMemory
from eet_lab.engine.kv_cache import StaticKV
from eet_lab.engine.paged_kv import PAGE, PagedKV
from eet_lab.memory import POOLS, RELEASES
from eet_lab.memory.optimal import missing
from eet_lab.parts import Parts
from eet_lab.technique import Technique, knob


@dataclass(frozen=True)
class MemoryReuse(Technique):
    """Allocate once: a KV cache of the run's full length, and one arena in which all layers' activations share bytes.

    Without it, every op asks for a new tensor, and the KV cache grows by concatenation, so that each step copies
    every key and value that was there. With it, each pass is rehearsed without data to learn when every activation is
    born and dies, a planner gives each an offset so that those alive together never overlap, and the ops' activations
    then share that one allocation; keys and values are written in place. What PyTorch's own functions take for
    themselves meanwhile is beyond a plan; the kernels of `fused_kernels` take nothing.

    With `kv=paged` keys and values lie in a pool of pages, which is allocated for the batch's full length; from it a
    row takes a page of columns at a time, wherever one is free. Pads take none, a batch of other lengths shares the
    same pool, and nothing is copied; plain PyTorch has to gather the pages before it can multiply them.
    `planner` chooses among one arena, TurboTransformers' chunks, and EET's buffers.

    Expect less traffic per step as sequences grow, fewer trips to the allocator, and addresses that stay the same from
    step to step, which `cuda_graphs` needs.

    Source: EET's buffer manager (Li et al., 2022); planning by lifetimes as in TurboTransformers (Fang et al., PPoPP
    2021) and Pisarchyk and Lee (2020); pages from PagedAttention (Kwon et al., SOSP 2023).
    """

    name: ClassVar[str] = "memory_reuse"
    title: ClassVar[str] = "Memory reuse"
    headline: ClassVar[bool] = True

    planner: str = knob("greedy_by_size", "How addresses are chosen, in one arena or in chunks.", choices=POOLS)
    release: str = knob("immediate", "When a chunk that a request left unused is given back.", choices=RELEASES)
    kv: str = knob(
        "static",
        "How keys and values are kept: in one slab, or in pages (without memory_reuse they grow).",
        choices=("static", "paged"),
    )
    page: int = knob(PAGE, "Columns of a page.", choices=(16, 32, 64, 128))

    def unavailable(self, device: str = "cpu") -> str | None:
        return missing() if self.planner == "optimal" else None

    def apply(self, parts: Parts) -> Parts:
        caches: dict[str, Callable] = {"static": StaticKV, "paged": PagedKV(self.page)}
        return replace(parts, kv_cache=caches[self.kv], memory=PlannedMemory(self.planner, self.release))
