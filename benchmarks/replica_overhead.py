"""What Ray Serve adds to an answer: the plain server beside one replica, on this machine's CPU. Needs the extra ray.

    python benchmarks/replica_overhead.py
    python benchmarks/replica_overhead.py --requests 200 --out replica-overhead.json

Times to the first token of requests that come one by one, each long after the one before was answered (concurrency 1),
and tokens per second of 32 at once. Both servers are processes of their own, and take turns, so that what else the
machine does meets both.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from overload import server

from eet_lab.bench.measured import device_name, versions
from eet_lab.scheduling.traffic import Traffic
from eet_lab.serving.load import run_load
from eet_lab.words import aligned, plain

SERVERS = ("plain", "one replica of Ray Serve")
LENGTH, NEW_TOKENS, AT_ONCE, TURNS = 16, 16, 32, 4


def main(argv: list[str] | None = None) -> int:
    """Print both, and what Ray adds; 1 where a request was lost or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="of each server, one by one (default: 100)")
    parser.add_argument("--gap-ms", type=float, default=150.0, help="from one to the next (default: 150)")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON too")
    args = parser.parse_args(argv)
    found = measured(args.model, args.requests, args.gap_ms)
    plain_ms, ray_ms = (entry["ttft_ms"]["p50"] for entry in found.values())
    print(
        f"On {device_name('cpu')}, CPU only, {args.model}, prompts and answers of {LENGTH} and {NEW_TOKENS} tokens:\n"
    )
    print("\n".join(table(found)))
    print(f"\nRay Serve adds {plain(ray_ms - plain_ms)} ms to the first token at concurrency 1 (p50).")
    if args.out:
        about: dict[str, Any] = {"device": device_name("cpu"), **versions("cpu")}
        args.out.write_text(json.dumps({"servers": found, **about}, indent=1) + "\n")
    return 1 if any(entry["wrong"] for entry in found.values()) else 0


def measured(model: str, requests: int, gap_ms: float) -> dict[str, dict[str, Any]]:
    """The numbers of each server. Its first requests warm it, and do not count."""
    ttft: dict[str, list[float]] = {name: [] for name in SERVERS}
    rates: dict[str, list[float]] = {name: [] for name in SERVERS}
    wrong = dict.fromkeys(SERVERS, 0)
    with (
        server("--model", model) as (here, _),
        server("--model", model, *SERVERS["one replica of Ray Serve"]) as (ray, _),
    ):
        urls = dict(zip(SERVERS, (here, ray), strict=True))
        for url in urls.values():
            run_load(url, traffic(AT_ONCE, 10.0))
        for _ in range(TURNS):
            for name, url in urls.items():
                alone = run_load(url, traffic(-(-requests // TURNS), gap_ms))
                together = run_load(url, traffic(AT_ONCE, 0.0))
                ttft[name] += alone.ttft_ms.tolist()
                rates[name].append(together.tokens_per_s)
                wrong[name] += sum(each.counts["lost"] + each.counts["failed"] for each in (alone, together))
    return {
        name: {
            "ttft_ms": {f"p{share}": round(float(np.nanpercentile(ttft[name], share)), 2) for share in (50, 95, 99)},
            "tokens_per_s": round(float(np.median(rates[name])), 1),
            "wrong": wrong[name],
        }
        for name in SERVERS
    }


def traffic(requests: int, gap_ms: float) -> Traffic:
    """Requests that come evenly."""
    arrivals = np.arange(requests) * gap_ms
    return Traffic(arrivals, np.full(requests, LENGTH), np.full(requests, NEW_TOKENS), "evenly")


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """One row for each server."""
    head = ["", "TTFT p50 ms", "p95", "p99", f"tokens/s, {AT_ONCE} at once"]
    rows = [
        [name, *(plain(value) for value in entry["ttft_ms"].values()), plain(entry["tokens_per_s"])]
        for name, entry in found.items()
    ]
    return aligned([head, *rows])


if __name__ == "__main__":
    sys.exit(main())
