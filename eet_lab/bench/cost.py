"""The cost model: the bytes that a decode step must read, and the least time that this can take here.

At small batches a step is bound by memory: every weight is read once, and every row's keys and values. The floor is
those bytes at the rate that a streaming read reaches on this device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache

import torch

from eet_lab.bench.results import Cost, Spread
from eet_lab.models.decoder import Decoder, tensors
from eet_lab.ops.oom import memory_for

NUM_BYTES = {"cuda": 4 * 2**30, "cpu": 128 * 2**20}
"""Of the streaming read: far beyond any cache."""


def step_cost(
    model: Decoder,
    rows: Sequence[Sequence[int]],
    new_tokens: int,
    tpot_ms: Spread | None,
    launches: float | None = None,
) -> Cost:
    """The cost of a decode step half-way through `new_tokens`, beside the time per output token that was measured."""
    weights = step_weight_bytes(model)
    kv = round(sum(len(row) + new_tokens / 2 for row in rows) * model.config.kv_bytes_per_token(model.dtype.itemsize))
    ceiling = streaming_gb_per_s(model.device.type)
    return Cost(
        weight_bytes=weights,
        kv_bytes=kv,
        ceiling_gb_per_s=round(ceiling, 2),
        floor_ms=round((weights + kv) / ceiling / 1e6, 5),
        gb_per_s=None if tpot_ms is None else round((weights + kv) / tpot_ms.p50 / 1e6, 3),
        launches_per_token=launches,
    )


def step_weight_bytes(model: Decoder) -> int:
    """Bytes of all layers, the last norm and the LM head; of the embeddings a step reads a few rows only."""
    read = {t.data_ptr(): t.numel() * t.element_size() for t in tensors((model.layers, model.norm, model.head))}
    return sum(read.values())


@lru_cache
def streaming_gb_per_s(device: str) -> float:
    """The rate in GB/s at which a sum over a large buffer reads memory here: the best of a few, once per process."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else NUM_BYTES["cpu"] * 4
    num_bytes = min(NUM_BYTES[device], free // 4)
    with memory_for(f"a buffer of {num_bytes / 2**20:.0f} MiB, to measure how fast memory can be read,"):
        buffer = torch.ones(num_bytes // 4, device=device)
        best = min(_seconds(buffer) for _ in range(7))
    return num_bytes / best / 1e9


def _seconds(buffer: torch.Tensor) -> float:
    if buffer.device.type == "cpu":
        start = time.perf_counter()
        buffer.sum()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    buffer.sum()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event) / 1e3
