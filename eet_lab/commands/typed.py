"""Errors that name an option as it was typed, where what refuses it knows a field of another name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

NO_WORD_BEFORE, NO_WORD_BEHIND = r"(?<![\w:.=/'\"-])", r"(?![\w/:=]|\.\w)"
"""A field's name that is a part of a path, of a recipe, or of what was quoted stays as it is."""


def as_typed(message: str, args: argparse.Namespace) -> str:
    """The message, with the command's options in place of the fields that take their values.

    `steps is 0`, `steps (40) counts` and `Leave pool out` mean options that were given; names of several words, as in
    `from 0 to 40 (max_steps)`, and those with a value, as in `device='cpu'`, mean any option wherever they stand.
    """
    options = _options(args)
    fields = {field: option for option, action in options.items() for field in (action.dest, *_aliases(args, action))}
    given = _any(field for field, option in fields.items() if _is_given(args, options[option]))
    phrases = rf"^(?:{given})(?= is |: )", rf"{NO_WORD_BEFORE}(?:{given})(?= \(\d)", rf"(?<=Leave )(?:{given})(?= out)"
    message = re.sub("|".join(phrases), lambda found: fields[found[0]], message)
    valued = [field for field, option in fields.items() if options[option].nargs != 0]
    message = re.sub(
        rf"{NO_WORD_BEFORE}({_any(valued)})=('[^']*'|[\d.,]*\d)",
        lambda found: f"{fields[found[1]]} {found[2].strip(chr(39))}",
        message,
    )
    worded = [field for field in fields if "_" in field]
    return re.sub(rf"{NO_WORD_BEFORE}({_any(worded)}){NO_WORD_BEHIND}", lambda found: fields[found[1]], message)


def _options(args: argparse.Namespace) -> dict[str, argparse.Action]:
    """The command's options, by the longest word of each."""
    actions = args.command._actions
    return {max(action.option_strings, key=len): action for action in actions if action.option_strings}


def _aliases(args: argparse.Namespace, action: argparse.Action) -> Iterable[str]:
    return (field for field, dest in args.fields.items() if dest == action.dest)


def _is_given(args: argparse.Namespace, action: argparse.Action) -> bool:
    return getattr(args, action.dest, action.default) != action.default


def _any(fields: Iterable[str]) -> str:
    """A pattern of one of them; of none where there are none."""
    return "|".join(map(re.escape, sorted(fields, key=len, reverse=True))) or "(?!)"
