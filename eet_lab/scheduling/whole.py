"""Whole numbers that come from a user."""

from __future__ import annotations

from eet_lab.words import told

MOST = 2**31 - 1
"""The most tokens, pages or columns: kernels count them in ints."""


def check_whole(error: type[Exception], name: str, value: object, least: int, most: int, otherwise: str = "") -> None:
    """Raise `error`, with value and limits, for what is no whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise error(f"{name} is {told(value)}, but it must be a whole number from {least} to {most:,}{otherwise}.")
