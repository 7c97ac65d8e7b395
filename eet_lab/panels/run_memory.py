"""What a run did with memory, kept when its engine is gone: plans, the KV cache, calls to the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from eet_lab.engine.engine import Engine
from eet_lab.memory import Plan
from eet_lab.words import counted, sized


@dataclass(frozen=True)
class RunMemory:
    """One run. `plans` go by pass; `device_calls` are torch's allocations and frees on the GPU, None on a CPU."""

    recipe: str
    plans: Mapping[str, Plan]
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    kv_growth_bytes: int
    device_calls: tuple[int, int] | None

    @classmethod
    def of(cls, recipe: str, engine: Engine, since: tuple[int, int] | None = None) -> RunMemory:
        """What the engine holds after a run; `since` is what `device_calls` was before it, where it was asked."""
        calls = None
        if since is not None and engine.model.device.type == "cuda":
            allocations, frees = device_calls()
            calls = allocations - since[0], frees - since[1]
        return cls(
            recipe,
            engine.plans(),
            engine.model.weight_bytes,
            engine.activation_bytes,
            engine.kv_bytes,
            engine.kv_growth_bytes,
            calls,
        )

    @property
    def story(self) -> str:
        """What the picture of its plans is a picture of."""
        return (
            f"{self.recipe}: each rectangle is a tensor, from the request that made it to the one that used it last. "
            "What lies side by side at one height shares bytes; hover to see what it is."
        )

    def facts(self) -> dict[str, str]:
        """A table's rows."""
        found = {
            "weights": sized(self.weights_bytes),
            "activations": sized(self.activation_bytes),
            "KV cache held": sized(self.kv_bytes),
            "its largest copy while it grows": sized(self.kv_growth_bytes) if self.kv_growth_bytes else "none",
        }
        if self.device_calls is not None:
            allocations, frees = self.device_calls
            found["driver calls of torch in the run"] = (
                f"{counted(allocations, 'allocation')}, {counted(frees, 'free')}"
            )
        return found


def device_calls() -> tuple[int, int]:
    """How often torch has asked the driver for memory, and given some back, since the process began; 0 on a CPU."""
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return stats.get("num_device_alloc", 0), stats.get("num_device_free", 0)
