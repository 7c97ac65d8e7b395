"""Which models an op takes: what it does not, it declares, so that a toggle can be greyed with the reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

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
    def qk_norm(self) -> bool: ...

    @property
    def has_position_embedding(self) -> bool: ...

    @property
    def spec(self) -> Spec: ...


def refuses(why: Callable[[Shapes], str | None]) -> Callable[[Called], Called]:
    """Declare which models an op does not take; a decorator. `why` tells the reason, or None for those it does."""

    def declare(op: Called) -> Called:
        op.unfit = why  # type: ignore[attr-defined]
        return op

    return declare


def unfit(op: Any, model: Shapes) -> str | None:
    """Why an op, or a piece of it, does not take a model, or None: what declares nothing takes any."""
    why = getattr(op, "unfit", None)
    reasons = [why and why(model)]
    if isinstance(op, partial):
        inner = (*op.keywords.values(), *([] if why else [op.func]))  # what is declared is declared of the whole op
        reasons += [unfit(each, model) for each in inner]
    return next(filter(None, reasons), None)
