"""Do identical comparisons say the same? Compares and ladders of one workload again and again, and what they told.

    python benchmarks/noise.py [--model demo] [--compares 5] [--ladders 3] [--new-tokens 64]

Exits 1 where a verdict changed from one to the next.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eet_lab import load
from eet_lab.bench import Change, Comparison, Ladder, compare, ladder
from eet_lab.bench.workloads import DEMO_PROMPTS


def changes_of(result: Comparison | Ladder) -> Iterator[tuple[str, str, Change]]:
    """Each change of a result: its name, the key of its metric, and itself."""
    if isinstance(result, Comparison):
        yield from ((key, key, change) for key, change in result.changes.items())
        return
    for how, rungs in (("+", result.rungs[1:]), ("all but", result.left_out)):
        for rung in rungs:
            yield from ((f"{how} {rung.technique} {key}", key, change) for key, change in rung.changes.items())


def repeat(kind: str, number: int, once: Callable[[Callable[[Any], None]], Comparison | Ladder]) -> bool:
    """Whether all said the same."""
    verdicts: dict[str, list[str]] = {}
    for index in range(number):
        seen: list[float] = []
        start = time.perf_counter()
        result = once(lambda partial: seen.append(time.perf_counter()))  # noqa: B023  called before the next one
        print(
            f"\n{kind} {index + 1}: {time.perf_counter() - start:.1f} s, first told at {seen[0] - start:.1f} s",
            flush=True,
        )
        for name, key, change in changes_of(result):
            print(f"  {name}: {change.words(key)}", flush=True)
            verdicts.setdefault(name, []).append(change.verdict)
    changed = {name: found for name, found in verdicts.items() if len(set(found)) > 1}
    print(
        f"\n{kind}: {len(verdicts) - len(changed)} of {len(verdicts)} verdicts are the same {number} times.", *changed
    )
    return not changed


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--compares", type=int, default=5)
    parser.add_argument("--ladders", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    model = load(args.model)
    prompts = list(DEMO_PROMPTS[1::2]) if args.model == "demo" else None
    how = {"max_new_tokens": args.new_tokens, "temperature": 0.6}
    same = [
        repeat("compare", args.compares, lambda tell: compare(model, prompts, on_partial=tell, **how)),
        repeat("ladder", args.ladders, lambda tell: ladder(model, prompts, on_partial=tell, **how)),
    ]
    return 0 if all(same) else 1


if __name__ == "__main__":
    raise SystemExit(main())
