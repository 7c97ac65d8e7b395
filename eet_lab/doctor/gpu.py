"""The GPU and everything on the way to it: driver, torch, nvcc and the C++ compiler behind it.

Without an NVIDIA GPU nothing here is a failure: the rows become notes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from eet_lab.doctor.check import Check, Status
from eet_lab.doctor.software import pip_install
from eet_lab.errors import EETError, KernelBuildError, MonitorError
from eet_lab.monitor.nvml import Driver, find_driver

OLDEST_CAPABILITY = (8, 0)


def inspect_gpu() -> list[Check]:
    """GPU with driver, torch, nvcc and host compiler, in this order."""
    try:
        driver, why = find_driver(), ""
    except MonitorError as error:
        driver, why = None, str(error)
    return [check_gpu(driver, why), check_torch(driver), check_nvcc(driver), check_compiler(driver)]


def check_gpu(driver: Driver | None, why: str) -> Check:
    """A driver that answers, and a GPU that the kernels are written for."""
    if driver is None and Path("/proc/driver/nvidia/version").exists():
        return Check("GPU", "fail", f"a driver is loaded but does not answer. {why}", "nvidia-smi")
    if driver is None or not driver.gpus:
        return Check("GPU", "note", f"CPU mode: no NVIDIA GPU here. {why}".strip())
    cuda = ".".join(map(str, driver.cuda))
    names = ", ".join(f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})" for gpu in driver.gpus)
    found = f"{names}; driver {driver.version}, CUDA up to {cuda}; NVML answers"
    if all(gpu.capability < OLDEST_CAPABILITY for gpu in driver.gpus):
        return Check("GPU", "warn", f"{found}; the CUDA kernels need sm_80 or newer, torch's own still run")
    return Check("GPU", "ok", found)


def check_torch(driver: Driver | None) -> Check:
    """torch, built for a CUDA that the driver can run."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", "fail", f"cannot be imported: {error}", pip_install("torch>=2.6"))
    found = f"{torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA")
    if driver is None or not driver.gpus:
        return Check("torch", "ok", found)
    cuda = ".".join(map(str, driver.cuda))
    choose = (
        "Choose a CUDA build at https://pytorch.org/get-started/locally/ and install it into this environment"
    )
    if torch.version.cuda is None:
        return Check("torch", "fail", f"{found}: this build cannot use the GPU", choose)
    if int(torch.version.cuda.split(".")[0]) > driver.cuda[0]:
        return Check("torch", "fail", f"{found}, but the driver only runs CUDA up to {cuda}", choose)
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            return Check("torch", "warn", f"{found}; CUDA_VISIBLE_DEVICES={hidden!r} hides the GPU",
                         "unset CUDA_VISIBLE_DEVICES")  # fmt: skip
        return Check(
            "torch", "fail", f"{found}, but torch sees no GPU", 'python -c "import torch; torch.cuda.init()"'
        )
    return Check("torch", "ok", found)


def check_nvcc(driver: Driver | None) -> Check:
    """nvcc, of a major version that the driver can run."""
    needed = driver is not None and bool(driver.gpus)
    try:
        path = _find_nvcc()
        release = _release_of(path)
    except (EETError, OSError, subprocess.SubprocessError) as error:
        return Check(
            "nvcc", "fail" if needed else "note", f"{error} Without it the CUDA kernels cannot be built.",
            pip_install("eet-lab[cuda]") if needed else "",
        )  # fmt: skip
    found = f"{release} at {path}"
    if driver is not None and needed and int(release.split(".")[0]) > driver.cuda[0]:
        major = driver.cuda[0]
        return Check(
            "nvcc", "fail", f"{found}; newer than the driver, which runs CUDA {major}",
            f"Install a CUDA {major} toolkit and set CUDA_HOME to it, or update the driver",
        )  # fmt: skip
    return Check("nvcc", "ok", found)


def check_compiler(driver: Driver | None) -> Check:
    """The C++ compiler that nvcc hands the host code to."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            version = _output(path, "--version").splitlines() or ["unknown version"]
            return Check("C++ compiler", "ok", f"{version[0]} at {path}")
    status: Status = "fail" if driver is not None and driver.gpus else "note"
    found = f"CXX={wanted} is not there" if wanted else "no g++, c++ or clang++ on PATH"
    return Check("C++ compiler", status, f"{found}; nvcc needs it", "sudo apt-get install -y g++")


def _find_nvcc() -> Path:
    try:
        from eet_lab.ops.native import find_nvcc
    except ImportError:
        if path := shutil.which("nvcc"):
            return Path(path)
        raise KernelBuildError("nvcc is not on PATH.") from None
    return find_nvcc()


def _release_of(nvcc: Path) -> str:
    match = re.search(r"release (\d+\.\d+)", _output(str(nvcc), "--version"))
    if match is None:
        raise OSError(f"{nvcc} --version says nothing of a release.")
    return match[1]


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
