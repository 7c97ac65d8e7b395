"""The command line: `eet-lab`, which is also `python -m eet_lab`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from eet_lab import __version__
from eet_lab.commands import COMMANDS
from eet_lab.errors import EETError

ABOUT = """\
EET Lab: toggle transformer inference optimizations one at a time and see what each one costs and saves.
"""

START = """\
new here?          eet-lab lab
something broken?  eet-lab doctor
a command's own guide:  eet-lab COMMAND --help
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with every sub-command in it."""
    parser = argparse.ArgumentParser("eet-lab", description=ABOUT, epilog=START, formatter_class=_Guide)
    parser.add_argument("--version", action="version", version=f"eet-lab {__version__}")
    words = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        word = words.add_parser(command.name, help=command.help, description=command.guide, formatter_class=_Guide)
        command.add_arguments(word)
        word.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: it found something wrong; 2: bad input; 130: interrupted."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if "run" not in args:  # no command: whoever types only our name wants to know what there is
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except EETError as error:
        print(f"eet-lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Guide(argparse.RawDescriptionHelpFormatter):
    """Keeps the guides' line breaks."""
