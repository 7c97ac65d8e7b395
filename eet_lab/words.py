"""Numbers as a reader expects them: with their noun in the right form, and no exponent where zeros can be counted.

`brief` is for what was measured, wherever it stands, `plain` for four digits; `figures/widgets.js` has the same rules.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence
from math import floor, isclose, isfinite, log10
from reprlib import repr as shortened


def counted(number: int, noun: str) -> str:
    """`1 prompt`, `1,024 prompts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def some(names: Sequence[str]) -> str:
    """The first three of them: `a, b, c, ...`."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def plain(value: float, digits: int = 4) -> str:
    """Four significant digits: `57,640`, `41.13`, `0.0512`, `7.8 × 10⁻⁶`; a dash for what is not finite."""
    if not isfinite(value):
        return "–"
    shown = float(f"{value:.{digits}g}")
    whole = floor(log10(abs(shown))) + 1 if shown else 1
    if whole < FEWEST_WHOLE:
        digit, _, power = f"{shown:.{digits - 1}e}".partition("e")
        return f"{_bare(digit)} × 10{str(int(power)).translate(RAISED)}"
    return _bare(f"{shown:,.{max(digits - whole, 0)}f}")


FEWEST_WHOLE = -3
"""Zeros of 0.0001, as a negative number of digits: from there up they can be counted at sight."""
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _bare(text: str) -> str:
    """Without zeros at the end of what stands behind the point."""
    return text.rstrip("0").rstrip(".") if "." in text else text


def brief(value: float, digits: int = 3) -> str:
    """Three significant digits, and never fewer than those before the point: `3,414`, `26.9`, `0.0312`.

    Zeros at the end stay where the number was rounded to them: `29.0` for 28.97, `29` for 29.
    """
    if isfinite(value) and abs(value) >= 10**digits:
        return f"{value:,.0f}"
    text, shown = plain(value, digits), float(f"{value:.{digits}g}")
    missing = digits - len(text.replace(".", "").lstrip("-0"))
    if missing <= 0 or not isfinite(value) or "×" in text or isclose(value, shown, rel_tol=EXACT):
        return text
    return f"{text}{'' if '.' in text else '.'}{'0' * missing}"


EXACT = 1e-9
"""What arithmetic in floating point may add to a number that has few digits, relative to it."""


def ms_words(ms: float) -> str:
    """A time: `1,130 ms`, `1.03 ms`."""
    return f"{brief(ms)} ms"


def times(ratio: float) -> str:
    """A ratio: `21.1 ×`."""
    return f"{brief(ratio)} ×"


def percent(share: float) -> str:
    """A share of 1 with two digits: `35 %`, `4.2 %`, `0.42 %`, `120 %`."""
    return f"{brief(100 * share, 2)} %"


COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


def params_words(number: float) -> str:
    """How many parameters: `1.56 B`, `124 M`, `84 K`, `512`."""
    for scale, letter in COUNTS:
        if number >= 0.9995 * scale:
            return f"{brief(number / scale)} {letter}"
    return f"{number:,.0f}"


def signed(value: float, digits: int = 4) -> str:
    """A difference, as `plain` writes it: `+584.8`, `-1,824`, `0`; with 3 digits as `brief` does."""
    if not value:
        return "0"
    return f"{'+' if value > 0 else ''}{plain(value) if digits > 3 else brief(value, digits)}"


KiB, MiB, GiB = 2**10, 2**20, 2**30
SIZES = (("GiB", GiB), ("MiB", MiB), ("KiB", KiB))


def sized(num_bytes: float) -> str:
    """Bytes in the largest unit that they fill: `3.25 MiB`, `512 bytes`; a difference keeps its sign."""
    for unit, scale in SIZES:
        if abs(num_bytes) >= scale:
            return f"{plain(num_bytes / scale)} {unit}"
    return f"{num_bytes:,.0f} bytes"


def amount(num_bytes: float) -> str:
    """Memory as `brief` writes it, in MiB beside other amounts: `3,463 MiB`; what is less is in a unit of its own."""
    return amounts(num_bytes)[0]


def amounts(*sizes: float) -> list[str]:
    """Memory in one row, as `amount` writes the most of it: `0.0742 MiB`, `0.0371 MiB`."""
    most = max(map(abs, sizes), default=0.0)
    if most < KiB:
        return [counted(round(size), "byte") for size in sizes]
    unit, scale = ("MiB", MiB) if most >= LEAST_MIB else ("KiB", KiB)
    return [f"{brief(size / scale)} {unit}" for size in sizes]


def mib(num_bytes: float) -> str:
    """MiB to one decimal, so that a column of them adds up: `3,455.3 MiB`; what is less is in a unit of its own."""
    return f"{num_bytes / MiB:,.1f} MiB" if abs(num_bytes) >= LEAST_MIB else sized(num_bytes)


def signed_mib(num_bytes: float) -> str:
    """A difference in MiB, whose unit stands elsewhere: `+1,024.5`, `-0.1`, `0`; what is less brings its own unit."""
    if abs(num_bytes) >= LEAST_MIB:
        return f"{num_bytes / MiB:+,.1f}"
    return f"{'+' if num_bytes > 0 else ''}{sized(num_bytes)}" if num_bytes else "0"


LEAST_MIB = 0.05 * MiB
"""What one decimal of a MiB would write as nothing is less than this."""


CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0, C1, line separators, what turns the direction of text, and halves of surrogate pairs, which cannot be encoded."""


def visible(text: str) -> str:
    r"""Text of a file as one line that a terminal shows and does not obey: an escape becomes `\x1b`."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def told(value: object) -> str:
    """A value in an error, shortened; Python refuses to write out a number of thousands of digits."""
    try:
        return shortened(value)
    except ValueError:
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else type_of(value)


def type_of(value: object) -> str:
    """The type of a value, in an error: `a list`, `an int`."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """A type's name as it is read: `a UserList`, `an ndarray`."""
    return f"{'an' if name[0] in 'aeioAEIO' or name == 'ndarray' else 'a'} {name}"


def too_many_digits(error: ValueError) -> str:
    """What is wrong where Python refused to read a whole number for its length; "" for any other error.

    Its own words name a switch of Python, which whoever wrote the number does not have.
    """
    if not str(error).startswith("Exceeds the limit"):
        return ""
    return (
        f"a number has more than {sys.get_int_max_str_digits():,} digits, the most that are read: write it with fewer"
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells as lines, in columns, with a rule below the first line."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    head, *body = ("  ".join(map(_padded, row, widths, range(len(row)))).rstrip() for row in rows)
    return [head, "-" * len(head), *body]


def _width(cell: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in cell)


def _padded(cell: str, width: int, column: int) -> str:
    """The first column stands on the left, numbers on the right."""
    space = " " * (width - _width(cell))
    return space + cell if column else cell + space
