"""What Ray Serve adds to an answer, and what more replicas bring, beside the plain server. Needs the extra ray.

    python benchmarks/replica_overhead.py                          one replica, on this machine's CPU
    python benchmarks/replica_overhead.py --replicas 2 --out replica-overhead.json
    python benchmarks/replica_overhead.py serve:llama-1b/r512/p100-1024/n100/all --device cuda --replicas 2 \\
        --recipe all,continuous_batching:rows=64:budget=2048:chunk=1024 --append benchmarks

Times to the first token of requests that come one by one, each long after the one before was answered (concurrency 1),
and tokens per second of a workload that is all there at once. One replica, and then all of them, take turns with the
plain server, so that what else the machine does meets both: all servers are processes of their own, a GPU or a core for
each replica. Requests come from other processes, and the share of a core that the busiest of these took is told: near
100 % it would be what was measured. Requests one by one must get the texts that the plain server gives.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from overload import server

from eet_lab.bench import timing
from eet_lab.bench.measured import Spread, device_name, versions
from eet_lab.bench.rows import Row, append, digits, percent, taken
from eet_lab.bench.serving import HTTP
from eet_lab.bench.workloads import Requests
from eet_lab.models import load
from eet_lab.scheduling.served import percentiles
from eet_lab.scheduling.traffic import Traffic
from eet_lab.serving.load import Loaded, run_load
from eet_lab.serving.service import DECODER_RECIPE
from eet_lab.texts import as_recipe
from eet_lab.threads import num_cores
from eet_lab.words import aligned, brief, counted

RAY = "eet_lab-ray"
"""Providers of rows are this and a number of replicas."""
ONE_BY_ONE = (16, 16)
"""Tokens of the prompts and answers of requests that come alone."""
WARM_UP = 0.25
"""The share of the workload that warms each server."""
SOON_S = 0.3
"""The time for what shall be sent to reach the processes that send it."""
TIMEOUT_S = 300.0


class Sent(NamedTuple):
    """What became of requests of one process, and the share of a core that it took."""

    loaded: Loaded
    share: float


@dataclass
class Found:
    """What one server did, turn after turn."""

    alone: list[Loaded] = field(default_factory=list)
    together: list[list[Sent]] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Requests that got no answer."""
        every = [*self.alone, *(each.loaded for sent in self.together for each in sent)]
        return sum(loaded.counts[how] for loaded in every for how in ("refused", "failed", "lost"))

    @property
    def texts(self) -> set[tuple[str, ...]]:
        """What requests one by one were told; once where it was the same in all turns."""
        return {loaded.texts or () for loaded in self.alone}

    @property
    def tok_s(self) -> float:
        """The median of the turns."""
        return float(np.median([*map(rate, self.together)]))

    def times(self, name: str) -> list[float]:
        """`ttft_ms`, `tpot_ms` or `e2e_ms` of all requests that came alone."""
        return finite(self.alone, name)


def rate(sent: Sequence[Sent]) -> float:
    """Tokens a second of all processes together, which began at one time."""
    told = sum(each.loaded.tokens_per_s * each.loaded.span_s for each in sent)
    return told / max(each.loaded.span_s for each in sent)


def finite(every: Sequence[Loaded], name: str) -> list[float]:
    """These times of all requests that have one."""
    times = np.concatenate([getattr(loaded, name) for loaded in every])
    return times[np.isfinite(times)].tolist()


def main(argv: Sequence[str] | None = None) -> int:
    """Print what came; 1 where a request was not answered, or was told something else."""
    args = arguments(argv)
    with ProcessPoolExecutor(args.clients, get_context("spawn")) as pool:
        found = measured(args, pool)
    rows = rows_of(found, args)
    where = f"On {device_name(args.device)}, {args.model.name}, {args.recipe}; alone"
    print(f"{where}: prompts and answers of {ONE_BY_ONE[0]} and {ONE_BY_ONE[1]} tokens; at once: {args.workload}.\n")
    print("\n".join(table(found)))
    print("\n" + "\n".join(sentences(found)))
    if args.out:
        servers = {name: summary(each) for name, each in found.items()}
        about = {"device": device_name(args.device), **versions(args.device), "workload": str(args.workload)}
        args.out.write_text(json.dumps({"servers": servers, "recipe": args.recipe, **about}, indent=1) + "\n")
    if args.append:
        print(f"appended to {', '.join(map(str, append(rows, args.append)))}")
    are_same = all(row.equality == "passed" for row in rows)
    return 0 if are_same and not any(each.wrong for each in found.values()) else 1


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for, with its defaults, and the model without its weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="serve:demo/r32/p16/n16/all", help="what is there at once")
    parser.add_argument("--replicas", type=int, default=1, help="the most replicas of Ray Serve (default: 1)")
    parser.add_argument("--recipe", default=DECODER_RECIPE, help="of all servers (default: %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16", "float32"], help="default: float16, on a CPU float32"
    )
    parser.add_argument("--requests", type=int, default=100, help="of each server, one by one (default: 100)")
    parser.add_argument("--gap-ms", type=float, default=150.0, help="from one to the next (default: 150)")
    parser.add_argument("--turns", type=int, default=4, help="of each server beside another (default: 4)")
    parser.add_argument("--clients", type=int, default=max(1, min(4, num_cores() // 4)), help="processes that send")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON too")
    parser.add_argument("--append", type=Path, metavar="DIR", help="add rows to DIR/<gpu>.jsonl")
    args = parser.parse_args(argv)
    if min(args.replicas, args.turns, args.clients) < 1 or args.requests < args.turns:
        parser.error("--replicas, --turns and --clients must be at least 1, and --requests as many as turns.")
    args.workload = Requests.parse(args.workload)
    args.clients = min(args.clients, args.workload.requests)
    args.dtype = args.dtype or ("float16" if args.device == "cuda" else "float32")
    args.model = load(args.workload.model, device="meta")
    args.recipe = str(as_recipe(args.recipe, args.device, args.model.config))
    return args


def measured(args: argparse.Namespace, pool: Executor) -> dict[str, Found]:
    """What each server did. Its first requests warm it, and do not count."""
    found = {HTTP: Found()}
    few = replace(args.workload, requests=max(args.clients, round(args.workload.requests * WARM_UP)))
    how = ["--model", args.workload.model, "--recipe", args.recipe, "--dtype", args.dtype]
    longest = max(args.workload.high + args.workload.new_tokens, sum(ONE_BY_ONE))
    for replicas in dict.fromkeys((1, args.replicas)):
        with (
            server(*how, device=args.device, max_model_len=longest) as (plain, _),
            server(*how, "--replicas", str(replicas), device=args.device, max_model_len=longest) as (ray, _),
        ):
            urls = {HTTP: plain, f"{RAY}{replicas}": ray}
            for url in urls.values():
                send_alone(pool, url, 2 * replicas, args)
                send_all(pool, url, few, args)
            for turn in range(args.turns):
                for name, url in urls.items():
                    each = found.setdefault(name, Found())
                    each.alone.append(send_alone(pool, url, -(-args.requests // args.turns), args))
                    each.together.append(send_all(pool, url, args.workload, args))
                print(f"{counted(replicas, 'replica')}: turn {turn + 1} of {args.turns}", file=sys.stderr, flush=True)
    return found


def send_alone(pool: Executor, url: str, requests: int, args: argparse.Namespace) -> Loaded:
    """Requests one by one, the same ones each time."""
    few = Requests(args.workload.model, requests, ONE_BY_ONE[0], ONE_BY_ONE[0], ONE_BY_ONE[1])
    prompts = few.prompts(args.model.config.vocab_size)
    return pool.submit(send, url, prompts, ONE_BY_ONE[1], args.gap_ms, 0.0).result().loaded


def send_all(pool: Executor, url: str, workload: Requests, args: argparse.Namespace) -> list[Sent]:
    """All requests of a workload at once, dealt to as many processes as there are."""
    prompts = workload.prompts(args.model.config.vocab_size)
    at = time.perf_counter() + SOON_S
    parts = [prompts[number :: args.clients] for number in range(args.clients)]
    return [*pool.map(send, *zip(*((url, part, workload.new_tokens, 0.0, at) for part in parts), strict=True))]


def send(url: str, prompts: Sequence[Sequence[int]], new_tokens: int, gap_ms: float, at: float) -> Sent:
    """In a process of its own: send from `at` on, by time.perf_counter(), which all processes share."""
    num = len(prompts)
    traffic = Traffic(np.arange(num) * gap_ms, np.array([*map(len, prompts)]), np.full(num, new_tokens), "evenly")
    time.sleep(max(0.0, at - time.perf_counter()))
    before = time.process_time()
    loaded = run_load(url, traffic, prompts, timeout_s=TIMEOUT_S, keep_text=True)
    return Sent(loaded, (time.process_time() - before) / loaded.span_s)


def rows_of(found: dict[str, Found], args: argparse.Namespace) -> list[Row]:
    """Two rows of each server: of the turn with the median throughput, and of requests one by one."""
    rows, texts = [], found[HTTP].texts
    alone = f"serve:{args.workload.model}/r{args.requests}/p{ONE_BY_ONE[0]}/n{ONE_BY_ONE[1]}/one"
    for name, each in found.items():
        sent = timing.median_run(each.together, rate)
        every = [one.loaded for one in sent]
        total_s = max(loaded.span_s for loaded in every)
        seconds = sum(each.times("e2e_ms")) / 1e3
        kinds = (
            (str(args.workload), every, rate(sent), Spread.of([total_s * 1e3])),
            (alone, each.alone, sum(int(one.told.sum()) for one in each.alone) / seconds, None),
        )
        for workload, loads, tok_s, total in kinds:
            times = {what: finite(loads, what) for what in ("ttft_ms", "tpot_ms", "e2e_ms")}
            row = taken(
                args.device, workload=workload, provider=name, recipe=args.recipe, dtype=args.dtype,
                ttft_ms=Spread.of(times["ttft_ms"]), tpot_ms=Spread.of(times["tpot_ms"]), total_ms=total,
                equality="passed" if len(texts | each.texts) == 1 else "one by one, others than the plain server's",
                same_tokens=len(texts | each.texts) == 1, tok_s=tok_s,
                percentiles={what: percentiles(values) for what, values in times.items()},
            )  # fmt: skip
            rows.append(row)
    return rows


def summary(found: Found) -> dict[str, object]:
    """The numbers of one server, for JSON."""
    return {
        "ttft_ms": percentiles(found.times("ttft_ms")),
        "tokens_per_s": found.tok_s,
        "of_each_turn": [*map(rate, found.together)],
        "busiest_client": max(each.share for sent in found.together for each in sent),
        "wrong": found.wrong,
    }


def table(found: dict[str, Found]) -> list[str]:
    """One line for each server."""
    lines = [["server", "TTFT p50 ms", "p95", "p99", "tokens/s at once", "of the plain one", "busiest client", "wrong"]]
    for name, each in found.items():
        ttft = percentiles(each.times("ttft_ms"))
        share = max(one.share for sent in each.together for one in sent)
        rates = [digits(each.tok_s), f"{each.tok_s / found[HTTP].tok_s:.2f} x", f"{percent(share)} % of a core"]
        lines.append([name, *map(digits, map(ttft.get, ("p50", "p95", "p99"))), *rates, str(each.wrong)])
    return aligned(lines)


def sentences(found: dict[str, Found]) -> list[str]:
    """What Ray adds to a first token, and what more replicas bring."""
    plain, one, *more = found.values()
    added = np.median(one.times("ttft_ms")) - np.median(plain.times("ttft_ms"))
    said = [f"Ray Serve adds {brief(float(added))} ms to the first token at concurrency 1 (p50)."]
    said += [f"All replicas: {each.tok_s / one.tok_s:.2f} x the tokens/s of one." for each in more]
    return said


if __name__ == "__main__":
    sys.exit(main())
