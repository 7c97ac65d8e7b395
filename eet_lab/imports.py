"""Names of a package that are imported when they are asked for, and packages that may be missing."""

from __future__ import annotations

import sys
from importlib import import_module

from eet_lab.collector import no_collection

TYPE_CHECKING = False  # as type checkers take it: `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def on_demand(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: `homes` names the module of each name; a module may be a name itself.

    The garbage collector waits meanwhile. What is imported stays, and to walk it again and again while torch comes
    would take half a second.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with no_collection():
            home = import_module(homes[name])
        value = home if home.__name__ == f"{package}.{name}" else getattr(home, name)
        setattr(sys.modules[package], name, value)
        return value

    return find


def check_installed(names: Sequence[str], what: str, how: str) -> None:
    """Errors: SetupError where one of these packages is missing; `what` needs it, and `how` to install it."""
    from importlib.util import find_spec

    from eet_lab.errors import SetupError

    for name in names:
        if sys.modules.get(name) is None and find_spec(name) is None:
            raise SetupError(f"{name} is not installed, which {what}: {how}")
