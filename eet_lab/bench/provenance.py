"""Where a result was taken: on this machine, or elsewhere."""

from __future__ import annotations

import hashlib
import socket
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from eet_lab.bench.measured import Environment

MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")


@lru_cache
def machine_id(device: str) -> str | None:
    """An id of this machine and its `device` ("cpu" or "cuda"), the same in every process; None without that device.

    A hash: nothing of it can be read back. Containers made from one image share their machine id, so the host's name
    and the GPU's own id are in it. Where a host is renamed, what it measured before counts as recorded elsewhere.
    """
    parts = [socket.gethostname(), device]
    for path in MACHINE_IDS:
        with suppress(OSError):
            parts.append(Path(path).read_text(encoding="ascii", errors="replace").strip())
            break
    if device != "cpu":
        import torch

        if not torch.cuda.is_available():
            return None
        parts.append(str(torch.cuda.get_device_properties(0).uuid))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def is_here(environment: Environment) -> bool:
    """Whether it was taken on this machine; files that do not say it were not."""
    return environment.machine is not None and environment.machine == machine_id(environment.device_kind)


def placed(environment: Environment) -> Environment:
    """The environment of a file, marked as recorded unless it was taken on this machine."""
    return replace(environment, recorded=not is_here(environment))


def describe(environment: Environment, now: datetime | None = None) -> str:
    """In words: `Measured on this machine at 14:02.`, or where it was recorded. `now` is for tests."""
    if environment.recorded:
        return f"Recorded on {environment.origin}; not measured on this machine."
    return f"Measured on this machine {moment(environment.date, now)}."


def moment(date: str, now: datetime | None = None) -> str:
    """`at 14:02` of today, else `on 2026-11-23 at 14:02`: local time, of an ISO date; the date as it is for others."""
    try:
        then = datetime.fromisoformat(date).astimezone()
    except (ValueError, OverflowError):
        return f"on {date[:10]}"
    today = (now or datetime.now()).astimezone().date()
    return f"at {then:%H:%M}" if then.date() == today else f"on {then:%Y-%m-%d} at {then:%H:%M}"
