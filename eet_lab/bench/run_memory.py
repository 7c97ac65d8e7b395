"""The memory that a run takes, as torch's allocator counts it, and what it did with it: plans and KV cache.

A `device` is "cpu" or "cuda". The CPU's memory is counted by plan, so that torch's counters are of the present GPU.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch

from eet_lab.engine.engine import Engine
from eet_lab.memory import DriverCalls, Plan, one_after_the_other
from eet_lab.parts import launch
from eet_lab.parts.kv_cache import KVCache
from eet_lab.words import amounts, counted

BOTH = "both"
PASSES = ("prefill", "decode", BOTH)

MEMORY_PARTS = {
    "weights": "weights",
    "kv": "KV cache",
    "kv_growth": "its copy while it grows",
    "activations": "activations",
    "workspace": "workspaces and graphs",
}
"""What the peak is made of, by the keys of `Measurement.memory`: the KV cache is the final one; workspaces and graphs
are what libraries and graphs keep for themselves."""

MEMORY_KEYS = (*MEMORY_PARTS, "peak")
"""The keys of `Measurement.memory`; the peak is the most at once."""

Made = TypeVar("Made")


def collect(device: str) -> None:
    """Have torch give back what nobody holds any more, the pools of graphs that are gone among it."""
    if device == "cuda":  # on a CPU nothing would be counted afterwards, and collecting takes a while
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def allocated(device: str) -> int:
    """Bytes that torch has handed out, or keeps for graphs, once the rest is given back; 0 on a CPU."""
    collect(device)
    return torch.cuda.memory_allocated() + kept_for_graphs() if device == "cuda" else 0


def kept_for_graphs() -> int:
    """Bytes that graphs write to as they are replayed: torch's allocator calls them free, and no peak counts them."""
    pooled = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) != (0, 0)]
    return sum(each["total_size"] - each["allocated_size"] for each in pooled)


def with_peak(work: Callable[[], Made], device: str) -> tuple[Made, int | None]:
    """What some work gave, and the most bytes that torch allocated on the GPU for it at once; None on a CPU."""
    if device != "cuda":
        return work(), None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = work()
    return made, torch.cuda.max_memory_allocated() - before


def allocated_afresh(device: str) -> int:
    """Bytes that torch holds on the GPU once caches are emptied; peaks count from here. 0 on the CPU."""
    collect(device)
    if device != "cuda":
        return 0
    _cublas_bytes(threading.get_ident())
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@lru_cache
def _cublas_bytes(thread: int) -> tuple[int, int]:
    """The workspaces that cuBLAS makes for a thread at its first product, and at the first one that is captured.

    They are made now, so that a recipe is charged for both or for one, whichever came before it.
    """
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    square = torch.ones(64, 64, device="cuda", dtype=torch.float16)
    torch.mm(square, square)
    del square
    plain = torch.cuda.memory_allocated()
    with launch.capturing():
        pass
    return plain - before, torch.cuda.memory_allocated() - plain


def memory_of(engine: Engine, device: str, before: int) -> dict[str, int]:
    """Bytes by purpose. On a GPU, activations are the measured peak less all else, so they include ops' temporaries.

    They are at least what `memory` handed out: the peak may fall into the prefill, before the KV cache has its full
    length.
    """
    weights, kv, growth = engine.model.weight_bytes, engine.kv_bytes, engine.kv_growth_bytes
    activations, workspace = engine.activation_bytes, 0
    peak = weights + kv + growth + activations
    if device == "cuda":
        libraries = sum(_cublas_bytes(threading.get_ident())[: 1 + engine.parts.is_captured])
        workspace = libraries + max(torch.cuda.memory_allocated() - before - kv - engine.memory.held_bytes, 0)
        peak = weights + libraries + torch.cuda.max_memory_allocated() - before
        activations = max(peak - weights - kv - growth - workspace, activations)
    return {
        "weights": weights,
        "kv": kv,
        "kv_growth": growth,
        "activations": activations,
        "workspace": workspace,
        "peak": peak,
    }


def driver_calls(device: str) -> DriverCalls:
    """How often torch has asked the driver for memory of the GPU, and given some back; never on a CPU."""
    stats = torch.cuda.memory_stats() if device == "cuda" else {}
    return DriverCalls(stats.get("num_device_alloc", 0), stats.get("num_device_free", 0))


@dataclass(frozen=True)
class KVUse:
    """A KV cache at the end of a run: bytes held, those of them that stand for a token, and those copied on the way.

    Where all requests have left by then (`all_left`), no byte stands for a token, which says nothing about the run.
    """

    kind: str
    held_bytes: int
    used_bytes: int
    copied_bytes: int
    growth_bytes: int
    prompt_tokens: int = 0  # of requests that prefix caching looked up
    cached_tokens: int = 0  # those of them that it found
    all_left: bool = False

    @property
    def wasted_bytes(self) -> int:
        return self.held_bytes - self.used_bytes

    @classmethod
    def of(cls, cache: KVCache, all_left: bool = False) -> KVUse:
        size = cache.num_bytes, cache.used_bytes, cache.copied_bytes, cache.growth_bytes
        return cls(cache.kind, *size, cache.prefix_cache_queries, cache.prefix_cache_hits, all_left)


@dataclass(frozen=True)
class TorchCalls:
    """How often torch asked the driver for memory of the GPU, and gave some back (None: that was not counted)."""

    allocations: int
    frees: int | None

    def __str__(self) -> str:
        if self.frees is None:
            return f"{counted(self.allocations, 'allocation')} (frees are not counted: Compare empties torch's cache)"
        return _called(self.allocations, self.frees)


class TorchCounter:
    """Counts torch's calls of the driver from here on; `read` gives None on a CPU, which has no such counter."""

    def __init__(self, device: str) -> None:
        self._device, self._before = device, driver_calls(device)

    def read(self, frees: bool = True) -> TorchCalls | None:
        """So far. `frees` False: they are not this run's own."""
        calls = driver_calls(self._device) - self._before
        return TorchCalls(calls.allocations, calls.frees if frees else None) if self._device == "cuda" else None


class Size(NamedTuple):
    """Bytes in a table, and what is said behind them."""

    num_bytes: int
    more: str = ""


@dataclass(frozen=True)
class RunMemory:
    """One run. `plans` go by pass, and hold only where there is an arena (`planned`); else they are what one would do.

    `torch_calls` are those of its first run, None on a CPU.
    """

    plans: Mapping[str, Plan]
    planned: bool
    weights_bytes: int
    activation_bytes: int
    kv: KVUse
    pool_calls: DriverCalls
    torch_calls: TorchCalls | None

    @classmethod
    def of(cls, engine: Engine, torch_calls: TorchCalls | None) -> RunMemory:
        """What the engine holds after a run."""
        memory, kv = engine.memory, KVUse.of(engine.cache, all_left=engine.parts.schedule.max_rows is not None)
        return cls(
            plans=engine.plans(),
            planned=memory.has_arena,
            weights_bytes=engine.model.weight_bytes,
            activation_bytes=engine.activation_bytes,
            kv=kv,
            pool_calls=memory.calls,
            torch_calls=torch_calls,
        )

    def plan(self, phase: str) -> Plan:
        """One pass's, or that of both, one after the other: nothing of the prefill is alive in a step."""
        if phase != BOTH:
            return self.plans[phase]
        first, then = self.plans.values()
        lifetimes = one_after_the_other((first.lifetimes, then.lifetimes))
        return Plan(lifetimes, first.offsets + then.offsets, then.chunks if self.planned else ())

    @property
    def story(self) -> str:
        """What the picture of its plans is a picture of."""
        whose = (
            ""
            if self.planned
            else "It allocates fresh tensors and has no arena: this is where a planner would put them. "
        )
        return (
            f"{whose}A rectangle is a tensor, from the request that made it to its last use; at the same height lie "
            "the same bytes. Hover to see its name."
        )

    def facts(self) -> dict[str, str | Size]:
        """A table's rows."""
        kv = self.kv
        share = f" ({kv.wasted_bytes / kv.held_bytes:.0%})" if kv.held_bytes else ""
        found: dict[str, str | Size] = {
            "weights": Size(self.weights_bytes),
            "activations, in the pass with the most": Size(self.activation_bytes),
            "KV cache": kv.kind,
            "held at the end": Size(kv.held_bytes),
            "used": "all requests have left" if kv.all_left else Size(kv.used_bytes),
            "unused": "–" if kv.all_left else Size(kv.wasted_bytes, share),
            "copied to make room, in the whole run": Size(kv.copied_bytes),
            "temporary copy while it grows": Size(kv.growth_bytes),
        }
        if kv.prompt_tokens:
            hit_rate = kv.cached_tokens / kv.prompt_tokens
            found["prompt tokens found in the prefix cache"] = f"{kv.cached_tokens:,} ({hit_rate:.0%})"
        if self.planned:
            found["calls of the arena's pool"] = _called(self.pool_calls.allocations, self.pool_calls.frees)
        if self.torch_calls is not None:
            found["torch's calls of the driver in the first run"] = str(self.torch_calls)
        return found


def fact_rows(runs: Iterable[RunMemory]) -> list[list[str]]:
    """The rows of several runs' table, each with its name first and its sizes in one unit."""
    columns = [run.facts() for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *_told([column.get(name, "–") for column in columns])] for name in names]


def _told(row: Sequence[str | Size]) -> Iterator[str]:
    sizes = iter(amounts(*(each.num_bytes for each in row if isinstance(each, Size))))
    for each in row:
        yield f"{next(sizes)}{each.more}" if isinstance(each, Size) else each


def _called(allocations: int, frees: int) -> str:
    return f"{counted(allocations, 'allocation')}, {counted(frees, 'free')}"
