"""Whole numbers that come from a user."""

from __future__ import annotations

from eet_lab.words import told

MOST = 2**31 - 1
"""The most tokens, pages or columns: kernels count them in ints."""
MOST_SEED = 2**62 - 1
"""The largest seed, of draws and of weights."""


def check_whole(error: type[Exception], name: str, value: object, least: int, most: int, otherwise: str = "") -> None:
    """Raise `error`, with value and limits, for what is no whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise error(f"{name} is {told(value)}, but it must be a whole number from {least} to {most:,}{otherwise}.")


def check_number(
    error: type[Exception], name: str, value: object, least: float, most: float, what: str, *, last: bool = False
) -> None:
    """Raise `error` for what is no number from `least` to less than `most`, or to `most` itself; `what` says it."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (least <= value < most or (last and value == most)):  # type: ignore[operator]
        raise error(f"{name} is {told(value)}, but it must be a number {what}.")
