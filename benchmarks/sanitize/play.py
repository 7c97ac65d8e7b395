"""Makes written-down launches of our kernels again, in a process without PyTorch:

    python benchmarks/sanitize/play.py FILE [KERNEL]     on a GPU; of one source in csrc/ alone, if it is named

compute-sanitizer's tools look at a whole process, and some cannot follow one with PyTorch in it: racecheck ends in an
error of its own, and initcheck does not see what cuBLAS writes. record.py makes the file.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class At(NamedTuple):
    """A pointer into a buffer."""

    buffer: int
    offset: int


class Launch(NamedTuple):
    """`written`: contents that PyTorch gave to buffers since the launch before."""

    kernel: str
    launcher: str
    kinds: str  # of its parameters: p, i, l or f
    arguments: dict[str, Any]  # by name, in C's order: numbers, None, At, or a tuple of those
    written: dict[int, bytes]


class Call(NamedTuple):
    """One call of an op."""

    name: str
    sizes: list[int]  # of its buffers, in bytes
    launches: list[Launch]

    @property
    def kernels(self) -> frozenset[str]:
        """Sources in csrc/ that it launches from."""
        return frozenset(launch.kernel for launch in self.launches)


class Record(NamedTuple):
    libraries: dict[str, str]
    calls: list[Call]


def play(found: Record, kernel: str | None = None) -> int:
    """Makes the launches of the calls that have one of this kernel; gives their number."""
    gpu, libraries, num_launches = _Gpu(), dict[str, ctypes.CDLL](), 0
    for call in found.calls:
        if kernel and kernel not in call.kernels:
            continue
        buffers = [gpu.allocated(size) for size in call.sizes]
        for launch in call.launches:
            for buffer, contents in launch.written.items():
                gpu.upload(buffers[buffer], contents)
            path = found.libraries[launch.kernel]
            if path not in libraries:
                libraries[path] = ctypes.CDLL(path)
            function = libraries[path][launch.launcher]
            arguments, lists = _arguments(launch, buffers)
            if error := function(*arguments):
                raise RuntimeError(f"{call.name}: {launch.launcher} failed: CUDA error {error}.")
            del lists  # the launcher has read them
            num_launches += 1
        gpu.synchronize(call.name)
        for buffer in buffers:
            gpu.free(buffer)
    return num_launches


def _arguments(launch: Launch, buffers: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """For ctypes, and the lists among them that lie in memory of the host."""
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}

    def real(value: Any) -> Any:
        return buffers[value.buffer] + value.offset if isinstance(value, At) else value

    arguments, lists = [], []
    for kind, value in zip(launch.kinds, launch.arguments.values(), strict=True):
        if type(value) is tuple:
            lists.append((ctypes.c_void_p * len(value))(*map(real, value)))
            arguments.append(kinds[kind](ctypes.addressof(lists[-1])))
        else:
            arguments.append(kinds[kind](real(value)))
    return arguments, lists


class _Gpu:
    """The few calls of the driver that are needed."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self._do("cuInit", 0)
        self._do("cuDeviceGet", ctypes.byref(device), 0)
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._do("cuCtxSetCurrent", context)

    def allocated(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self._do("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def upload(self, to: int, contents: bytes) -> None:
        self._do("cuMemcpyHtoD_v2", ctypes.c_uint64(to), contents, ctypes.c_size_t(len(contents)))

    def free(self, pointer: int) -> None:
        self._do("cuMemFree_v2", ctypes.c_uint64(pointer))

    def synchronize(self, what: str) -> None:
        self._do("cuCtxSynchronize", what=what)

    def _do(self, name: str, *args: Any, what: str = "") -> None:
        if error := getattr(self._cuda, name)(*args):
            raise RuntimeError(f"{what or name}: {name} failed: CUDA error {error}.")


if __name__ == "__main__":
    # Pickles name classes by their module: this one, whatever it is called while it runs.
    sys.modules["play"] = sys.modules[__name__]
    print(f"{play(pickle.loads(Path(sys.argv[1]).read_bytes()), *sys.argv[2:])} launches")
