"""The GPU and everything on the way to it: driver, torch, and the tools that build kernels.

Without an NVIDIA GPU nothing here is a failure: the rows become notes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from eet_lab import limits
from eet_lab.doctor.check import Check
from eet_lab.doctor.pins import pinned
from eet_lab.doctor.software import pip_install
from eet_lab.errors import KernelBuildError, MonitorError
from eet_lab.monitor.nvml import Driver, find_driver
from eet_lab.paths import install_command


def inspect_gpu() -> list[Check]:
    """GPU with driver, torch, nvcc, host compiler and ninja, in this order."""
    driver: Driver | None = None
    why = ""
    try:
        driver = find_driver()
    except MonitorError as error:
        why = str(error)
    nvcc, *tools = inspect_tools(needed=driver is not None and bool(driver.gpus))
    return [check_gpu(driver, why), check_torch(driver), compare_nvcc(nvcc, driver), *tools]


def check_gpu(driver: Driver | None, why: str) -> Check:
    """A driver that answers, and a GPU that the kernels are written for."""
    if driver is None and Path("/proc/driver/nvidia/version").exists():
        return Check("GPU", "fail", f"a driver is loaded but does not answer. {why}", "nvidia-smi")
    if driver is None or not driver.gpus:
        return Check("GPU", "note", f"CPU mode: no NVIDIA GPU here. {why}".strip())
    cuda = ".".join(map(str, driver.cuda))
    names = ", ".join(f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})" for gpu in driver.gpus)
    found = f"{names}; driver {driver.version}, CUDA up to {cuda}; NVML answers"
    too_old = [limits.gpu_too_old(gpu.capability) for gpu in driver.gpus]
    if all(too_old):
        return Check("GPU", "warn", f"{found}; it {too_old[0]}; PyTorch's own kernels still run")
    return Check("GPU", "ok", found)


def check_torch(driver: Driver | None) -> Check:
    """torch, built for a CUDA that the driver can run."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", "fail", f"cannot be imported: {error}", pip_install("torch>=2.6"))
    found = f"{torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA")
    newer = check_torch_is_tried(torch.__version__, found)
    if driver is None or not driver.gpus:
        return newer or Check("torch", "ok", found)
    cuda = ".".join(map(str, driver.cuda))
    choose = "Choose a CUDA build at https://pytorch.org/get-started/locally/ and install it into this environment"
    if torch.version.cuda is None:
        return Check("torch", "fail", f"{found}: this build cannot use the GPU", choose)
    if int(torch.version.cuda.split(".")[0]) > driver.cuda[0]:
        return Check("torch", "fail", f"{found}, but the driver only runs CUDA up to {cuda}", choose)
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            return Check("torch", "warn", f"{found}; CUDA_VISIBLE_DEVICES={hidden!r} hides the GPU",
                         "unset CUDA_VISIBLE_DEVICES")  # fmt: skip
        return Check("torch", "fail", f"{found}, but torch sees no GPU", 'python -c "import torch; torch.cuda.init()"')
    if tuple(map(int, torch.version.cuda.split("."))) > driver.cuda:
        return Check(
            "torch", "warn", f"{found}, newer than the driver's CUDA {cuda}: what torch compiles may fail", choose
        )
    return newer or Check("torch", "ok", found)


def check_torch_is_tried(version: str, found: str) -> Check | None:
    """A warning where torch is newer than what was tried: a plain `pip install .` takes the newest there is."""
    from packaging.version import Version

    tried = pinned()["torch"]
    if Version(version).release <= Version(tried).release:
        return None
    return Check("torch", "warn", f"{found}; tried up to {tried}", pip_install(f"torch=={tried}"))


def inspect_tools(needed: bool) -> list[Check]:
    """nvcc, the C++ compiler that it hands host code to, and ninja that drives it: as the kernels' build finds them.

    They are `needed` where there is a GPU to build for; elsewhere a missing one is a note.
    """
    try:
        from eet_lab.ops.native import toolchain
    except (ImportError, OSError):
        return [Check("nvcc", "note", "not looked at, since torch cannot be imported")]

    def nvcc() -> str:
        path = toolchain.find_nvcc()
        return f"{toolchain.nvcc_version(path)} at {path}"

    def look(name: str, find: Callable[[], object], remedy: str) -> Check:
        try:
            return Check(name, "ok", str(find()))
        except KernelBuildError as error:
            return Check(name, "fail" if needed else "note", str(error), remedy if needed else "")

    return [
        look("nvcc", nvcc, install_command("cuda")),
        look("C++ compiler", toolchain.host_compiler, "sudo apt-get install -y g++"),
        look("ninja", toolchain.ninja, pip_install("ninja")),
    ]


def compare_nvcc(nvcc: Check, driver: Driver | None) -> Check:
    """The row of nvcc, failed when its major version is newer than what the driver runs."""
    if nvcc.status != "ok" or driver is None or not driver.gpus:
        return nvcc
    version, _, where = nvcc.found.partition(" ")
    too_new = limits.nvcc_too_new(version, driver.cuda[0])
    return Check("nvcc", "fail", f"{too_new} {where}", limits.nvcc_remedy(driver.cuda[0])) if too_new else nvcc
