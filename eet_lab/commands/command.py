"""What a sub-command is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One word of the command line.

    `help` is its line in `eet-lab --help`; `guide` is shown by `eet-lab <name> --help` and teaches with
    examples. `run` answers the exit code; an `EETError` that it raises is printed as one message, without a
    traceback, and `Cancelled` as "Stopped." (exit code 130). Its module must stay cheap to import: what is heavy
    (torch, a model) is imported inside `run`.
    """

    name: str
    help: str
    guide: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
