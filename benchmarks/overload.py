"""More requests than a server can answer: none may be lost, its memory must not grow, refusals must be quick. No GPU.

    python benchmarks/overload.py
    python benchmarks/overload.py --requests 2000 --out overload.json

A server of a small model in a process of its own is found out first: requests that are all there at once tell its
capacity. Then they come at 1.5 times of it. Memory is the resident set of the server's processes: the most that they
held in the last quarter, against the most in the one before.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from eet_lab.bench.measured import device_name, versions
from eet_lab.scheduling.traffic import Gamma, Uniform, make_traffic
from eet_lab.serving.load import Loaded, run_load
from eet_lab.words import MiB, plain

LENGTHS, ANSWERS = Uniform(5, 30), Uniform(2, 8)
RATE_OF_ALL = 1e9
"""Requests a second that are as good as all at once."""
OVERLOAD = 1.5
TRIED = 300
LOOK_S = 0.2
REFUSED_MS, GROWN_BYTES = 10.0, 8 * MiB
"""What a refusal may take at p99, and what memory may grow by."""


def main(argv: list[str] | None = None) -> int:
    """Print what came; 1 where something was lost, memory grew, or refusals took long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--queued", type=int, default=64, help="max_queued_requests of the server")
    parser.add_argument("--rows", type=int, default=16, help="requests that are served at once")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON too")
    args = parser.parse_args(argv)
    options = ["--recipe", f"all,continuous_batching:rows={args.rows}", "--max-queued-requests", str(args.queued)]
    with server("--model", args.model, *options) as (url, process):
        capacity = found_capacity(url, args.queued)
        traffic = make_traffic(args.requests, Gamma(OVERLOAD * capacity), LENGTHS, ANSWERS)
        with memory_of(process) as held:
            loaded = run_load(url, traffic, timeout_s=120, apart=True)
        found = judged(loaded, held) | {"capacity_per_s": capacity, "url": ""}
    print(loaded.report())
    print(f"Capacity: {plain(capacity)} requests/s. Memory of the last two quarters, MiB: {found['held_mib']}.")
    print("; ".join(found["wrong"]) or "Nothing was lost, memory is flat, refusals are quick.")
    if args.out:
        found |= {"device": device_name("cpu"), **versions("cpu")}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["wrong"] else 0


@contextmanager
def server(*options: str, device: str = "cpu", max_model_len: int = 64) -> Iterator[tuple[str, psutil.Process]]:
    """The URL of a server that lasts as long as the block, and its process. `options` are those of `eet-lab serve`."""
    command = [sys.executable, "-m", "eet_lab", "serve", "--device", device, "--port", "0"]
    command += ["--max-model-len", str(max_model_len), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            url = re.search(r"http://\S+(?=;)", child.stdout.readline())
            assert url is not None, "the server did not say where it is"
            yield url[0], psutil.Process(child.pid)
        finally:
            child.terminate()
            child.wait(60)


def found_capacity(url: str, queued: int) -> float:
    """Requests a second, of as many at once as the server takes, time after time; the best of them."""
    best = 0.0
    for seed in range(-(-TRIED // queued)):
        best = max(best, run_load(url, make_traffic(queued, Gamma(RATE_OF_ALL), LENGTHS, ANSWERS, seed)).requests_per_s)
    return best


@contextmanager
def memory_of(process: psutil.Process) -> Iterator[list[int]]:
    """The resident bytes of it and its front now and then, as long as the block lasts."""
    held, is_over = list[int](), threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            held.append(sum(each.memory_info().rss for each in (process, *process.children())))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield held
    finally:
        is_over.set()
        thread.join()


def judged(loaded: Loaded, held: list[int]) -> dict[str, Any]:
    """The numbers, and what is wrong about them."""
    quarter = max(len(held) // 4, 1)
    before, after = max(held[-2 * quarter : -quarter] or held), max(held[-quarter:])
    found: dict[str, Any] = loaded.summary() | {"held_mib": [round(each / MiB, 1) for each in (before, after)]}
    slow = found["refusal_ms"].get("p99", 0.0)
    checks = {
        f"{loaded.counts['lost']:,} were lost and {loaded.counts['failed']:,} failed": loaded.counts["lost"]
        + loaded.counts["failed"],
        f"memory grew by {plain((after - before) / MiB)} MiB": after - before > GROWN_BYTES,
        f"refusals took {plain(slow)} ms (p99)": slow > REFUSED_MS,
        "nothing was refused": not loaded.counts["refused"],
    }
    return found | {"wrong": [what for what, is_wrong in checks.items() if is_wrong]}


if __name__ == "__main__":
    sys.exit(main())
