"""The disk and the cache folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from eet_lab.doctor.check import Check
from eet_lab.errors import SetupError
from eet_lab.paths import cache_dir

LOW_BYTES, EMPTY_BYTES = 2 * 10**9, 2 * 10**8


def check_disk() -> Check:
    """Room for built kernels, results and, for hub models, checkpoints."""
    home = Path.home()
    free = shutil.disk_usage(home if home.exists() else Path.cwd()).free
    found = f"{free / 1e9:.1f} GB free in {home}"
    remedy = f"du -xh --max-depth=2 {home} | sort -h | tail"
    if free < EMPTY_BYTES:
        return Check("disk", "fail", f"{found}; built kernels need 0.2 GB", remedy)
    if free < LOW_BYTES:
        return Check("disk", "warn", f"{found}; checkpoints from a hub may not fit", remedy)
    return Check("disk", "ok", found)


def check_cache() -> Check:
    """The folder of the built kernels: ours, private, writable."""
    try:
        return Check("cache", "ok", f"{cache_dir()} (mode 0700)")
    except SetupError as error:
        return Check("cache", "fail", str(error), "export XDG_CACHE_HOME=$(mktemp -d)")
