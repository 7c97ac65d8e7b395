"""How training scales over the GPUs of one machine: the same rows on each, one process a GPU, gradients summed.

    python benchmarks/ranks.py                              gpt2, 8 rows of 1,024 tokens a GPU, on one and all GPUs
    python benchmarks/ranks.py train:gpt2/b64/s1024 --ranks 1 2 --append benchmarks
    python benchmarks/ranks.py train:demo/b2/s16 --recipe baseline --device cpu       one and two processes of a CPU

Weak scaling: tokens a second of all ranks together, over those of one rank times their number. The loss and the norm of
the gradients of all ranks' rows are held against those of plain PyTorch in fp32 in one process, before any timing. With
`captured_steps` gradients are summed after a pass, and without it while the pass makes the next ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from eet_lab.bench import timing
from eet_lab.bench.cost import arithmetic
from eet_lab.bench.gradients import Fp32Reference, by_checkpoint_names
from eet_lab.bench.measured import Spread
from eet_lab.bench.rows import OURS, Row, append, digits, percent, taken
from eet_lab.bench.run_memory import kept_for_graphs
from eet_lab.bench.training import STEPS, Batch
from eet_lab.bench.workloads import TrainBatch
from eet_lab.devices import default_device
from eet_lab.models import load
from eet_lab.technique import Recipe
from eet_lab.training import Trainer, launch
from eet_lab.words import aligned

WARM_UP = 4
"""Steps: the first one runs as it is, the second is captured."""
RECIPES = ("all", "all,-captured_steps")


class Found(NamedTuple):
    """What the first rank tells of a recipe."""

    recipe: str
    step_ms: list[float]
    peak_bytes: int | None
    loss: float
    grads: dict[str, torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a loss or a gradient is not that of one process."""
    args = arguments(argv)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nor do ranks take a GPU
    rows = list[Row]()
    for num_ranks in dict.fromkeys(args.ranks):
        whole = replace(args.workload, rows=args.workload.rows * num_ranks)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "found.pt"
            launch(measure, num_ranks, whole, args.recipe, args.device, args.dtype, args.repeats, path)
            found = [Found(*each) for each in torch.load(path)]
        rows += rows_of(found, whole, num_ranks, args)
        print(f"{num_ranks} of {', '.join(map(str, args.ranks))} ranks", file=sys.stderr, flush=True)
    print("\n".join(table(rows, args.ranks)))
    if args.append:
        print(f"appended to {', '.join(map(str, append(rows, args.append)))}")
    return 0 if all(row.equality == "passed" for row in rows) else 1


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for, with its defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="train:gpt2/b8/s1024", help="the rows of each rank")
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 1, and as many as there are GPUs, or 2 of a CPU")
    parser.add_argument("--recipe", action="append", help="may be given several times (default: all, and eager steps)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default_device())
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16, float32 on a CPU"
    )
    parser.add_argument("--repeats", type=int, default=4, help=f"runs of {STEPS} steps each (default: 4)")
    parser.add_argument("--append", type=Path, metavar="DIR", help="add the rows to DIR/<gpu>.jsonl")
    args = parser.parse_args(argv)
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    args.workload, args.recipe = TrainBatch.parse(args.workload), args.recipe or RECIPES
    args.dtype = args.dtype or ("bfloat16" if gpus else "float32")
    args.ranks = args.ranks or [1, gpus or 2]
    if min(args.ranks) < 1 or (gpus and max(args.ranks) > gpus):
        parser.error(f"--ranks is {args.ranks}, but it must be from 1 to the number of GPUs, here {gpus}.")
    return args


def batch_of(workload: TrainBatch, device: str, dtype: str) -> Batch:
    """The rows of all ranks, with a model of this process."""
    return Batch.of(workload, load(workload.model, device=device, dtype=dtype))


def measure(workload: TrainBatch, recipes: Sequence[str], device: str, dtype: str, repeats: int, path: Path) -> None:
    """In each rank: what `Found` has, which the first one writes."""
    batch, found = batch_of(workload, device, dtype), []
    for words in recipes:
        recipe = Recipe.parse(words, device, batch.network.config.in_training)
        loss, grads = gradients_of(Trainer(batch.network, recipe.parts), batch)
        step_ms, peak = timed(batch.trainer(recipe.parts), batch, device, repeats)
        found.append((str(recipe), step_ms, peak, loss, grads))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(found, path)


def gradients_of(trainer: Trainer, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradient of all ranks, on the CPU."""
    loss, grads = trainer.gradients(batch.examples)
    return loss, {name: grad.cpu() for name, grad in by_checkpoint_names(trainer, grads).items()}


def timed(trainer: Trainer, batch: Batch, device: str, repeats: int) -> tuple[list[float], int | None]:
    """Milliseconds a step of each run, and the most bytes that were allocated."""

    def run(num_steps: int) -> None:
        [*trainer.steps(repeat(batch.examples, num_steps))]
        if device == "cuda":
            torch.cuda.synchronize()

    run(WARM_UP)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_ms = [timing.on_host(partial(run, STEPS)).seconds / STEPS * 1e3 for _ in range(repeats)]
    return step_ms, torch.cuda.max_memory_allocated() + kept_for_graphs() if device == "cuda" else None


def rows_of(found: list[Found], whole: TrainBatch, num_ranks: int, args: argparse.Namespace) -> list[Row]:
    """A row for each recipe. Peak bytes are those of the first rank, its model among them."""
    batch = batch_of(whole, args.device, args.dtype)
    reference = Fp32Reference(batch.network, batch.examples)
    rows = []
    for each in found:
        spread = Spread.of(each.step_ms)
        row = taken(
            args.device, workload=f"{args.workload}/ranks{num_ranks}", provider=OURS, recipe=each.recipe,
            dtype=args.dtype, total_ms=spread, peak_bytes=each.peak_bytes,
            equality=reference.errors(each.loss, each.grads).verdict(reference.budget),
            tok_s=batch.num_tokens / spread.p50 * 1e3,
            **arithmetic(batch.num_flops / num_ranks, spread.p50, args.device, batch.network.dtype),
        )  # fmt: skip
        rows.append(row)
    del batch
    if args.device == "cuda":
        torch.cuda.empty_cache()  # ranks to come use this GPU
    return rows


def table(rows: Sequence[Row], ranks: Sequence[int]) -> list[str]:
    """Each row, and what share of the first count's speed a rank has."""
    lines = [["workload", "recipe", "ms a step", "tok/s", "weak scaling", "MFU", "loss and gradient"]]
    first = {row.recipe: row.tok_s or 0 for row in reversed(rows) if row.workload.endswith(f"/ranks{ranks[0]}")}
    for row in rows:
        count = int(row.workload.rpartition("ranks")[2])
        share = (row.tok_s or 0) / first[row.recipe] * ranks[0] / count
        ms = digits(row.total_ms and row.total_ms.p50)
        lines.append(
            [row.workload, row.recipe, ms, digits(row.tok_s), f"{share:.0%}", f"{percent(row.mfu)} %", row.equality]
        )
    return aligned(lines)


if __name__ == "__main__":
    sys.exit(main())
