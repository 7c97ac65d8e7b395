"""Numbers as a reader expects them: with their noun in the right form, and without exponents."""

from __future__ import annotations

from math import floor, log10


def counted(number: int, noun: str) -> str:
    """`1 prompt`, `1,024 prompts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def plain(value: float) -> str:
    """Four significant digits in plain notation: `57,640`, `41.13`, `0.0512`."""
    shown = float(f"{value:.4g}")
    whole = floor(log10(abs(shown))) + 1 if shown else 1
    digits = f"{shown:,.{max(4 - whole, 0)}f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def signed(value: float) -> str:
    """A difference, as `plain` writes it: `+584.8`, `-1,824`, `0`."""
    return f"{'+' if value > 0 else ''}{plain(value)}" if value else "0"


SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def sized(num_bytes: float) -> str:
    """Bytes in the largest unit that they fill: `3.25 MiB`, `512 bytes`; a difference keeps its sign."""
    for unit, scale in SIZES:
        if abs(num_bytes) >= scale:
            return f"{plain(num_bytes / scale)} {unit}"
    return f"{num_bytes:,.0f} bytes"
