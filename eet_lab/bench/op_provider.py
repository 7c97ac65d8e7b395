"""OpProvider: one who can stand in for an op, and what it makes of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

Inputs = tuple[Any, ...]


class Prepared(NamedTuple):
    """`call` is what is timed; `read` gives its output the rows of the reference's, without pads."""

    call: Callable[[], Any]
    read: Callable[[Any], Tensor | tuple[Tensor, ...]] = lambda out: out


def always(given: Any) -> str | None:
    """No reason against: for what runs everywhere, or takes all sizes."""
    return None


@dataclass(frozen=True)
class OpProvider:
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
