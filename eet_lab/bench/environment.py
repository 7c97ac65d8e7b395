"""What a result was taken on: device, versions, commit, date, and whether that was this machine."""

from __future__ import annotations

import hashlib
import platform
import socket
import subprocess
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import eet_lab
from eet_lab.bench.measured import Environment
from eet_lab.errors import MonitorError
from eet_lab.models import Model
from eet_lab.paths import PACKAGE, is_clone
from eet_lab.words import counted


def environment(model: Model) -> Environment:
    """Where a result that is taken now comes from."""
    return Environment(
        device=device_name(model.device),
        device_kind="cuda" if model.device == "cuda" else "cpu",
        **versions(model.device),
        eet_lab=eet_lab.__version__,
        dtype=model.dtype,
        model=model.name,
        model_label=model.label,
        machine=machine_id(model.device),
    )


def versions(device: str) -> dict[str, Any]:
    """driver, torch, transformers, commit and date, as results and rows name them."""
    return {
        "driver": driver_version() if device == "cuda" else None,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name(device: str) -> str:
    """The GPU's or the processor's name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({counted(torch.get_num_threads(), 'thread')})"


@lru_cache
def driver_version() -> str | None:
    """The NVIDIA driver's version, None where NVML cannot say."""
    from eet_lab.monitor.nvml import find_driver

    try:
        return find_driver().version
    except MonitorError:
        return None


@lru_cache
def commit() -> str | None:
    """The commit of the clone that runs, with a + where files differ from it; None in an installed package."""
    if not is_clone():
        return None
    git = ["git", "-C", str(PACKAGE.parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "eet_lab", "csrc"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed else "")


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
    """A sentence: `Measured on this machine at 14:02.`, or where it was recorded. `now` is for tests."""
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
