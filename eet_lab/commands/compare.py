"""`eet-lab compare`: a baseline against a recipe, or a whole ladder, as a table."""

from __future__ import annotations

import argparse
from pathlib import Path

from eet_lab.commands.arguments import add_generation, add_model, add_prompts, load_model, settings
from eet_lab.commands.command import Command
from eet_lab.commands.terminal import ProgressLine, check_writable, stoppable
from eet_lab.errors import Cancelled, RecipeError

GUIDE = """\
Runs the baseline and a recipe on the same prompts, checks that they say the same, times both in turn, and prints the
table that the notebook shows.

  eet-lab compare                                            all that can run here and is not lossy, on the demo model
  eet-lab compare --recipe pre_padding,mask_removal --prompt "Return" --prompt "If the file does not exist"
  eet-lab compare --baseline pre_padding --recipe pre_padding,mask_removal      one toggle alone
  eet-lab compare --ladder                                   each technique's own milliseconds and MiB
  eet-lab compare --model path/to/checkpoint --save result.json --html result.html
  eet-lab compare --load result.json                         show a saved result again
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_prompts(parser)
    parser.add_argument(
        "--recipe", default="all", metavar="WORDS", help="see `eet-lab techniques --help` (default: all)"
    )
    parser.add_argument("--baseline", metavar="WORDS", help="compare with this recipe (default: the plain baseline)")
    parser.add_argument(
        "--ladder", action="store_true", help="add techniques one by one, then leave them out one by one"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="measured runs of each (default: 3)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained HTML page with plots")
    parser.add_argument("--load", type=Path, metavar="FILE", help="show a result that was saved; measure nothing")
    add_generation(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; 130 when stopped before there was anything to show."""
    from eet_lab.bench import load_result

    check_writable(args.save, args.html)
    try:
        result = load_result(args.load) if args.load else measured(args)
    except Cancelled:
        print("Stopped.")
        return 130
    print(result.to_text())
    if args.save:
        print(f"saved to {result.save(args.save)}")
    if args.html:
        from eet_lab.panels.export import write_page

        print(f"written to {write_page(result, args.html)}")
    return 130 if getattr(result, "partial", False) else 0


def measured(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    """The comparison or the ladder that the options ask for."""
    from eet_lab.bench import compare, ladder
    from eet_lab.bench.progress import Clock
    from eet_lab.bench.turns import check_repeats

    check_repeats(args.repeats)
    if args.ladder and args.baseline is not None:
        raise RecipeError("--ladder always climbs from the plain baseline: leave out one of the two.")
    model, line = load_model(args), ProgressLine(Clock())
    common = {"repeats": args.repeats, "progress": line, **settings(args)}
    try:
        with stoppable() as stop:
            if args.ladder:
                return ladder(model, args.prompt, args.recipe, cancel=stop, **common)
            return compare(model, args.prompt, args.recipe, baseline=args.baseline or "", cancel=stop, **common)
    finally:
        line.clear()


COMMAND = Command("compare", "time a recipe against the baseline, output checked", GUIDE, add_arguments, run)
