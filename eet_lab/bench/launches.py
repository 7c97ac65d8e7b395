"""How many launches a decode step takes, counted by torch's profiler."""

from __future__ import annotations

import torch

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings

CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
"""What the host hands to the GPU; names with a suffix such as cudaLaunchKernelExC count as well."""

STEPS = 8


def launches_per_token(engine: Engine, num_rows: int) -> float | None:
    """Launches of one decode step: the difference of a run with 1 and one with 9 new tokens, over 8.

    Prompts have 1, 2, ... tokens, since some ops launch once for each length. None on the CPU, and where the profiler
    cannot see the GPU. The engine's session is another one afterwards.
    """
    if engine.model.device.type != "cuda":
        return None
    longest = engine.model.config.context - 1 - STEPS
    rows = [[1] * min(row + 1, longest) for row in range(num_rows)]
    counts = [_launches(engine, rows, Settings(max_new_tokens=n)) for n in (1, 1 + STEPS)]
    return (counts[1] - counts[0]) / STEPS if all(counts) else None


def _launches(engine: Engine, rows: list[list[int]], settings: Settings) -> int:
    engine.generate(rows, settings)  # allocate and capture
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        engine.generate(rows, settings)
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.key.startswith(CALLS))
