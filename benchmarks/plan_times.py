"""What planning costs: every pool places a real request of GPT-2 XL, which is traced on meta tensors. No GPU.

    python benchmarks/plan_times.py
    python benchmarks/plan_times.py --model gpt2 --batch 8 --prompt 512 --out plan_times.json

The request is 8 prompts of 512 tokens, prefill and the longest decode step one after the other, as the engine has it
placed. A time is what a pool's first `place` took, median of `--runs`; the engine asks once for each new shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from eet_lab import Engine, Recipe, Settings
from eet_lab.bench.measured import device_name, versions
from eet_lab.memory import POOLS, Lifetime, one_after_the_other
from eet_lab.models.config import PRESETS
from eet_lab.models.weights import random_decoder
from eet_lab.words import MiB

RECIPES = {
    "plain": "pre_padding",
    "no mask": "pre_padding,mask_removal",
    "fused": "pre_padding,mask_removal,fused_kernels",
}


def main() -> None:
    """Print a row for each recipe and pool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-xl", choices=PRESETS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the rows as JSON too")
    args = parser.parse_args()
    print(
        f"{'recipe':8} {'pool':18} {'prefill':>7} {'decode':>6} {'median ms':>9} {'worst':>6} {'MiB':>8} {'bound':>8}"
    )
    rows = []
    for recipe, words in RECIPES.items():
        passes = requests(args.model, words, args.batch, args.prompt, args.new_tokens)
        for name in POOLS:
            row = {"recipe": recipe, "pool": name} | timed(name, passes, args.runs)
            rows.append(row)
            print(
                f"{recipe:8} {name:18} {row['num_prefill']:7} {row['num_decode']:6} {row['median_ms']:9.2f} "
                f"{row['worst_ms']:6.2f} {row['footprint_bytes'] / MiB:8.1f} {row['lower_bound_bytes'] / MiB:8.1f}",
                flush=True,
            )
    if args.out:
        about = {"machine": device_name("cpu"), **versions("cpu")} | {k: v for k, v in vars(args).items() if k != "out"}
        args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def requests(model: str, words: str, batch: int, prompt: int, new_tokens: int) -> dict[str, tuple[Lifetime, ...]]:
    """What the two passes ask for, of a model that has shapes and no weights."""
    decoder = random_decoder(PRESETS[model], 0, torch.device("meta"), torch.float16)
    engine = Engine(decoder, Recipe.parse(words, "cuda").parts)
    return engine.lifetimes([[1] * prompt] * batch, Settings(max_new_tokens=new_tokens))


def timed(name: str, passes: dict[str, tuple[Lifetime, ...]], runs: int) -> dict[str, Any]:
    """Place one request with `runs` fresh pools."""
    prefill, decode = passes["prefill"], passes["decode"]
    request = one_after_the_other((prefill, decode))
    took_ms = []
    for _ in range(runs + 1):
        pool = POOLS[name]()
        began = time.perf_counter()
        plan = pool.place(request)
        took_ms.append((time.perf_counter() - began) * 1e3)
    del took_ms[0]  # imports
    return {
        "num_prefill": len(prefill),
        "num_decode": len(decode),
        "median_ms": statistics.median(took_ms),
        "worst_ms": max(took_ms),
        "footprint_bytes": plan.footprint_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
    }


if __name__ == "__main__":
    main()
