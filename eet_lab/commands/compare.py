"""`eet-lab compare`: a baseline against a recipe, or a whole ladder, as a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from eet_lab.commands.arguments import (
    add_generation,
    add_model,
    add_recipe,
    check_recipe,
    load_model,
    settings,
    tell_unfit,
)
from eet_lab.commands.command import Command
from eet_lab.commands.terminal import check_writable, followed
from eet_lab.errors import EETError, RecipeError, ResultError
from eet_lab.words import told

GUIDE = """\
Runs the baseline and a recipe on the same prompts, checks that their output is the same, times both in turn, and prints
the table that the notebook shows.

  eet-lab compare                                            the recipe 'all' on the demo model
  eet-lab compare --recipe pre_padding,mask_removal --prompt "Return" --prompt "If the file does not exist"
  eet-lab compare --baseline pre_padding --recipe pre_padding,mask_removal      one toggle alone
  eet-lab compare --recipe baseline                          the baseline beside itself: the noise of this machine
  eet-lab compare --ladder                                   each technique's own milliseconds and MiB
  eet-lab compare --model path/to/checkpoint --save result.json --html result.html
  eet-lab compare --trace trace.json                         the timeline of a decode step, for ui.perfetto.dev
  eet-lab compare --load result.json                         show a saved result again
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="give it several times for a batch (default: eight ragged ones)",
    )
    add_recipe(parser)
    parser.add_argument("--baseline", metavar="WORDS", help="compare with this recipe (default: the plain baseline)")
    parser.add_argument(
        "--ladder", action="store_true", help="add techniques one by one, then leave them out one by one"
    )
    parser.add_argument(
        "--repeats", type=_repeats, metavar="N", help="measured runs of each (default: auto, until changes are known)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained HTML page with plots")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a decode step of both as a trace that Perfetto opens"
    )
    parser.add_argument("--load", type=Path, metavar="FILE", help="show a result that was saved; measure nothing")
    add_generation(parser)
    add_model(parser)
    parser.set_defaults(recipe=None)


SHOWS = ("load", "save", "html", "trace")
"""Options that have an effect on a result that was saved."""


def _repeats(word: str) -> int | None:
    try:
        return None if word == "auto" else int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{told(word)} is neither auto nor a whole number, such as 6") from None


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; 130 when it was stopped, 1 where there is no trace to write."""
    from eet_lab.bench.timeline import encode, write_trace

    check_writable(args.save, args.html, args.trace)
    result, steps, beside = loaded(args) if args.load else (*measured(args), {})
    print(result.to_text())
    if args.save:
        beside = beside | ({"timeline": encode(steps)} if steps else {})
        print(f"saved to {result.save(args.save, **beside)}")
    if args.trace and steps:
        print(f"a decode step of each is in {write_trace(args.trace, steps)}: open it at ui.perfetto.dev")
    if args.html:
        from eet_lab.workbench.export import write_page

        print(f"written to {write_page(result, args.html)}")
    return 130 if getattr(result, "partial", False) else int(args.trace is not None and steps is None)


def loaded(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    """A saved result, its timelines, if any, and all that is kept beside it.

    ResultError for options that would have no effect, and where a trace is wanted and there are no timelines.
    """
    from eet_lab.bench.results import read_result
    from eet_lab.bench.timeline import timelines_of
    from eet_lab.codec import content_of

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    usual = vars(parser.parse_args([]))
    if idle := [f"--{name.replace('_', '-')}" for name in usual.keys() - SHOWS if getattr(args, name) != usual[name]]:
        what = f"{' and '.join(sorted(idle))} {'is' if len(idle) == 1 else 'are'}"
        raise ResultError(f"{what} for measuring, but --load shows a result. Leave out one or the other.")
    result, beside = read_result(content_of(args.load), str(args.load))
    steps = timelines_of(beside)
    if args.trace and steps is None:
        raise ResultError(
            f"{args.load} holds no timeline, so there is no trace to write; leave out --load to record one."
        )
    return result, steps, beside


def measured(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    """The comparison or the ladder that the options ask for, and its timelines where a trace is wanted."""
    from eet_lab.bench import compare, ladder
    from eet_lab.bench.timeline_steps import timelines
    from eet_lab.bench.timing import check_repeats
    from eet_lab.progress import Clock

    check_repeats(args.repeats)
    if args.ladder and args.baseline is not None:
        raise RecipeError("--ladder always starts from the plain baseline: leave out --ladder or --baseline.")
    check_recipe("--recipe", args.recipe)
    check_recipe("--baseline", args.baseline)
    model, baseline = load_model(args, args.model), args.baseline or ""
    recipe = "all" if args.recipe is None else args.recipe
    model.decoder  # noqa: B018  ModelError for a model without one
    tell_unfit(model, recipe)
    with followed(Clock()) as (line, stop):
        how: dict[str, Any] = {"progress": line, "cancel": stop, **settings(args)}
        result: Any = (
            ladder(model, args.prompt, recipe, repeats=args.repeats, **how)
            if args.ladder
            else compare(model, args.prompt, recipe, repeats=args.repeats, baseline=baseline, **how)
        )
        steps = None
        if args.trace and not getattr(result, "partial", False):
            try:
                steps = timelines(model, args.prompt, recipe, baseline=baseline, **how)
            except EETError as problem:  # what was measured is not lost
                line.clear()
                print(f"There is no trace: {problem}", file=sys.stderr)
        return result, steps


COMMAND = Command("compare", "time a recipe against the baseline, output checked", GUIDE, add_arguments, run)
