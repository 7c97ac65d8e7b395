"""Streams of requests, one after the other: how long an engine takes and what it allocates; and torch's allocator.

    python -m eet_lab.bench.streams            prints what torch's caching allocator does on this GPU, as JSON
    python -m eet_lab.bench.streams FILE       writes it

There each tensor of a request is allocated when it is made and freed when it was last used, with nothing computed. The
allocator is set up once in a process, so each setting has a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch

from eet_lab.bench.measured import Spread, device_name, versions
from eet_lab.bench.parity import ParityCheck
from eet_lab.bench.rows import OURS, Row, equality, taken
from eet_lab.bench.run_memory import allocated_afresh, driver_calls
from eet_lab.bench.timing import on_host
from eet_lab.bench.workloads import Stream
from eet_lab.codec import decode, parse
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.errors import Cancelled, EETError
from eet_lab.memory import Lifetime, live_bytes
from eet_lab.memory.workloads import Workload, eet_sweep, turbo_artifact
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device
from eet_lab.paths import PACKAGE
from eet_lab.progress import Cancel
from eet_lab.technique import Recipe
from eet_lab.texts import as_recipe

WARM_UP = 3  # requests before any is timed


@on_its_device
def run_stream(
    model: Model, stream: Stream, recipe: str | Recipe = "all", *, reserved: bool = True, cancel: Cancel | None = None
) -> Row:
    """Serve a stream, after memory was reserved for its largest request, or as it comes.

    The row's recipe ends in " (reserved)" with a reservation. Activations are the peak beyond weights, libraries and KV
    cache, and their lower bound what the largest request has alive at once; the first requests are checked, before any
    is timed. Errors: RecipeError, PromptError, OutOfMemory, Cancelled.
    """
    settings = Settings(max_new_tokens=stream.new_tokens)
    requests, chosen = stream.prompts(model.config.vocab_size), as_recipe(recipe, model.device, model.config)
    longest = max(requests, key=len)
    checked_prompts([[0] * stream.high], Settings(stream.new_tokens), model.config)
    check = ParityCheck(model.decoder, requests[:WARM_UP], settings, cancel=cancel)
    before = allocated_afresh(model.device)
    with closing(Engine(model.decoder, chosen.parts)) as engine:
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
        same = check.judge(chosen.parts, first, chosen.tolerance)
        return taken(
            model.device,
            workload=str(stream),
            provider=OURS,
            recipe=str(chosen) + " (reserved)" * reserved,
            dtype=model.dtype,
            total_ms=Spread.of([timed.seconds * 1e3]),  # every request waits for its tokens
            tok_s=timed.value / timed.seconds,
            peak_bytes=peak,
            equality=equality(same),
            same_tokens=same.same_tokens,
            activation_bytes=None if peak is None or not reserved else peak - engine.kv_bytes,
            lower_bound_bytes=max(max(live_bytes(t)) for t in engine.lifetimes([longest], settings).values()),
            driver_allocations=calls,
            step_allocations=_step_allocations(engine, longest, settings, model.device),
        )


def _tokens(engine: Engine, prompt: Sequence[int], settings: Settings, cancel: Cancel | None) -> tuple[int, ...]:
    generation = engine.generate([prompt], settings, cancel=cancel)
    if generation.cancelled:
        raise Cancelled("The stream was stopped.")
    return generation.tokens[0]


def _driver_allocations(engine: Engine, device: str) -> int:
    """Of torch's allocator on a GPU; on the CPU those of the memory part, whose chunks stand for it."""
    calls = driver_calls(device) if device == "cuda" else engine.memory.calls
    return calls.allocations


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


RECORDED = PACKAGE / "bench" / "h200-caching-allocator.json"
SETTINGS = {"default": "", "expandable segments": "expandable_segments:True"}
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Newer versions of torch read the first, older ones the second."""
SWEEP = tuple(range(32, 1025, 32))


@dataclass(frozen=True)
class Cached:
    """One stream: bytes reserved after each request, the most allocated at once, and the driver's calls."""

    reserved_bytes: tuple[int, ...]
    most_allocated_bytes: int
    allocations: int
    frees: int


@dataclass(frozen=True)
class AllocatorTrace:
    """Streams by name, then by setting of the allocator; where and when."""

    device: str
    torch: str
    date: str
    streams: dict[str, dict[str, Cached]]


def streams() -> dict[str, Workload]:
    """What is served: TurboTransformers' artifact, and EET's prompts in both orders."""
    return {
        "artifact": turbo_artifact(),
        "EET, ascending": eet_sweep(SWEEP),
        "EET, descending": eet_sweep(SWEEP[::-1]),
    }


def serve(workload: Workload) -> Cached:
    """Serve a stream with this process's allocator, from an empty cache on."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, held = driver_calls("cuda"), torch.cuda.memory_allocated()
    reserved = [_serve_one(request.lifetimes) for request in workload]
    calls = driver_calls("cuda") - before
    return Cached(tuple(reserved), torch.cuda.max_memory_allocated() - held, calls.allocations, calls.frees)


def _serve_one(lifetimes: Sequence[Lifetime]) -> int:
    """Bytes reserved once the request is done."""
    made: dict[int, list[int]] = {}
    gone: dict[int, list[int]] = {}
    for i, life in enumerate(lifetimes):
        made.setdefault(life.first, []).append(i)
        gone.setdefault(life.last, []).append(i)
    alive = {}
    for now in range(max(gone, default=-1) + 1):
        for i in made.get(now, ()):
            alive[i] = torch.empty(lifetimes[i].num_bytes, dtype=torch.uint8, device="cuda")
        for i in gone.get(now, ()):
            del alive[i]
    return torch.cuda.memory_reserved()


@cache
def allocator_here() -> AllocatorTrace:
    """Measured now, each setting in a process of its own; EETError without a GPU."""
    if not torch.cuda.is_available():
        raise EETError(
            "torch sees no NVIDIA GPU here, and its caching allocator serves GPUs only. See `eet-lab doctor`."
        )
    found = {setting: _in_its_own_process(value) for setting, value in SETTINGS.items()}
    by_stream = {name: {setting: found[setting][name] for setting in SETTINGS} for name in streams()}
    about = versions("cuda")
    return AllocatorTrace(device_name("cuda"), about["torch"], about["date"], by_stream)


def _in_its_own_process(value: str) -> dict[str, Cached]:
    env = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    env |= dict.fromkeys(VARIABLES, value) if value else {}
    command = [sys.executable, "-m", "eet_lab.bench.streams", "--here"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EETError(f"The allocator with {value or 'its defaults'} could not be tried: {done.stderr.strip()[-500:]}")
    return decode(dict[str, Cached], parse(done.stdout.encode()))


def recorded_allocator() -> AllocatorTrace:
    """What another machine found, which comes with the package."""
    return decode(AllocatorTrace, parse(RECORDED.read_bytes()))


def main(words: Sequence[str]) -> int:
    """What the module does when it is run. 0: done; 2: it cannot, which is told in one line, as by `eet-lab`."""
    if words == ["--here"]:
        print(json.dumps({name: asdict(serve(workload)) for name, workload in streams().items()}))
        return 0
    try:
        text = json.dumps(asdict(allocator_here()), indent=1)
        if words:
            Path(words[0]).write_text(text + "\n", encoding="utf-8")
        else:
            print(text)
    except (EETError, OSError) as error:
        print(f"eet-lab: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
