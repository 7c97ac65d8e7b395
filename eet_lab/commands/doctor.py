"""`eet-lab doctor`: check this machine and say what to type."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eet_lab.commands.command import Command
from eet_lab.commands.terminal import check_writable
from eet_lab.errors import SetupError
from eet_lab.paths import write_whole

GUIDE = """\
Checks Python, torch, the NVIDIA driver, nvcc, ninja, the C++ compiler, JupyterLab's extensions, disk and
cache. A row that fails says what to type. A machine without a GPU is fine: everything runs on the CPU.

  eet-lab doctor               a table on the terminal; exit code 1 when something is broken
  eet-lab doctor --html F      the same as a page, to attach to a bug report

In a notebook, where the kernel may live in another environment than the server:

  from eet_lab.doctor import diagnose, to_html
  from IPython.display import HTML
  HTML(to_html(diagnose()))
"""

PAGE = "<!doctype html><meta charset=utf-8><title>EET Lab doctor</title>{table}\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the table as an HTML page")


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 when a check failed."""
    from eet_lab.doctor import diagnose, to_html, to_text

    check_writable(args.html)
    checks = diagnose()
    print(to_text(checks, color=sys.stdout.isatty()))
    if args.html:
        try:
            write_whole(args.html, PAGE.format(table=to_html(checks)))
        except OSError as error:
            raise SetupError(f"{args.html} cannot be written: {error.strerror}. Choose another place.") from error
    return 1 if any(check.status == "fail" for check in checks) else 0


COMMAND = Command("doctor", "check this machine and say what to type", GUIDE, add_arguments, run)
