"""What an op is composed of. A piece is a keyword whose default is the plain one; `partial` binds another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def composed(op: Callable) -> tuple[Callable, dict[str, Any]]:
    """The op itself, and the keywords that are bound to it."""
    if not isinstance(op, partial):
        return op, {}
    inner, bound = composed(op.func)
    return inner, bound | op.keywords


def kernels(op: Any) -> tuple[str, ...]:
    """The CUDA sources that an op and its pieces launch from."""
    inner = (op.func, *op.keywords.values()) if isinstance(op, partial) else ()
    return (*getattr(op, "kernels", ()), *(name for each in inner for name in kernels(each)))
