"""What turns a `.cu` into machine code: nvcc, ninja, a host compiler, and the GPU to build for."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from eet_lab import limits
from eet_lab.errors import KernelBuildError
from eet_lab.paths import install_command

if TYPE_CHECKING:  # kernels can be built where there is no torch, and before there is
    import torch

NVCC_REMEDY = f"Install it: {install_command('cuda')}, or NVIDIA's CUDA toolkit; then set CUDA_HOME or PATH."


@cache
def find_nvcc() -> Path:
    """The real nvcc (not a wrapper script): from CUDA_HOME, PATH, NVIDIA's wheels or /usr/local/cuda.

    Raises KernelBuildError when there is none, or when it cannot run.
    """
    looked: list[str] = []
    for candidate in _nvcc_candidates():
        looked.append(str(candidate))
        if os.access(candidate, os.X_OK):
            return _resolved(candidate)
    raise KernelBuildError(f"nvcc is missing: looked at {', '.join(looked)}. {NVCC_REMEDY}")


def _nvcc_candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield Path(root) / "bin" / "nvcc"
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    wheels = importlib.util.find_spec("nvidia")  # a namespace package: one folder per CUDA component or major
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        yield from sorted(Path(folder).glob("*/bin/nvcc"), reverse=True)
    yield Path("/usr/local/cuda/bin/nvcc")


def _resolved(nvcc: Path) -> Path:
    """The nvcc of the toolkit that this one really uses, as its own dry run tells it."""
    dry_run = _output(nvcc, "-dryrun", "-x", "cu", "/dev/null")
    top = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
    if top is None:
        raise KernelBuildError(f"{nvcc} does not work: {dry_run.strip()[:500]}. {NVCC_REMEDY}")
    real = Path(top[1].strip()).resolve() / "bin" / "nvcc"
    return real if real.exists() else nvcc


@cache
def nvcc_version(nvcc: Path) -> str:
    """The version of nvcc, for instance "13.0.88"."""
    text = _output(nvcc, "--version")
    version = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    if version is None:
        raise KernelBuildError(f"{nvcc} --version does not tell a version: {text.strip()[:500]}. {NVCC_REMEDY}")
    return version[1]


def parallel(nvcc: Path) -> tuple[str, ...]:
    """Flags by which several cores assemble the kernels of one source, if nvcc is known to have them.

    The machine code stays the same, instruction by instruction; with nvcc's own -split-compile it does not.
    """
    return ("-Xptxas=--split-compile=4",) if int(nvcc_version(nvcc).split(".")[0]) >= 13 else ()


def _output(nvcc: Path, *args: str) -> str:
    try:
        done = subprocess.run([nvcc, *args], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{nvcc} cannot be run: {error}. {NVCC_REMEDY}") from error
    return done.stdout + done.stderr


def ninja() -> Path:
    """The ninja of the wheel of that name, or the one on PATH. Raises KernelBuildError when there is none."""
    wheel = importlib.util.find_spec("ninja")
    folders = [str(Path(wheel.origin).parent / "data" / "bin")] if wheel and wheel.origin else []
    folders.append(os.path.join(sys.prefix, "bin"))
    found = shutil.which("ninja", path=os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise KernelBuildError("ninja is missing. Install it: pip install ninja")
    return Path(found)


def host_compiler() -> Path:
    """The C++ compiler that nvcc calls. Raises KernelBuildError when there is none."""
    found = shutil.which(os.environ.get("NVCC_CCBIN", "g++"))
    if found is None:
        raise KernelBuildError("A C++ compiler (g++) is missing; nvcc needs one. Install it: apt-get install g++")
    return Path(found)


def capability() -> tuple[int, int] | None:
    """The compute capability of the current GPU; None without one."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def architecture() -> str:
    """The GPU to build for, as nvcc names it: "80", "89", "90a". Raises KernelBuildError without a GPU."""
    if (found := capability()) is None:
        raise KernelBuildError("There is no NVIDIA GPU here that torch can use, so there is nothing to build for.")
    major, minor = found
    return f"{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def available(device: torch.device | str) -> str | None:
    """None when CUDA kernels can be built and run on `device`, else the reason why not and what to do."""
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        return f"CUDA kernels need an NVIDIA GPU; the device is {device.type!r}."
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU (see: eet-lab doctor)."
    if too_old := limits.gpu_too_old(torch.cuda.get_device_capability(device)):
        return f"{torch.cuda.get_device_name(device)} {too_old}."
    try:
        version = nvcc_version(find_nvcc())
        ninja()
        host_compiler()
    except KernelBuildError as error:
        return str(error)
    driver = _driver_major()
    too_new = limits.nvcc_too_new(version, driver)
    return too_new and f"{too_new}. {limits.nvcc_remedy(driver)}."


@cache
def _driver_major() -> int:
    """The newest CUDA major that the NVIDIA driver supports."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000
