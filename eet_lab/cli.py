"""The command line of `eet-lab`."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

from eet_lab import __version__
from eet_lab.commands import COMMANDS, streams
from eet_lab.doctor import software
from eet_lab.errors import Cancelled, EETError, SetupError, as_called, did_you_mean

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

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
    parser = _Parser("eet-lab", description=ABOUT, epilog=START, formatter_class=_Guide)
    parser.add_argument("--version", action="version", version=f"eet-lab {__version__}")
    words = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        word = words.add_parser(command.name, help=command.help, description=command.guide, formatter_class=_Guide)
        command.add_arguments(word)
        word.set_defaults(run=command.run, command=word)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: it found something wrong; 2: bad input, or the machine refused; 130: interrupted."""
    streams.prepare()
    parser = build_parser()
    args = argparse.Namespace(command=parser)  # until it is known which
    try:
        try:
            return _run(parser, args, argv)
        except Cancelled:
            print("Stopped.")
            return 130
        except EETError as error:
            streams.tell(_as_typed(str(error), args.command))
            return 2
        finally:  # also after --help, which ends in SystemExit: a full disk must show here, and not at exit
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        streams.discard()
        return 0
    except ImportError as error:
        if (error.name or "").startswith("eet_lab"):  # our own fault: show where
            raise
        streams.tell(software.missing(error))
    except OSError as error:
        streams.discard()
        remedy = "Make room or choose another place." if error.errno in FULL else "See what `eet-lab doctor` says."
        streams.tell(f"{error}. {remedy}")
    return 2


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    _, unknown = parser.parse_known_args(argv, args)
    if unknown:
        options = args.command._option_string_actions.items()
        shown = [name for name, action in options if action.help != argparse.SUPPRESS]
        hint = did_you_mean(unknown[0].partition("=")[0], shown)
        args.command.error(f"unrecognized arguments: {' '.join(unknown)}{hint and '.' + hint}")
    if "run" not in args:  # no command: whoever types only our name wants to know what there is
        parser.print_help()
        return 0
    try:
        os.getcwd()
    except FileNotFoundError:  # torch could not be imported
        raise SetupError("The folder that this shell is in has been deleted. Type: cd") from None
    return args.run(args)


def _as_typed(message: str, command: argparse.ArgumentParser) -> str:
    """The message, which begins with the option where it begins with the field that takes its value: --top-k is -1."""
    typed = [(action.dest, max(action.option_strings, key=len)) for action in command._actions if action.option_strings]
    return as_called(message, dict(reversed(typed)))  # where two options share a field, the first one


class _Parser(argparse.ArgumentParser):
    """One whose help does not vanish in silence where it cannot be written."""

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file or sys.stderr)


class _Guide(argparse.RawDescriptionHelpFormatter):
    """Keeps the guides' line breaks."""
