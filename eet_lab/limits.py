"""What the CUDA kernels ask of a GPU and its driver.

Needs no torch, so that the doctor can tell where torch is ill.
"""

from __future__ import annotations

OLDEST_GPU = (8, 0)
"""Compute capability: mma.m16n8k16 with bf16, and cp.async."""


def gpu_too_old(capability: tuple[int, int]) -> str | None:
    """Why the kernels cannot run on a GPU, or None."""
    if capability >= OLDEST_GPU:
        return None
    (major, minor), (oldest, least) = capability, OLDEST_GPU
    return f"has compute capability {major}.{minor}, but the CUDA kernels need {oldest}.{least} (Ampere) or newer"


def nvcc_too_new(version: str, driver_cuda: int) -> str | None:
    """Why a driver cannot run what an nvcc such as "13.0.88" builds, or None. `driver_cuda`: the newest CUDA major."""
    if int(version.split(".")[0]) <= driver_cuda:
        return None
    return f"nvcc {version} is newer than what the NVIDIA driver supports (CUDA {driver_cuda})"


def nvcc_remedy(driver_cuda: int) -> str:
    """What to do about it."""
    return f"Install a CUDA {driver_cuda} toolkit and set CUDA_HOME to it, or update the driver"
