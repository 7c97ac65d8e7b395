"""Build the kernels, check every case, look for bad memory accesses, and time them beside PyTorch's own.

    python benchmarks/check_kernels.py [build] [check] [sanitize] [bench] [step] [--kernel NAME]... [--out FOLDER]

`sanitize` looks at the launches of all sources in csrc/, or of those that --kernel names. Needs an NVIDIA GPU. Rows go
to FOLDER/<gpu>.jsonl; what failed, to the end of the output, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn.attention import sdpa_kernel

from eet_lab.bench.op_workloads import TIMED_CASES, OpWorkload
from eet_lab.bench.ops import EXACT, NO_ROOM, benchmark_op
from eet_lab.bench.rows import OURS, Row, append
from eet_lab.bench.timing import Timed
from eet_lab.errors import EETError
from eet_lab.ops import cuda, native
from eet_lab.ops.cases import Case
from eet_lab.ops.records import ALL_CASES
from eet_lab.ops.shapes import AttentionShape, LinearShape, Shape, copied
from eet_lab.ops.types import fresh

HOME = Path(__file__).resolve().parents[1]
RECORD, PLAY = (str(HOME / "benchmarks" / "sanitize" / name) for name in ("record.py", "play.py"))


def cold_build_s() -> float:
    """Seconds until every kernel is there from an empty cache, with Python's start; prints when each was."""
    command = "from eet_lab.ops import native; import time; t = time.time()\n"
    command += "native.build(progress=lambda d, n, m: print(f'{time.time() - t:6.2f} s  {d}/{n} {m}', flush=True))"
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        variables = {"XDG_CACHE_HOME": folder, "PYTHONPATH": str(HOME)}
        subprocess.run([sys.executable, "-c", command], env=os.environ | variables, check=True)
        return time.perf_counter() - began


def build() -> list[str]:
    """Cold, in an empty cache."""
    seconds = cold_build_s()
    print(f"cold build, with Python's start: {seconds:.1f} s")
    return [] if seconds < 20 else [f"a cold build took {seconds:.1f} s"]


def check() -> list[str]:
    """Every case, shape and type against the reference."""
    failed: list[str] = []
    num, worst = 0, dict[tuple[str, torch.dtype], tuple[float, str]]()
    for case in ALL_CASES:
        for shape in case.shapes:
            for dtype in case.dtypes:
                num += 1
                try:
                    error, budget = checked(case, shape, dtype)
                    share = error / budget if budget else 0.0
                    worst[case.name, dtype] = max(worst.get((case.name, dtype), (0, "")), (share, str(shape)))
                except EETError as problem:
                    failed.append(f"{case.name}/{shape} {dtype}: {problem}")
        torch.cuda.synchronize()
    for (name, dtype), (share, shape) in worst.items():
        print(f"{name:28} {dtype!s:16} worst error {share:5.1%} of its budget, at {shape}")
    print(f"{num} checks, {len(failed)} failed")
    return failed


def checked(case: Case, shape: Shape, dtype: torch.dtype) -> tuple[float, float]:
    """The error of our kernel and its budget."""
    with sdpa_kernel(EXACT):
        return case.check(getattr(cuda, case.op), shape, "cuda", dtype)


def sanitize(kernels: Sequence[str]) -> list[str]:
    """compute-sanitizer's tools on every case's small shapes, in processes without PyTorch (sanitize/). racecheck
    looks at the launches of one source at a time, so that what it cannot follow does not hide the others; it does not
    see that __syncwarp() orders reads, so for it rings are built to let every lane arrive (EET_RACECHECK).
    `kernels`: launches of these sources alone, by each tool one source at a time.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain, told = (str(Path(folder) / name) for name in ("plain", "told"))
        if subprocess.run([sys.executable, RECORD, plain, told, *kernels], check=False).returncode:
            return ["launches could not be recorded"]
        runs = [(plain, tool, name) for name in kernels or [""] for tool in ("memcheck", "initcheck")]
        runs += [(told, "racecheck", name) for name in kernels or native.all_names()]
        with ThreadPoolExecutor(4) as pool:  # most of their time is the processor's
            return [problem for found in pool.map(lambda run: sanitized(*run), runs) for problem in found]


def sanitized(record: str, tool: str, kernel: str) -> list[str]:
    """One run, of the launches of this source alone, or of all."""
    began = time.perf_counter()
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3"]
    command += [sys.executable, PLAY, record, *([kernel] if kernel else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    what, played = kernel or "all kernels", [line for line in done.stdout.splitlines() if line.endswith(" launches")]
    told = f"exit {done.returncode} in {time.perf_counter() - began:.0f} s: {[*played, *lines[-1:]]}"
    print(f"{tool}, {what}: {told}", flush=True)
    if not done.returncode:
        return []
    return ["\n".join([f"{tool}, {what}", *lines[:60], *done.stdout.splitlines()[-5:], done.stderr[-500:]])]


def bench(folder: Path) -> list[str]:
    """Every bench shape in fp16, ours beside others: `eet-lab bench op:<case>` for all of them."""
    failed = []
    for case in TIMED_CASES:
        for shape in case.bench:
            rows, remarks = benchmark_op(OpWorkload(case, shape), device="cuda", dtype="float16")
            append(rows, folder)
            failed += [f"{each.workload}: {each.equality}" for each in rows if is_wrong(each)]
            told = (f"{row.provider} {row.total_ms.p50 * 1e3:.2f} us {row.gb_per_s:.0f} GB/s" for row in rows)
            print(f"{case.name}/{shape}".ljust(58), *told, *remarks, sep="  ", flush=True)
            torch.cuda.empty_cache()
    return failed


def is_wrong(row: Row) -> bool:
    """Whether ours did not pass; that there was no room to look is no failure."""
    return row.provider == OURS and row.equality not in ("passed", NO_ROOM)


def step(L: int = 48, C: int = 1600, kv: int = 256) -> list[str]:
    """All ops of GPT-2 XL's decode step but the smallest, with weights of their own: what a token can cost."""
    half = torch.float16
    for B in (1, 8):
        qkv_w, fc_1 = (
            LinearShape(B, n, C, act).inputs("cuda", half, 0) for n, act in ((3 * C, None), (4 * C, "gelu_tanh"))
        )
        proj, fc_2 = (LinearShape(B, C, n, residual=True).inputs("cuda", half, 0) for n in (C, 4 * C))
        head = LinearShape(B, 50257, C, bias=False).inputs("cuda", half, 0)
        attend = AttentionShape((kv,) * B, C // 64, C // 64, 64, decode=True).inputs("cuda", half, 0)
        layers = [tuple(copied(part) for part in (qkv_w, attend, proj, fc_1, fc_2)) for _ in range(L)]

        def token(layers: Any = layers, head: Any = head) -> Any:
            x = layers[0][0][0]
            for qkv_w, attend, proj, fc_1, fc_2 in layers:
                h = cuda.norm_linear(x, *qkv_w[1:], empty=fresh)
                h = cuda.attention(h, *attend[1:], empty=fresh)
                x = cuda.linear_residual(h, proj[1], x, empty=fresh)
                h = cuda.norm_linear(x, *fc_1[1:], empty=fresh)
                x = cuda.linear_residual(h, fc_2[1], x, empty=fresh)
            return cuda.norm_linear(x, *head[1:], empty=fresh)

        token()
        torch.cuda.synchronize()
        began = time.perf_counter()
        token()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        ms = Timed([token, token], "cuda").ms()
        print(
            f"GPT-2 XL shape, batch {B}, {kv} keys: {ms:.3f} ms a token, {ms * 1e3 / L:.1f} us a layer; "
            f"{host * 1e6 / (5 * L + 1):.1f} us of host time a launch without a graph"
        )
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["build", "check", "sanitize", "bench", "step"])
    parser.add_argument("--kernel", action="append", default=[], choices=native.all_names(), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    if problem := native.available("cuda"):
        print(problem)
        return 2
    actions: dict[str, Callable[[], list[str]]] = {"build": build, "check": check, "step": step}
    actions |= {"sanitize": lambda: sanitize(args.kernel), "bench": lambda: bench(args.out)}
    failed = [problem for what in args.what for problem in actions[what]()]
    print("\n".join(failed[:60]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
