"""What can stand in for an op: a provider makes a call for one copy of the inputs, and says how to read its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

Inputs = tuple[Any, ...]


class LeftOut(Exception):
    """A provider that cannot take these sizes; says why."""


class Prepared(NamedTuple):
    """`call` is what is timed; `read` gives its output the rows of the reference's, without pads."""

    call: Callable[[], Any]
    read: Callable[[Any], Tensor] = lambda out: out


def always(given: Any) -> str | None:
    """For what runs everywhere, or takes all sizes."""
    return None


@dataclass(frozen=True)
class Provider:
    """A way to do some ops. What it leaves out of an op is said in `less`: then its output is not compared.

    `make(shape, inputs)` may lay the inputs out as it likes best: only the call is timed. It raises `LeftOut` for sizes
    that it does not take.
    """

    name: str
    ops: tuple[str, ...]
    make: Callable[[Any, Inputs], Prepared]
    unavailable: Callable[[str], str | None] = always
    less: str = ""
    unfit: Callable[[Any], str | None] = always
