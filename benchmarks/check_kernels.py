"""Build the kernels, check every case, look for bad memory accesses, and time them beside PyTorch's own.

    python benchmarks/check_kernels.py [build] [check] [sanitize] [bench] [--out FOLDER]

Needs an NVIDIA GPU. Rows go to FOLDER/<gpu>.jsonl; what failed, to the end of the output, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from eet_lab.bench import Spread
from eet_lab.bench.cost import streaming_gb_per_s
from eet_lab.bench.rows import Row, append, taken
from eet_lab.errors import EETError
from eet_lab.ops import cuda, native
from eet_lab.ops.cases import CASES, Case
from eet_lab.ops.shapes import AttentionShape, LinearShape, Shape, copied
from eet_lab.ops.types import fresh
from eet_lab.paths import csrc_dir

HOME = Path(__file__).resolve().parents[1]
ROTATED_BYTES = 256 << 20  # several times the L2 cache, so that every launch reads from memory
MAX_COPIES = 48
REGION_S = 0.1
REFERENCE = [
    SDPBackend.MATH,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
]  # the sanitizer faults cuDNN's
OUR_KERNELS = sorted(
    {name for file in csrc_dir().glob("*.cu") for name in re.findall(r"\w+_kernel\b", file.read_text())}
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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


def check(small: bool = False) -> list[str]:
    """Every case, shape and type against the reference."""
    failed: list[str] = []
    num, worst = 0, dict[tuple[str, torch.dtype], tuple[float, str]]()
    for case in CASES:
        for shape in case.shapes:
            if small and shape.read_bytes(2) > 200_000:
                continue
            for dtype in DTYPES:
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
    with sdpa_kernel(REFERENCE):
        return case.check(getattr(cuda, case.op), shape, "cuda", dtype)


def sanitize() -> list[str]:
    """compute-sanitizer on the smallest shapes; torch's caching would hide overruns."""
    failed = []
    for tool in ("memcheck", "racecheck"):
        began = time.perf_counter()
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "3",
            "--kernel-regex",  # ours; racecheck does not follow the asynchronous copies of cuBLAS's
            f"kns=({'|'.join(OUR_KERNELS)})",
            sys.executable,
            __file__,
            "check",
            "--small",
        ]
        env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        print(f"{tool}: exit {done.returncode} in {time.perf_counter() - began:.0f} s: {lines[-1:]}")
        if done.returncode:
            failed.append("\n".join([tool, *lines[:40], *done.stdout.splitlines()[-5:], done.stderr[-500:]]))
    return failed


def graph_ms(calls: list[Callable[[], Any]]) -> list[float]:
    """Milliseconds a call when all calls are replayed as one CUDA graph, over several regions of 100 ms."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def region(replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / replays / len(kept)

    region(2)
    replays = max(1, int(REGION_S * 1e3 / (region(2) * len(kept))))
    return sorted(region(replays) for _ in range(5))


def providers(case: Case, inputs: tuple[Any, ...], shape: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to do the same: ours, and PyTorch's."""
    yield "eet_lab", lambda: case.call(getattr(cuda, case.op), inputs, fresh)
    if isinstance(shape, LinearShape):
        x, w = inputs[0], inputs[1] if shape.residual else inputs[2]
        yield "torch-linear", lambda: F.linear(x, w.weight, w.bias)
        if shape.residual:
            yield "torch-linear-add", lambda: F.linear(x, w.weight, w.bias) + inputs[2]
        else:
            norm = inputs[1]
            gelu = (lambda y: F.gelu(y, approximate="tanh")) if shape.act else (lambda y: y)
            yield (
                "torch-norm-linear",
                lambda: gelu(F.linear(F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias), w.weight, w.bias)),
            )
        return
    if shape.masked:
        return
    qkv, kv, step = inputs[:3]
    k, v = kv.room(step)
    q = qkv.view(len(shape.lengths), -1, shape.H + 2 * shape.G, shape.D)[:, :, : shape.H].transpose(1, 2)

    def sdpa(backend: SDPBackend) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=not shape.decode, enable_gqa=shape.H > shape.G)

    yield "torch-sdpa-flash", lambda: sdpa(SDPBackend.FLASH_ATTENTION)
    yield "torch-sdpa-cudnn", lambda: sdpa(SDPBackend.CUDNN_ATTENTION)


def bench(folder: Path) -> list[str]:
    """Every bench shape in fp16, providers side by side."""
    failed = []
    for case in CASES:
        for shape in case.bench:
            size = shape.read_bytes(2)
            equality = {"eet_lab": _equality(case, shape)}
            failed += [why for why in equality.values() if why != "passed"]
            num = min(MAX_COPIES, -(-ROTATED_BYTES // size) + 1)
            first = shape.inputs("cuda", torch.float16, 0)
            copies = [first, *(copied(first) for _ in range(num - 1))]
            line = f"{case.name}/{shape}".ljust(58)
            for all_calls in zip(*(providers(case, inputs, shape) for inputs in copies), strict=True):
                name = all_calls[0][0]
                try:
                    ms = graph_ms([call for _, call in all_calls])
                except RuntimeError as error:
                    line += f" {name} failed: {str(error)[:60]}"
                    continue
                append([_row(f"op:{case.name}/{shape}", name, ms, size, equality.get(name, "not checked"))], folder)
                line += f" {name.removeprefix('torch-')} {ms[2] * 1e3:.2f} us ({size / ms[2] / 1e9:.2f} TB/s)"
            print(line, flush=True)
            del copies, first, all_calls
            torch.cuda.empty_cache()
    decoder_step()
    return failed


def _equality(case: Case, shape: Shape) -> str:
    """ "passed", or why not."""
    try:
        checked(case, shape, torch.float16)
    except EETError as problem:
        return str(problem)
    except torch.OutOfMemoryError:
        return f"not checked: {case.name}/{shape} leaves no room for the reference in fp64"
    return "passed"


def _row(workload: str, provider: str, ms: list[float], size: int, equality: str) -> Row:
    return Row(
        workload=workload,
        provider=provider,
        recipe="",
        dtype="float16",
        ttft_ms=None,
        tpot_ms=None,
        total_ms=Spread(*(round(each, 6) for each in ms[1:4])),  # more digits than Spread.of keeps
        peak_bytes=None,
        floor_ms=round(size / streaming_gb_per_s("cuda") / 1e6, 6),
        gb_per_s=round(size / ms[2] / 1e6, 3),
        launches_per_token=None,
        equality=equality,
        same_tokens=None,
        **taken("cuda"),
    )


def decoder_step(L: int = 48, C: int = 1600, kv: int = 256) -> None:
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

        def step(layers: Any = layers, head: Any = head) -> Any:
            x = layers[0][0][0]
            for qkv_w, attend, proj, fc_1, fc_2 in layers:
                h = cuda.norm_linear(x, *qkv_w[1:], empty=fresh)
                h = cuda.attention(h, *attend[1:], empty=fresh)
                x = cuda.linear_residual(h, proj[1], x, empty=fresh)
                h = cuda.norm_linear(x, *fc_1[1:], empty=fresh)
                x = cuda.linear_residual(h, fc_2[1], x, empty=fresh)
            return cuda.norm_linear(x, *head[1:], empty=fresh)

        step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        ms = graph_ms([step, step])[2]
        print(
            f"GPT-2 XL shape, batch {B}, {kv} keys: {ms:.3f} ms a token, {ms * 1e3 / L:.1f} us a layer; "
            f"{host * 1e6 / (5 * L + 1):.1f} us of host time a launch without a graph"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["build", "check", "sanitize", "bench"])
    parser.add_argument("--small", action="store_true", help="check only the smallest shapes")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    if problem := native.available("cuda"):
        print(problem)
        return 2
    actions = {"build": build, "check": lambda: check(args.small), "sanitize": sanitize}
    actions["bench"] = lambda: bench(args.out)
    failed = [problem for what in args.what for problem in actions[what]()]
    print("\n".join(failed[:60]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
