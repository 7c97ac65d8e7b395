"""Python and the packages that the project requires."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib import metadata

from eet_lab.doctor.check import Check
from eet_lab.errors import EETError
from eet_lab.paths import PACKAGE, install_command, is_clone

TRIED = ((3, 11), (3, 13))


DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "zmq": "pyzmq"}
"""What to install for a module, where pip does not find it by the module's own name."""


def pip_install(*what: str) -> str:
    """The command that installs into the environment of this very interpreter."""
    return f"{sys.executable} -m pip install " + " ".join(f'"{word}"' for word in what)


def install() -> str:
    """The command that installs EET Lab again, under the versions that were tried."""
    return install_command() if is_clone() else f"{install_command()} --force-reinstall --no-deps"


def missing(error: ImportError | OSError) -> str:
    """What cannot be imported, and what to type."""
    module = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not module:
        return f"{error}. Type:\n{install()}"
    return f"The package {module} is missing. Type:\n{pip_install(DISTRIBUTIONS.get(module, module))}"


def guarded(name: str, look: Callable[[], Check | list[Check]]) -> list[Check]:
    """The rows of one look; a failed row where something that it looks with is missing."""
    try:
        rows = look()
    except (ImportError, OSError) as error:
        found, _, remedy = missing(error).partition(" Type:\n")
        return [Check(name, "fail", f"not looked at: {found}", remedy)]
    except EETError as error:
        return [Check(name, "fail", f"not looked at: {error}", install())]
    return rows if isinstance(rows, list) else [rows]


def check_python() -> Check:
    """A Python in the range that is tested."""
    oldest, newest = (".".join(map(str, version)) for version in TRIED)
    found = f"{platform.python_version()} in {sys.prefix}"
    version = sys.version_info[:2]
    if version < TRIED[0]:
        return Check("Python", "fail", f"{found}; {oldest} or newer is needed", f"python{newest} -m venv .venv")
    if version > TRIED[1]:
        return Check("Python", "warn", f"{found}; tried up to {newest}", f"python{newest} -m venv .venv")
    return Check("Python", "ok", found)


def installed(name: str) -> str | None:
    """The version of a distribution, without the build's own part ("+cpu"); None where it is not installed."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def check_packages() -> Check:
    """Every requirement of the project, with its version."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("eet-lab") or []
    except metadata.PackageNotFoundError:
        return Check("packages", "fail", f"{PACKAGE} is imported but not installed", install())
    wrong, num_right = [], 0
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed(requirement.name)
        if version and requirement.specifier.contains(version, prereleases=True):
            num_right += 1
        else:
            wrong.append((requirement, version or "missing"))
    if wrong:
        found = "; ".join(f"{r.name} is {have}, needed {r.specifier or 'any'}" for r, have in wrong)
        return Check("packages", "fail", found, pip_install(*(f"{r.name}{r.specifier}" for r, _ in wrong)))
    return Check("packages", "ok", f"all {num_right} in range; transformers {metadata.version('transformers')}")
