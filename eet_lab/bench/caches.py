"""How much must be read so that a processor's caches do not hold it, from what Linux tells of them."""

from __future__ import annotations

from pathlib import Path

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

TIMES = 4
"""So many times the last cache: of less, one that does not forget in order would still answer a part."""

MOST_BYTES = 512 * 2**20
"""Whatever the cache: what is read must not drive a small machine out of its memory."""


def last_cache_bytes(folder: Path = CACHES) -> int | None:
    """Of the largest cache that a core reads data through; None where that is not told."""
    sizes = [_num_bytes(each / "size") for each in folder.glob("index*") if _text(each / "type") != "Instruction"]
    return max(sizes, default=0) or None


def beyond_caches(least: int, cache_bytes: int | None) -> int:
    """Bytes beyond a cache of that size, at least `least`."""
    return min(max(least, TIMES * (cache_bytes or 0)), max(least, MOST_BYTES))


def _num_bytes(file: Path) -> int:
    """Of `107520K`; 0 for what is no size."""
    text = _text(file)
    number, unit = text.rstrip("KMG"), UNITS.get(text[-1:], 1)
    return int(number) * unit if number.isdecimal() else 0


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
