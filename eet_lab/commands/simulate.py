"""`eet-lab simulate`: batching policies on the same traffic, in warped time over a measured cost table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eet_lab.commands.arguments import check_recipe
from eet_lab.commands.command import Command
from eet_lab.commands.terminal import check_writable, followed
from eet_lab.commands.traffic import add_traffic, check_limit, check_trace_alone, traffic_of
from eet_lab.errors import CostError, SetupError, TrafficError

if TYPE_CHECKING:
    from eet_lab.progress import Cancel, Progress
    from eet_lab.scheduling.cost import CostTable
    from eet_lab.scheduling.policy import BasePolicy
    from eet_lab.scheduling.served import Served
    from eet_lab.scheduling.traffic import Lengths, Traffic

GUIDE = """\
Serves one traffic by several batching policies and prints how long requests take. Nothing is computed but time: each
pass takes what a cost table says, which was measured. Continuous batching plans with the scheduler of the engine.

  eet-lab simulate                                        all policies on a small model's example table
  eet-lab simulate --table bert-base-cpu --rate 4 --lengths 5-250
  eet-lab simulate --policy no_batching --policy dynamic_program:trigger=lazy:wait_ms=20 --limit 500
  eet-lab simulate --rate 8 --cv 3 --lengths lognormal:40:0.8 --new-tokens 5-60 --requests 5000
  eet-lab simulate --load 0.7 --lengths 1-500 --policy continuous_batching:chunk=2033 --policy continuous_batching
  eet-lab simulate --trace requests.csv --table my.json   requests of a recorded day
  eet-lab simulate --model demo --save my.json            measure a table here first, and keep it

Tables: the examples demo-cpu (a decoder) and bert-base-cpu (an encoder), each measured once on a CPU that the output
names, or a file that --save wrote. With --model the table is measured here, or was before (it is cached).

Lengths: 128; 5-500 (uniform); lognormal:MEDIAN:SIGMA; or a file of whole numbers, one a line. A trace is CSV with
time (in seconds), length and, if need be, new_tokens in each line, or JSONL with these names.

Policies: no_batching, naive_padding, length_buckets, dynamic_program, token_budget, continuous_batching; a colon turns
a knob, as in length_buckets:width=32. --card NAME shows what one optimizes, what it ignores, and its knobs.
"""

NO_BATCHING_SHARE = 0.9
"""The default rate, as a share of what no batching can serve."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    table = parser.add_argument_group("what a pass costs")
    table.add_argument("--table", metavar="NAME", help="an example, or a file in .json (default: demo-cpu)")
    table.add_argument("--model", metavar="NAME", help="measure this model's table here instead")
    table.add_argument("--recipe", metavar="WORDS", help="measure it under this recipe")
    table.add_argument("--device", metavar="NAME", help="measure it there: cuda, cuda:1 or cpu")
    table.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], help="measure it in this type")
    table.add_argument("--save", type=Path, metavar="FILE", help="write the table as JSON")
    add_traffic(
        parser,
        requests="2,000",
        rate="0.9 of what no batching can serve",
        lengths="up to a quarter of the table",
        new_tokens="up to a quarter of the table",
    )
    parser.add_argument(
        "--policy", action="append", metavar="WORDS", help="may be given several times (default: all that fit)"
    )
    parser.add_argument(
        "--load", type=float, metavar="SHARE", help="instead of --rate: a share of what the first policy can serve"
    )
    parser.add_argument("--limit", type=float, metavar="MS", help="count requests that end within so many milliseconds")
    parser.add_argument("--card", metavar="NAME", help="show a policy's card, and simulate nothing")


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    from eet_lab.commands.simulate_table import served_table
    from eet_lab.progress import Clock
    from eet_lab.scheduling.cost_files import save_cost
    from eet_lab.scheduling.trace import read_trace

    if args.card is not None:
        print(card(args.card))
        return 0
    _check(args)
    trace = read_trace(args.trace) if args.trace else None
    with followed(Clock()) as (line, stop):
        table = _table(args, trace, line, stop)
    if args.save:  # at once: it may have taken a while to measure
        print(f"saved to {save_cost(table, args.save)}")
    with followed(Clock()) as (line, stop):
        traffic, policies = _asked(args, trace, table)
        found, remarks = _served(args, traffic, policies, table, line, stop)
    if not found:
        raise SetupError(f"No policy could be simulated. {'; '.join(remark.rstrip('.') for remark in remarks)}.")
    print(served_table(found, traffic, table, args.limit))
    for remark in remarks:
        print(remark)
    return 0


def card(name: str) -> str:
    """A policy's docstring, and its knobs."""
    from eet_lab.scheduling.policies import parse_policy

    policy = parse_policy(name)
    knobs = [f"{policy.name}:{knob}={value}" for knob, value in policy.knobs.items()]
    return "\n".join([f"{policy.title} ({policy.name})", "", policy.card, *([""] if knobs else []), *knobs])


def _check(args: argparse.Namespace) -> None:
    """Errors for options that would have no effect, and policies that there are not, before any work."""
    from eet_lab.scheduling.policies import policy_kind

    check_writable(args.save)
    for words in args.policy or ():
        policy_kind(words)
    check_limit("limit", args.limit)
    check_trace_alone(args)
    if args.load is not None:
        if not 0 < args.load < float("inf"):
            raise TrafficError(f"--load is {args.load}, but it must be a share above 0, such as 0.7.")
        if args.rate is not None or args.trace is not None:
            raise TrafficError("--load says how many requests come, and so does --rate or --trace. Leave one out.")
    check_recipe("--recipe", args.recipe)
    measured = [name for name in ("recipe", "device", "dtype") if getattr(args, name) is not None]
    if args.model is None and measured:
        raise CostError(f"--{measured[0]} is for measuring a table. Add --model, or leave it out.")
    if args.model is not None and args.table is not None:
        raise CostError("--table names a table, and --model measures one. Leave one of them out.")


def _table(args: argparse.Namespace, trace: Traffic | None, progress: Progress, cancel: Cancel) -> CostTable:
    if args.model is None:
        from eet_lab.scheduling.cost_files import load_cost

        return load_cost(args.table or "demo-cpu")
    from eet_lab.models import load
    from eet_lab.serving.profile import profile, unmeasured

    model = load(args.model, device=args.device, dtype=args.dtype)
    _asked(args, trace, unmeasured(model, args.recipe))  # what it refuses is refused before the table is measured
    return profile(model, args.recipe, progress=progress, cancel=cancel)


def _asked(args: argparse.Namespace, trace: Traffic | None, table: CostTable) -> tuple[Traffic, list[BasePolicy]]:
    """The traffic and the policies that serve it; errors for what goes beyond the table."""
    from eet_lab.scheduling.choices import fitting_policies
    from eet_lab.scheduling.simulator import check_fits

    traffic = _drawn(args, table) if trace is None else trace
    policies = fitting_policies(args.policy, traffic, table)
    for policy in policies:
        check_fits(traffic, policy, table)
    return traffic, policies


def _drawn(args: argparse.Namespace, table: CostTable) -> Traffic:
    from eet_lab.scheduling.choices import capacity, one_by_one_rate, usual_lengths

    def default_rate(lengths: Lengths, answers: Lengths) -> float:
        if args.load is not None and args.policy:
            return args.load * capacity(args.policy[0], lengths, answers, table)
        return float(f"{(args.load or NO_BATCHING_SHARE) * one_by_one_rate(lengths, answers, table):.2g}")

    usual = answers = usual_lengths(table)
    if table.kind != "decoder":
        if args.new_tokens is not None:
            raise TrafficError("--new-tokens is for answers, but the table is of an encoder. Leave it out.")
        answers = "1"
    return traffic_of(args, 2000, default_rate, usual, answers, table.most_length)


def _served(
    args: argparse.Namespace,
    traffic: Traffic,
    policies: list[BasePolicy],
    table: CostTable,
    progress: Progress,
    cancel: Cancel,
) -> tuple[list[Served], list[str]]:
    """What each policy makes of the traffic, and remarks on those of the default ones that go beyond the table."""
    from eet_lab.scheduling.simulator import simulate_traffic

    found, remarks = list[Any](), list[str]()
    for number, policy in enumerate(policies, 1):
        which = f"requests by {policy.title}, policy {number} of {len(policies)}"
        told = _by_percent(progress, which)
        told(0, len(traffic), "")
        try:
            found.append(simulate_traffic(traffic, policy, table, progress=told, cancel=cancel))
        except CostError as error:
            if args.policy:
                raise
            remarks.append(f"{policy} is left out: {error}")
    return found, remarks


def _by_percent(progress: Progress, message: str) -> Progress:
    """Progress that is told once a percent: a file that it goes to has a line for each."""
    last = -1

    def told(done: int, total: int, _: str) -> None:
        nonlocal last
        if (percent := 100 * done // total) > last:
            last = percent
            progress(done, total, message)

    return told


COMMAND = Command("simulate", "serve traffic by several batching policies, in warped time", GUIDE, add_arguments, run)
