"""Which models an op takes: what it does not, it declares, so that a toggle can be greyed with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from eet_lab.ops.types import Spec

FEW = 16
"""Tokens up to which ops choose by their number what they ask memory for; with more they ask for the same things."""
Called = TypeVar("Called", bound=Callable)


class Shapes(Protocol):
    """What a model's config tells an op."""

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


def unfit(op: Callable, model: Shapes) -> str | None:
    """Why an op does not take a model, or None: what declares nothing takes any."""
    why = getattr(op, "unfit", None)
    return why and why(model)
