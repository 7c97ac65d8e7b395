"""What a run did with memory, kept when its engine is gone: plans, KV cache, torch's calls of the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from eet_lab.engine.engine import Engine
from eet_lab.memory import DriverCalls, Plan, one_after_the_other
from eet_lab.parts.kv_cache import KVCache
from eet_lab.words import counted, sized

BOTH = "both"
PASSES = ("prefill", "decode", BOTH)


@dataclass(frozen=True)
class KVUse:
    """A KV cache at the end of a run: bytes held, those of them that stand for a token, and those copied on the way."""

    kind: str
    held_bytes: int
    used_bytes: int
    copied_bytes: int
    growth_bytes: int
    prompt_tokens: int = 0  # of requests that prefix caching looked up
    cached_tokens: int = 0  # those of them that it found

    @property
    def wasted_bytes(self) -> int:
        return self.held_bytes - self.used_bytes

    @classmethod
    def of(cls, cache: KVCache) -> KVUse:
        size = cache.num_bytes, cache.used_bytes, cache.copied_bytes, cache.growth_bytes
        return cls(cache.kind, *size, cache.prefix_cache_queries, cache.prefix_cache_hits)


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
        self._on_gpu = device != "cpu"
        self._before = self._now()

    def read(self, frees: bool = True) -> TorchCalls | None:
        """So far. `frees` False: they are not this run's own."""
        allocated, freed = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return TorchCalls(allocated, freed if frees else None) if self._on_gpu else None

    def _now(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats() if self._on_gpu else {}
        return stats.get("num_device_alloc", 0), stats.get("num_device_free", 0)


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
        memory, kv = engine.memory, KVUse.of(engine.cache)
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

    def facts(self) -> dict[str, str]:
        """A table's rows."""
        kv = self.kv
        share = f" ({kv.wasted_bytes / kv.held_bytes:.0%})" if kv.held_bytes else ""
        found = {
            "weights": sized(self.weights_bytes),
            "activations, in the pass with the most": sized(self.activation_bytes),
            "KV cache": kv.kind,
            "held at the end": sized(kv.held_bytes),
            "used": sized(kv.used_bytes),
            "unused": f"{sized(kv.wasted_bytes)}{share}",
            "copied to make room, in the whole run": sized(kv.copied_bytes),
            "temporary copy while it grows": sized(kv.growth_bytes),
        }
        if kv.prompt_tokens:
            hit_rate = kv.cached_tokens / kv.prompt_tokens
            found["prompt tokens found in the prefix cache"] = f"{kv.cached_tokens:,} ({hit_rate:.0%})"
        if self.planned:
            found["calls of the arena's pool"] = _called(self.pool_calls.allocations, self.pool_calls.frees)
        if self.torch_calls is not None:
            found["torch's calls of the driver in the first run"] = str(self.torch_calls)
        return found


def _called(allocations: int, frees: int) -> str:
    return f"{counted(allocations, 'allocation')}, {counted(frees, 'free')}"
