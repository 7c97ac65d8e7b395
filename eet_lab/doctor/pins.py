"""The versions that were tried together, and where those that are installed differ from them."""

from __future__ import annotations

from eet_lab.doctor.check import Check
from eet_lab.doctor.software import installed, pip_install
from eet_lab.paths import constraints_file

NUM_NAMED = 6


def pinned() -> dict[str, str]:
    """Version by name, as constraints.txt has them; a wheel carries it too."""
    lines = (line.partition("#")[0].strip() for line in constraints_file().read_text().splitlines())
    return {name: version for name, _, version in (line.partition("==") for line in lines if line)}


def check_pins() -> Check:
    """What is installed in another version than the tried one. torch has a row of its own."""
    tried = pinned()
    here = {name: version for name in tried if name != "torch" and (version := installed(name))}
    others = {name: version for name, version in tried.items() if here.get(name, version) != version}
    if not others:
        return Check("versions", "ok", f"the {len(here)} that are installed are the tried ones")
    named = [f"{name} {here[name]} (tried {version})" for name, version in others.items()]
    more = f", and {len(named) - NUM_NAMED} more" if len(named) > NUM_NAMED else ""
    found = f"{len(named)} of {len(here)} are not the tried ones: {', '.join(named[:NUM_NAMED])}{more}"
    return Check("versions", "note", found, pip_install(*(f"{name}=={version}" for name, version in others.items())))
