"""CUDA sources in, callable launchers out: nvcc through ninja, loaded with ctypes. No torch header is compiled."""

from __future__ import annotations

from eet_lab.ops.native.build import all_names, build
from eet_lab.ops.native.launchers import Launcher, Library, compile_source, load, loaded, observed, prepare
from eet_lab.ops.native.toolchain import architecture, available, find_nvcc, host_compiler, ninja

__all__ = [
    "Launcher",
    "Library",
    "all_names",
    "architecture",
    "available",
    "build",
    "compile_source",
    "find_nvcc",
    "host_compiler",
    "load",
    "loaded",
    "ninja",
    "observed",
    "prepare",
]
