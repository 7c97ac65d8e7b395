"""Write into eet_lab/constraints.txt what is installed beside this interpreter: `.venv/bin/python tools/pins.py`.

Lines stay where they are and get the installed version; what is new goes under the last heading, and what is gone from
there is dropped. Lines above it that are not installed (other extras) stay as they are.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "eet_lab" / "constraints.txt"
LAST_HEADING = "# what these bring along"
NOT_OURS = ("eet-lab", "pip", "wheel")
FROM_TORCH = ("nvidia-", "cuda-", "triton")
"""A CUDA build of torch brings these at the versions that it names itself; those of our own extras are listed."""


def main() -> int:
    """Rewrite the file; 0."""
    FILE.write_text(renewed(FILE.read_text(), installed()))
    return 0


def installed() -> dict[str, str]:
    """Version by name of what lies in this environment's own folder, without a build's own part ("+cpu")."""
    found = metadata.distributions(path=[sysconfig.get_path("purelib")])
    return {canonical(dist.metadata["Name"]): dist.version.partition("+")[0] for dist in found}


def renewed(text: str, versions: dict[str, str]) -> str:
    """The file's text with these versions in it."""
    lines = [renewed_line(line, versions) for line in text.partition(LAST_HEADING)[0].splitlines()]
    listed = {line.partition("==")[0] for line in lines}
    rest = [name for name in versions if name not in {*listed, *NOT_OURS} and not name.startswith(FROM_TORCH)]
    return "\n".join([*lines, LAST_HEADING, *(f"{name}=={versions[name]}" for name in sorted(rest))]) + "\n"


def renewed_line(line: str, versions: dict[str, str]) -> str:
    """A pin with the installed version; anything else, and what is not installed, as it is."""
    name, _, version = line.partition("==")
    if line.startswith("#") or not version:
        return line
    return f"{canonical(name)}=={versions.get(canonical(name), version)}"


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
