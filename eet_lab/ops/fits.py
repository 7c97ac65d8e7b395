"""Which models an op takes: what it does not, it declares, so that a toggle can be greyed with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from eet_lab.ops.types import Spec

FEW = 16
"""Tokens up to which ops choose by their number what they ask memory for; with more they ask for the same things."""
Called = TypeVar("Called", bound=Callable)


class Shapes(Protocol):
    """What a model's config tells an op."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def ffn_size(self) -> int: ...

    @property
    def act(self) -> str: ...

    @property
    def spec(self) -> Spec: ...


def refuses(
    models: Callable[[Shapes], str | None], weights: Callable[[torch.dtype], str | None] | None = None
) -> Callable[[Called], Called]:
    """Declare which models an op does not take, and which types of weights it does not train; a decorator. Each tells
    the reason, or None.
    """

    def declared(op: Called) -> Called:
        op.unfit = models  # type: ignore[attr-defined]
        if weights is not None:
            op.untrainable = weights  # type: ignore[attr-defined]
        return op

    return declared


def reads_rows_on_device(op: Called) -> Called:
    """Declare that attention reads on the device where the rows of a pass are: a captured one then serves any rows. A
    decorator.
    """
    op.rows_on_device = True  # type: ignore[attr-defined]
    return op


def has_rows_on_device(op: Callable | None) -> bool:
    """Whether an op declares that."""
    return getattr(op, "rows_on_device", False)


def unfit(op: Callable, model: Shapes) -> str | None:
    """Why an op, or a piece that is bound to it, does not take a model, or None: what declares nothing takes any."""
    return _reasons(op, "unfit", model)


def untrainable(op: Callable, dtype: torch.dtype) -> str | None:
    """Why it does not train weights of a type, or None."""
    return _reasons(op, "untrainable", dtype)


def _reasons(op: Callable, declared: str, given: Any) -> str | None:
    """An op speaks for the one that it is made of; pieces speak for themselves."""
    found = []
    if why := getattr(op, declared, None):
        found.append(why(given))
    elif isinstance(op, partial):
        found.append(_reasons(op.func, declared, given))
    if isinstance(op, partial):
        found += [_reasons(piece, declared, given) for piece in op.keywords.values()]
    return told(found)


def told(reasons: Iterable[str | None]) -> str | None:
    """Several reasons as one, each told once; None where there is none."""
    return "; ".join(dict.fromkeys(filter(None, reasons))) or None
