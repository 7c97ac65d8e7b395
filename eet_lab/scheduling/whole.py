"""Values that come from a user: is one a number within its limits, or one of those that there are?"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import TypeGuard

from eet_lab.errors import did_you_mean
from eet_lab.words import told

MOST = 2**31 - 1
"""The most tokens, pages or columns: kernels count them in ints."""
MOST_SEED = 2**62 - 1
"""The largest seed, of draws and of weights."""


def is_whole(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """A whole number from `least` to `most`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_real(value: object) -> TypeGuard[float]:
    """A finite number that a float holds: `math.isfinite` raises for larger ones."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -sys.float_info.max <= value <= sys.float_info.max  # type: ignore[operator]


def check_whole(error: type[Exception], name: str, value: object, least: int, most: int, otherwise: str = "") -> None:
    """Raise `error`, with value and limits, for what is no whole number from `least` to `most`."""
    if not is_whole(value, least, most):
        raise error(f"{name} is {told(value)}, but it must be a whole number from {least} to {most:,}{otherwise}.")


def check_number(
    error: type[Exception], name: str, value: object, least: float, most: float, what: str, *, last: bool = False
) -> None:
    """Raise `error` for what is no number from `least` to less than `most`, or to `most` itself; `what` says it."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (least <= value < most or (last and value == most)):  # type: ignore[operator]
        raise error(f"{name} is {told(value)}, but it must be a number {what}.")


def check_choice(error: type[Exception], name: str, value: object, known: Iterable[str]) -> None:
    """Raise `error`, with the nearest of them, for what is none of the known words."""
    words = tuple(known)
    if value not in words:
        raise error(
            f"{name} is {told(value)}, but it must be one of {', '.join(words)}.{did_you_mean(str(value), words)}"
        )
