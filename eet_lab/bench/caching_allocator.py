"""The peer: what torch's caching allocator really does with a stream of requests, on a GPU.

    python -m eet_lab.bench.caching_allocator            prints what it found here, as JSON
    python -m eet_lab.bench.caching_allocator FILE       writes it

Each tensor of a request is allocated when it is made and freed when it was last used, with nothing computed. The
allocator is set up once in a process, so each setting has a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from eet_lab.bench.measured import device_name, versions
from eet_lab.bench.run_memory import driver_calls
from eet_lab.codec import decode, parse
from eet_lab.errors import EETError
from eet_lab.memory import Lifetime
from eet_lab.memory.workloads import Workload, eet_sweep, turbo_artifact
from eet_lab.paths import PACKAGE

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
def here() -> AllocatorTrace:
    """Measured now, each setting in a process of its own; EETError without a GPU."""
    if not torch.cuda.is_available():
        raise EETError("torch sees no NVIDIA GPU here, and its caching allocator serves GPUs only.")
    found = {setting: _in_its_own_process(value) for setting, value in SETTINGS.items()}
    by_stream = {name: {setting: found[setting][name] for setting in SETTINGS} for name in streams()}
    about = versions("cuda")
    return AllocatorTrace(device_name("cuda"), about["torch"], about["date"], by_stream)


def _in_its_own_process(value: str) -> dict[str, Cached]:
    env = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    env |= dict.fromkeys(VARIABLES, value) if value else {}
    command = [sys.executable, "-m", "eet_lab.bench.caching_allocator", "--here"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EETError(f"The allocator with {value or 'its defaults'} could not be tried: {done.stderr.strip()[-500:]}")
    return decode(dict[str, Cached], parse(done.stdout.encode()))


def recorded() -> AllocatorTrace:
    """What another machine found, which comes with the package."""
    return decode(AllocatorTrace, parse(RECORDED.read_bytes()))


def main(words: Sequence[str]) -> None:
    """What the module does when it is run."""
    if words == ["--here"]:
        print(json.dumps({name: asdict(serve(workload)) for name, workload in streams().items()}))
        return
    text = json.dumps(asdict(here()), indent=1)
    if words:
        Path(words[0]).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
