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
    It does not wait for the lock `engine.busy`: what is called in `on_step` would wait for itself.
    """

    @wraps(method)
    def alone(engine: Any, *args: Any, **keywords: Any) -> Any:
        if not engine.busy.acquire(blocking=False):
            raise EngineBusy(
                f"{method.__name__} cannot begin: this engine is generating, and runs one batch at a time. Wait until "
                "it is done, or build another Engine of the same model: the weights are shared."
            )
        try:
            with present(engine.model.device):
                return method(engine, *args, **keywords)
        finally:
            engine.busy.release()

    return cast(Method, alone)
