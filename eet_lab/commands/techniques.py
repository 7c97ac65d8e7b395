"""`eet-lab techniques`: what can be toggled, and whether it can run here."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

from eet_lab.commands.command import Command

if TYPE_CHECKING:
    from eet_lab.technique import Technique

GUIDE = """\
Lists the optimizations that a recipe can contain, and says which of them can run on this machine.

  eet-lab techniques                   the list
  eet-lab techniques memory_reuse      its card: what it does, what to expect, where it comes from, its knobs

A recipe is written as names with commas. 'all' is every technique that can run here, except lossy ones and those for
requests that join. A minus sign leaves one out, and a colon turns a knob:

  --recipe pre_padding,mask_removal
  --recipe all,-memory_reuse
  --recipe memory_reuse:planner=first_fit
  --recipe baseline                    no technique: the plain engine
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", nargs="?", help="show this one's card")
    parser.add_argument("--device", metavar="NAME", help="judge for cuda, cuda:1 or cpu (default: the best one here)")


def run(args: argparse.Namespace) -> int:
    """Print the list or one card."""
    from eet_lab.devices import checked_device, kind_of, present
    from eet_lab.technique import known, registry

    device = args.device if args.device == "cuda" else checked_device(args.device)  # asked of a GPU without one, too
    with present(device):
        if args.name:
            print(card(known(args.name)(), kind_of(device)))
        else:
            print(table([technique() for technique in registry().values()], kind_of(device)))
    return 0


def table(techniques: list[Technique], device: str) -> str:
    """One line each."""
    from eet_lab.technique import is_for_training, obstacle

    rows = [["name", "title", "requires", "numerics", f"on this machine ({device})"]]
    for t in techniques:
        reason = obstacle(t, device)
        here = f"no: {reason}" if reason else "yes, in training" if is_for_training(t) else "yes"
        rows.append([t.name, t.title, ", ".join(t.requires) or "–", t.numerics, here])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def card(t: Technique, device: str) -> str:
    """Title, docstring, knobs, and whether it runs here."""
    from eet_lab.technique import obstacle

    here = obstacle(t, device)
    facts = [f"requires: {', '.join(t.requires)}"] if t.requires else []
    facts += [f"numerics: {t.numerics}", f"on {device}: {f'no, {here}' if here else 'yes'}"]
    lines = [f"{t.title} ({t.name})", "", t.card, "", *facts]
    for name, limits in t.knobs.items():
        allowed = limits["choices"] and " or ".join(map(str, limits["choices"]))
        allowed = allowed or f"{limits['low']} to {limits['high']}"
        text = f"{t.name}:{name}={getattr(t, name)}  {limits['help']} Allowed: {allowed}."
        lines += ["", textwrap.fill(text, 110, subsequent_indent="  ")]
    return "\n".join(lines)


COMMAND = Command("techniques", "list what can be toggled, or show one technique's card", GUIDE, add_arguments, run)
