"""Python and the packages that the project requires."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from eet_lab.doctor.check import Check
from eet_lab.paths import PACKAGE

TRIED = ((3, 11), (3, 13))
INSTALL = f"{sys.executable} -m pip install -e {PACKAGE.parent} -c {PACKAGE.parent / 'constraints.txt'}"


def pip_install(*what: str) -> str:
    """The command that installs into the environment of this very interpreter."""
    return f"{sys.executable} -m pip install " + " ".join(f'"{word}"' for word in what)


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


def check_packages() -> Check:
    """Every requirement of the project, with its version."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("eet-lab") or []
    except metadata.PackageNotFoundError:
        return Check("packages", "fail", f"{PACKAGE} is imported but not installed", INSTALL)
    wrong, num_right = [], 0
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append((requirement, "missing"))
            continue
        if requirement.specifier.contains(version, prereleases=True):
            num_right += 1
        else:
            wrong.append((requirement, version))
    if wrong:
        found = "; ".join(f"{r.name} is {have}, needed {r.specifier or 'any'}" for r, have in wrong)
        return Check("packages", "fail", found, pip_install(*(f"{r.name}{r.specifier}" for r, _ in wrong)))
    return Check("packages", "ok", f"all {num_right} in range; transformers {metadata.version('transformers')}")
