"""What an engine does one at a time: whoever comes meanwhile is told so, and what runs goes on unharmed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from eet_lab.devices import present
from eet_lab.errors import EngineBusy

Method = TypeVar("Method", bound=Callable[..., Any])


def exclusive(method: Method) -> Method:
    """A decorator for methods of an engine: EngineBusy where one of them is under way, on any thread.

    The model's GPU is the present one of torch meanwhile.
    It does not wait for the lock `engine.busy`: what is called in `on_step` would wait for itself. `engine.BUSY` says
    what is under way, and what to do.
    """

    @wraps(method)
    def alone(engine: Any, *args: Any, **keywords: Any) -> Any:
        if not engine.busy.acquire(blocking=False):
            raise EngineBusy(f"{method.__name__} cannot begin: {engine.BUSY}")
        try:
            with present(engine.model.device):
                return method(engine, *args, **keywords)
        finally:
            engine.busy.release()

    return cast(Method, alone)
