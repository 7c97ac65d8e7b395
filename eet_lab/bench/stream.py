"""A stream of requests of random lengths, one after the other on one engine: how fast, and what they allocate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from eet_lab.bench.measure import allocated_afresh
from eet_lab.bench.measured import Parity, Spread
from eet_lab.bench.parity import ParityCheck
from eet_lab.bench.providers import OURS, equality
from eet_lab.bench.rows import Row, taken
from eet_lab.bench.timing import on_host
from eet_lab.bench.workloads import Stream
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.errors import Cancelled
from eet_lab.memory import live_bytes
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device
from eet_lab.progress import Cancel
from eet_lab.technique import Recipe
from eet_lab.texts import as_recipe

WARM_UP = 3  # requests before any is timed


@dataclass(frozen=True)
class StreamResult:
    """What a stream took. None is what could not be counted on this device.

    `activation_bytes` is the peak beyond weights, libraries and KV cache; `lower_bound_bytes` what the largest
    request has alive at once, at the least. `step_allocations`: of torch, in a steady decode step. `same` judges the
    first requests, before any is timed.
    """

    total_ms: float
    num_tokens: int
    peak_bytes: int | None
    activation_bytes: int | None
    lower_bound_bytes: int
    driver_allocations: int
    step_allocations: int | None
    same: Parity

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_ms * 1e3


@on_its_device
def run_stream(
    model: Model, stream: Stream, recipe: str | Recipe = "all", *, reserved: bool = True, cancel: Cancel | None = None
) -> StreamResult:
    """Serve a stream, after memory was reserved for its largest request, or as it comes.

    Errors: RecipeError, PromptError, OutOfMemory, Cancelled.
    """
    settings = Settings(max_new_tokens=stream.new_tokens)
    requests, chosen = stream.prompts(model.config.vocab_size), as_recipe(recipe, model.device, model.config)
    longest = max(requests, key=len)
    checked_prompts([[0] * stream.high], Settings(stream.new_tokens), model.config)
    check = ParityCheck(model.decoder, requests[:WARM_UP], settings, cancel=cancel)
    before = allocated_afresh(model.device)
    engine = Engine(model.decoder, chosen.parts)
    try:
        engine.prepare(cancel=cancel)
        if reserved:
            engine.reserve(1, stream.high, settings)
        first = [_tokens(engine, prompt, settings, cancel) for prompt in requests[:WARM_UP]]
        calls = _driver_allocations(engine, model.device)
        if model.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        timed = on_host(lambda: sum(len(_tokens(engine, prompt, settings, cancel)) for prompt in requests))
        calls = _driver_allocations(engine, model.device) - calls
        peak = torch.cuda.max_memory_allocated() - before if model.device == "cuda" else None
        return StreamResult(
            total_ms=timed.seconds * 1e3,  # every request waits for its tokens
            num_tokens=timed.value,
            peak_bytes=peak,
            activation_bytes=None if peak is None or not reserved else peak - engine.kv_bytes,
            lower_bound_bytes=_lower_bound(engine, longest, settings),
            driver_allocations=calls,
            step_allocations=_step_allocations(engine, longest, settings, model.device),
            same=check.judge(chosen.parts, first, chosen.tolerance),
        )
    finally:
        engine.close()


def row(model: Model, stream: Stream, recipe: str, result: StreamResult, reserved: bool) -> Row:
    """The line of a result file; a recipe with a reservation ends in " (reserved)"."""
    return taken(
        model.device,
        workload=str(stream),
        provider=OURS,
        recipe=str(as_recipe(recipe, model.device, model.config)) + " (reserved)" * reserved,
        dtype=model.dtype,
        total_ms=Spread.of([result.total_ms]),
        peak_bytes=result.peak_bytes,
        equality=equality(result.same),
        same_tokens=result.same.same_tokens,
        activation_bytes=result.activation_bytes,
        lower_bound_bytes=result.lower_bound_bytes,
        driver_allocations=result.driver_allocations,
        step_allocations=result.step_allocations,
    )


def _tokens(engine: Engine, prompt: Sequence[int], settings: Settings, cancel: Cancel | None) -> tuple[int, ...]:
    generation = engine.generate([prompt], settings, cancel=cancel)
    if generation.cancelled:
        raise Cancelled("The stream was stopped.")
    return generation.tokens[0]


def _driver_allocations(engine: Engine, device: str) -> int:
    """Of torch's allocator on a GPU; on the CPU those of the memory part, whose chunks stand for it."""
    if device == "cuda":
        return int(torch.cuda.memory_stats().get("num_device_alloc", 0))
    return int(engine.memory.calls.allocations)


def _lower_bound(engine: Engine, prompt: Sequence[int], settings: Settings) -> int:
    return max(max(live_bytes(trace)) for trace in engine.lifetimes([prompt], settings).values())


def _step_allocations(engine: Engine, prompt: Sequence[int], settings: Settings, device: str) -> int | None:
    """What torch allocates from one step to the next, where that is the same for most."""
    if device != "cuda":
        return None
    counts = []
    engine.generate(
        [prompt],
        settings,
        on_step=lambda event: counts.append(torch.cuda.memory_stats()["allocation.all.allocated"]),
    )
    between = sorted(b - a for a, b in pairwise(counts))
    return between[len(between) // 2] if between else None
