"""Which functions may be captured for whatever pads the next batch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Called = TypeVar("Called", bound=Callable)


def serves_any_pads(function: Called) -> Called:
    """Declare that one captured call serves batches with other pads; a decorator.

    In a decode step it reads of `step.spans` no more than how many there are: what it knows of pads it reads from
    `step.num_pad`, on the device. Whatever does not declare that is captured anew for other pads, and so is what wraps
    something that does (`functools.partial`, `functools.wraps`): the wrapper might look at them itself.
    """
    function.serves_any_pads = function  # type: ignore[attr-defined]  # itself: a copied attribute declares nothing
    return function


def declared(function: Callable) -> bool:
    """Whether this very function is declared to serve any pads."""
    return getattr(function, "serves_any_pads", None) is function
