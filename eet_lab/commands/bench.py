"""`eet-lab bench`: time recipes, and peers beside them, on a named workload."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from eet_lab.commands.arguments import add_model, load_model
from eet_lab.commands.command import Command
from eet_lab.commands.terminal import ProgressLine, stoppable
from eet_lab.errors import Cancelled, SetupError

if TYPE_CHECKING:
    from eet_lab.bench.rows import Row

GUIDE = """\
Times recipes on a workload of random prompts and, with --provider, Hugging Face transformers beside them, with the
same weights and prompts. All are checked first, then run in turn in one process.

A workload is model/b<rows>/p<prompt tokens>/n<new tokens>; a range of prompt tokens makes the batch ragged:

  eet-lab bench gpt2/b1/p128/n128                                    everything on
  eet-lab bench gpt2/b8/p16-512/n128 --recipe baseline --recipe pre_padding --recipe all
  eet-lab bench gpt2-xl/b1/p128/n128 --provider eet_lab --provider hf-static-compile
  eet-lab bench demo/b4/p4-32/n32 --provider eet_lab --provider hf-sdpa --append benchmarks

Providers: eet_lab, hf-eager, hf-sdpa; on a GPU also hf-static-compile, hf-max-autotune and torch-cuda-graphs (plain
PyTorch, its decode step captured by hand). TTFT is when the last row has its first token, TPOT the time per token after
it. --append adds a JSON line for each to <gpu>.jsonl in that folder.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("workload", help="for example gpt2/b8/p16-512/n128")
    parser.add_argument("--recipe", action="append", metavar="WORDS", help="may be given several times (default: all)")
    parser.add_argument(
        "--provider", action="append", metavar="NAME", help="may be given several times (default: eet_lab)"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measured runs of each (default: 5)")
    parser.add_argument("--append", type=Path, metavar="DIR", help="add the rows to DIR/<gpu>.jsonl")
    add_model(parser, default=None)


def run(args: argparse.Namespace) -> int:
    """Race and print; 130 when stopped."""
    from eet_lab.bench.progress import Clock
    from eet_lab.bench.race import race
    from eet_lab.bench.rows import append
    from eet_lab.bench.workloads import Workload

    workload, line = Workload.parse(args.workload), ProgressLine(Clock())
    if args.append:
        append((), args.append)  # makes the folder: one that cannot be made is told before any work
    model = load_model(args, workload.model)
    try:
        with stoppable() as stop:
            rows, remarks = race(
                model,
                workload,
                args.recipe or ["all"],
                args.provider or ["eet_lab"],
                repeats=args.repeats,
                progress=line,
                cancel=stop,
            )
    except Cancelled:
        print("Stopped.")
        return 130
    finally:
        line.clear()
    if not rows:
        raise SetupError(f"Nothing could be timed. {'; '.join(remarks)}")
    print(table(rows))
    for remark in remarks:
        print(remark)
    if args.append:
        print(f"appended to {', '.join(map(str, append(rows, args.append)))}")
    return 0


def table(rows: list[Row]) -> str:
    """One line for each row."""
    from eet_lab.bench.tables import aligned

    head = ["", "TTFT ms", "TPOT ms", "total ms", "floor ms", "predicted ms", "GB/s", "% of ceiling"]
    cells = [[*head, "launches", "kernels", "peak MiB", "same output"]]
    for row in rows:
        name = row.recipe if row.provider == "eet_lab" else row.provider
        spreads = (row.ttft_ms, row.tpot_ms, row.total_ms)
        times = [f"{s.p50:.4g} ({s.p20:.4g}–{s.p80:.4g})" if s else "–" for s in spreads]
        share = row.share_of_ceiling and 100 * row.share_of_ceiling
        bound = [_number(number, ".4g") for number in (row.floor_ms, row.predicted_ms, row.gb_per_s)]
        counts = [_number(number, ".0f") for number in (share, row.launches_per_token, row.kernels_per_token)]
        peak = _number(row.peak_bytes and row.peak_bytes / 2**20, ".1f")
        cells.append([name, *times, *bound, *counts, peak, row.equality])
    where = f"{rows[0].workload}, {rows[0].dtype} on {rows[0].gpu}"
    return "\n".join([where, "", *aligned(cells), "", legend(rows[0])])


def legend(row: Row) -> str:
    """What the columns mean, with the numbers of this device."""
    from eet_lab.bench.cost import launch_cost

    lines = [
        f"The ceiling is {row.ceiling_gb_per_s:.4g} GB/s, what a streaming read reaches here; the floor is what a step "
        "must read at that rate."
    ]
    cost = launch_cost("cuda" if row.gpu.startswith("NVIDIA") else "cpu")
    if cost is not None:
        lines.append(
            f"Predicted TPOT: the floor and {cost.kernel_us:.3g} us for each kernel, or {cost.launch_us:.3g} us of the "
            "host for each launch if that is more; a graph is one launch."
        )
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


COMMAND = Command("bench", "time recipes on a named workload, and Hugging Face if wanted", GUIDE, add_arguments, run)
