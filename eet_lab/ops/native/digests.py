"""Is a built library what was built? Loading one that was cut short ends the process, so it is asked before each load.

Beside each library lies the SHA-256 of its content, written once it is finished.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from eet_lab.paths import write_whole


def seal(library: Path) -> None:
    """Note what was built."""
    write_whole(_beside(library), _digest(library, _stamp(library)))


def is_whole(library: Path) -> bool:
    """Whether it is there as it was built. It is read once, and again when it was written since: 2 ms."""
    try:
        return _beside(library).read_text() == _digest(library, _stamp(library))
    except (OSError, UnicodeDecodeError):
        return False


def discard(library: Path) -> None:
    """Take it away, so that ninja builds it again."""
    library.unlink(missing_ok=True)
    _beside(library).unlink(missing_ok=True)


def _beside(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _stamp(library: Path) -> tuple[int, ...]:
    stat = library.stat()
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino


@lru_cache(maxsize=256)
def _digest(library: Path, stamp: tuple[int, ...]) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()
