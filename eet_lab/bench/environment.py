"""What a result was taken on: device, versions, commit, date."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import eet_lab
from eet_lab.bench.measured import Environment
from eet_lab.bench.provenance import machine_id
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
