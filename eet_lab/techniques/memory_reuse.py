"""Memory reuse: a static KV cache, and activations at planned offsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.memory import POOLS, RELEASES
from eet_lab.memory.optimal import missing
from eet_lab.models.config import Config
from eet_lab.parts import Parts
from eet_lab.parts.arena import PlannedMemory
from eet_lab.parts.kv_cache import StaticKV
from eet_lab.parts.paged_kv import PAGE, PagedKV
from eet_lab.technique import Technique, knob

PLANNER_WORDS = {
    "greedy_by_size": "greedy by size",
    "first_fit": "first fit",
    "no_reuse": "no reuse",
    "optimal": "optimal (solver)",
    "chunked": "chunks (TurboTransformers)",
    "chunked_ascending": "chunks, smallest first",
    "eet": "buffers (EET)",
    "eet_repaired": "buffers (EET, repaired)",
}
RELEASE_WORDS = {"immediate": "at once", "idle": f"after {RELEASES['idle']} idle requests", "never": "never"}


@dataclass(frozen=True)
class MemoryReuse(Technique):
    """Allocate once: a KV cache of the run's full length, and one arena in which all layers' activations share bytes.

    Without it, every op allocates a new tensor, and the KV cache grows by concatenation, so that each step copies
    all earlier keys and values. With it, each pass is traced without data to learn the lifetime of every activation.
    A planner gives each activation an offset, so that those alive at the same time never overlap, and all of them share
    one allocation; keys and values are written in place. A plan does not cover the temporary memory inside PyTorch's
    own functions; the kernels of `fused_kernels` need none.

    With `kv=paged` keys and values are stored in a pool of pages, which is allocated for the batch's full length; a row
    takes one page of columns at a time, wherever one is free. Pads take none, a batch of other lengths shares the same
    pool, and nothing is copied; plain PyTorch has to gather the pages before it can multiply them. `planner` chooses
    among one arena, TurboTransformers' chunks, and EET's buffers.

    Expect less memory traffic per step as sequences grow, fewer calls to the allocator, and addresses that stay the
    same from step to step, which `cuda_graphs` needs. An encoder has no KV cache: its arena is planned for the largest
    passes over a list of texts.

    Source: EET's buffer manager (Li et al., 2022); planning by lifetimes as in TurboTransformers (Fang et al., PPoPP
    2021) and Pisarchyk and Lee (2020); pages from PagedAttention (Kwon et al., SOSP 2023).
    """

    name: ClassVar[str] = "memory_reuse"
    title: ClassVar[str] = "Memory reuse"
    lesson: ClassVar[str] = "03_memory_reuse"
    stages: ClassVar[tuple[str, ...]] = ("generate", "encode", "seq2seq")
    headline: ClassVar[bool] = True

    planner: str = knob(
        "greedy_by_size",
        "Which algorithm gives activations their addresses, in one arena or in chunks.",
        label="Planner",
        choices=POOLS,
        words=PLANNER_WORDS,
    )
    release: str = knob(
        "immediate",
        "When a chunk that a request left unused is given back to the device.",
        label="Release",
        choices=RELEASES,
        words=RELEASE_WORDS,
        when={"planner": ("chunked", "chunked_ascending")},
    )
    kv: str = knob(
        "static",
        "Keys and values are in one slab of the full length, or in pages that a row takes as it grows.",
        label="KV layout",
        choices=("static", "paged"),
        words={"static": "one slab", "paged": "pages"},
    )
    page: int = knob(
        PAGE,
        "How many columns of keys and values a page holds.",
        label="Page size",
        unit="columns",
        choices=(16, 32, 64, 128),
        when={"kv": ("paged",)},
    )

    pages: int = knob(
        0,
        "How many pages there are; 0: all that the batch's rows may need. With fewer, requests wait for one another, "
        "which needs Continuous batching.",
        label="Pages",
        unit="pages",
        low=0,
        high=2**22,
        when={"kv": ("paged",)},
    )

    def unavailable(self, device: str = "cpu") -> str | None:
        return missing() if self.planner == "optimal" else None

    def unfit(self, config: Config) -> str | None:
        if config.stage == "encode" and self.kv != "static":
            return "kv=paged lays out a KV cache, and an encoder has none; leave kv out"
        return super().unfit(config)

    def apply(self, parts: Parts) -> Parts:
        num_pages = 1 + self.pages if self.pages else None  # one of them belongs to nobody
        caches: dict[str, Callable] = {"static": StaticKV, "paged": PagedKV(self.page, num_pages)}
        return replace(parts, kv_cache=caches[self.kv], memory=PlannedMemory(self.planner, self.release))
