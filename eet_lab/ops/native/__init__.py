"""CUDA sources in, callable launchers out: nvcc through ninja, loaded with ctypes. No torch header is compiled."""

from __future__ import annotations

from eet_lab.ops.native.build import all_names, build
from eet_lab.ops.native.launchers import Library, compile_source, load, loaded, observed, prepare
from eet_lab.ops.native.toolchain import available

__all__ = [
    "Library",
    "all_names",
    "available",
    "build",
    "compile_source",
    "load",
    "loaded",
    "observed",
    "prepare",
]
