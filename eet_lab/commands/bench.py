"""`eet-lab bench`: time recipes on a named workload, or an op at named sizes, and peers beside them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eet_lab.commands.arguments import add_model, check_recipe, load_model
from eet_lab.commands.command import Command
from eet_lab.commands.terminal import followed
from eet_lab.errors import PromptError, RecipeError, ResultError, SetupError

if TYPE_CHECKING:
    from eet_lab.bench.op_workloads import OpWorkload
    from eet_lab.bench.rows import Row
    from eet_lab.bench.workloads import Workload
    from eet_lab.progress import Cancel, Progress

    Found = tuple[list[Row], list[str], str]

GUIDE = """\
Times recipes on a workload of random prompts and, with --provider, Hugging Face transformers beside them, with the
same weights and prompts. All are checked first, then run in turn in one process.

A workload is model/b<rows>/p<prompt tokens>/n<new tokens>; a range of prompt tokens makes the batch ragged:

  eet-lab bench gpt2/b1/p128/n128                                    everything on
  eet-lab bench gpt2/b8/p16-512/n128 --recipe baseline --recipe pre_padding --recipe all
  eet-lab bench gpt2-xl/b1/p128/n128 --provider eet_lab --provider hf-static-compile
  eet-lab bench demo/b4/p4-32/n32 --provider eet_lab --provider hf-sdpa --append benchmarks
  eet-lab bench serve:demo/r64/p4-64/n32/all --provider eet_lab --provider eet_lab-http
  eet-lab bench serve:demo/r16/p204-216/shared200/n8/all --recipe all,continuous_batching,prefix_caching
  eet-lab bench encode:bert-base/t256/p5-500 --recipe pre_padding --recipe all --provider eet_lab --provider hf-sdpa
  eet-lab bench train:demo/b8/s64 --recipe baseline --recipe all --provider eet_lab --provider hf-sdpa
  eet-lab bench accuracy:demo/b16/p64/n64 --provider eet_lab --provider hf-sdpa
  eet-lab bench op:decode_attention/b1/kv1024/h25/d64                one op beside PyTorch's and FlashInfer's
  eet-lab bench op:choose/b8/v50257/temp0.8/k50                      sampling from the logits of 8 rows
  eet-lab bench op:linear_cross_entropy/t8192/c768/v50257            a loss with its gradients, beside Liger's
  eet-lab bench op:norm_linear                                       all sizes that its case lists

Providers: eet_lab, hf-eager, hf-sdpa; on a GPU also hf-static-compile, hf-max-autotune, torch-cuda-graphs (plain
PyTorch, its decode step captured by hand) and torch-compile (the same, compiled before). TTFT is when the last row has
its first token, TPOT the time per token after it. Launches are what the host hands to the device for a decode step,
where a CUDA graph is one; kernels are what the device runs for it, those inside a graph too; on a CPU both are calls of
PyTorch. --append adds a JSON line for each to <gpu>.jsonl in that folder.

serve:model/r<requests>/p<prompt tokens>/n<new tokens>/all are so many requests that are all there at once, for recipes
with continuous_batching (eet_lab), for the same behind our server on this machine (eet_lab-http), and for
transformers' generate_batch (hf-generate-batch) and its server (hf-serve). n100-1024 draws a length for each. With
/shared<tokens> behind p, all prompts begin with the same tokens, which are among those of p: prefix_caching finds them.
eet_lab-http-cached is our server with a response cache, asked what it has answered before.
encode:model/t<texts>/p<tokens of each> are so many texts for an encoder, in order of arrival; its
providers are eet_lab, hf-sdpa (padded), and hf-sdpa-sorted (by length before).

accuracy:model/b<rows>/p<prompt tokens>/n<new tokens> forces held-out text on the decode steps of a trained model: how
far the distributions of the next token are from fp32 (Kullback-Leibler divergence), and how likely the text's tokens.

train:model/b<rows>[/s<tokens of each>][/d<dropout>] are steps of training on one batch, with nothing clipped; without
tokens the rows are as long as the model's context. An encoder-decoder's sources and answers both have that length.
Providers: eet_lab, hf-eager, hf-sdpa (with PyTorch's fused AdamW), hf-compile, and on a GPU hf-reduce-overhead,
hf-max-autotune and hf-liger, where Liger has kernels for the model; in 16 bits theirs are fp32 weights under autocast.
MFU is what a step must compute, as a share of what a large product of matrices reaches here.

An op is timed in a CUDA graph, on copies of its inputs that no cache holds, with every provider of it unless --provider
names some: for attention torch-sdpa-flash, torch-sdpa-cudnn, torch-sdpa-efficient, torch-varlen and flashinfer, for the
others PyTorch's own functions. Of training there are op:norm_backward, op:attention_backward, op:cross_entropy and
op:linear_cross_entropy (loss and gradients), and op:adamw, beside torch-eager, torch-compile, torch-fused,
torch-linear-cross-entropy, torch-cudnn-attention and liger; ours are the pieces of the recipe "all".
"""


REPEATS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("workload", help="for example gpt2/b8/p16-512/n128, or op:norm_linear")
    parser.add_argument("--recipe", action="append", metavar="WORDS", help="may be given several times (default: all)")
    parser.add_argument(
        "--provider", action="append", metavar="NAME", help="may be given several times (default: eet_lab)"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help=f"measured runs of each (default: {REPEATS})")
    parser.add_argument("--append", type=Path, metavar="DIR", help="add the rows to DIR/<gpu>.jsonl")
    add_model(parser, default=None)


def run(args: argparse.Namespace) -> int:
    """Benchmark and print."""
    from eet_lab.bench.rows import append
    from eet_lab.bench.timing import check_repeats
    from eet_lab.bench.workloads import HeldOut, parse
    from eet_lab.progress import Clock

    workloads = parse(args.workload)
    if args.repeats is not None and isinstance(workloads[0], HeldOut):
        raise PromptError(f"--repeats is {args.repeats}, but accuracy is not timed; leave it out.")
    args.repeats = REPEATS if args.repeats is None else args.repeats
    check_repeats(args.repeats)
    _check_recipes(args.recipe or (), args.provider or ("eet_lab",))
    if args.append:
        if not (parent := args.append.resolve().parent).is_dir():  # a slip should not make folders
            raise ResultError(f"{args.append} cannot be made: there is no folder {parent}. Choose another folder.")
        append((), args.append)  # makes the folder: one that cannot be made is told before any work
    with followed(Clock()) as (line, stop):
        rows, remarks, shown = _timed(args, workloads, line, stop)
    if not rows:
        raise SetupError(f"Nothing could be timed. {'; '.join(remark.rstrip('.') for remark in remarks)}.")
    print(shown)
    for remark in remarks:
        print(remark)
    if args.append:
        print(f"appended to {', '.join(map(str, append(rows, args.append)))}")
    return 0


def _check_recipes(recipes: Sequence[str], providers: Sequence[str]) -> None:
    """RecipeError for recipes that nobody would run."""
    for words in recipes:
        check_recipe("--recipe", words)
    if recipes and not any(name.startswith("eet_lab") for name in providers):
        raise RecipeError(
            f"--recipe is {recipes[0]!r}, but none of the providers ({', '.join(providers)}) has recipes. Add "
            "--provider eet_lab, or leave --recipe out."
        )


def _timed(args: argparse.Namespace, workloads: Sequence[Any], progress: Progress, cancel: Cancel) -> Found:
    """Rows, remarks, and the table, by what kind of workload it is."""
    from eet_lab.bench import encoding, held_out, serving, training
    from eet_lab.bench import workloads as kinds
    from eet_lab.bench.benchmark import benchmark
    from eet_lab.bench.op_workloads import OpWorkload
    from eet_lab.commands import bench_tables as tables

    workload = workloads[0]
    if isinstance(workload, OpWorkload):
        return _ops(args, workloads, progress, cancel)
    how: dict[str, Any] = {"progress": progress, "cancel": cancel}
    if type(workload) is not kinds.HeldOut:
        how["repeats"] = args.repeats
    works: dict[type, tuple[Callable[..., Any], str, Callable[[Sequence[Row]], str]]] = {
        kinds.Workload: (benchmark, "all", tables.model_table),
        kinds.Requests: (serving.serve_all, serving.RECIPE, tables.serve_table),
        kinds.Texts: (encoding.encode_all, "all", tables.encode_table),
        kinds.HeldOut: (held_out.measure_accuracy, "all", tables.accuracy_table),
        kinds.TrainBatch: (training.train_all, "all", tables.train_table),
    }
    work, recipes, table = works[type(workload)]
    asked = args.recipe or [recipes], args.provider or ["eet_lab"]
    if work is benchmark:
        _check_preset(args, workload, *asked)
    rows, remarks = work(load_model(args, workload.model), workload, *asked, **how)
    return rows, remarks, table(rows) if rows else ""


def _check_preset(args: argparse.Namespace, workload: Workload, recipes: list[str], providers: list[str]) -> None:
    """The errors of what cannot run, before the weights of a preset are drawn, which takes a while."""
    from eet_lab.bench.benchmark import entered
    from eet_lab.devices import checked_device, kind_of, present
    from eet_lab.models import load
    from eet_lab.models.config import PRESETS
    from eet_lab.models.loading import checked_dtype

    if workload.model in PRESETS:
        device = checked_device(args.device)
        outline = load(workload.model, device="meta", dtype=checked_dtype(args.dtype, device))
        with present(device):
            entered(outline, workload, recipes, providers, kind_of(device))


def _ops(args: argparse.Namespace, workloads: Sequence[OpWorkload], progress: Progress, cancel: Cancel) -> Found:
    from eet_lab.bench.ops import benchmark_op
    from eet_lab.commands.bench_tables import op_tables

    if args.recipe:
        raise PromptError(f"--recipe is {args.recipe[0]!r}, but an op has no recipe; leave it out.")
    found: list[Row] = []
    said: dict[str, None] = {}
    for workload in workloads:
        rows, remarks = benchmark_op(
            workload,
            args.provider or (),
            device=args.device,
            dtype=args.dtype,
            repeats=args.repeats,
            progress=progress,
            cancel=cancel,
        )
        found += rows
        said |= dict.fromkeys(remarks)
    return found, list(said), op_tables(found)


COMMAND = Command(
    "bench", "time recipes or single ops on a named workload, and others beside them", GUIDE, add_arguments, run
)
