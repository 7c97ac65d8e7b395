"""Launches of our kernels alone: written down where there is no GPU, and made again in a process without PyTorch.

    python benchmarks/launches.py record FILE           every case's small shapes, each with what its kernels read
    python benchmarks/launches.py play FILE [KERNEL]    on a GPU; of one source in csrc/ alone, if it is named

compute-sanitizer's tools look at a whole process, and some cannot follow one with PyTorch in it: racecheck ends in an
error of its own, and initcheck does not see what cuBLAS writes. So ops run on the CPU, over kernels that launch nothing
but note their arguments, as in the tests. What an op got from `empty` has no contents, unless PyTorch wrote to it
between two launches: who reads it before a kernel wrote it is found.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MOST_BYTES = 200_000  # that a shape may read
LISTS = {"linears": 16}  # pointers to host memory that holds so many pointers
SENTINEL = 0x7B  # in every byte of what has no contents: large numbers, whose sums and products are others


class At(NamedTuple):
    """A pointer into a buffer."""

    buffer: int
    offset: int


class Launch(NamedTuple):
    """`written`: contents that PyTorch gave to buffers since the launch before."""

    kernel: str
    launcher: str
    kinds: str  # of the arguments: p, i, l or f
    args: tuple[Any, ...]  # numbers, None, At, or a tuple of those
    written: dict[int, bytes]


class Call(NamedTuple):
    """One call of an op."""

    name: str
    sizes: list[int]  # of its buffers, in bytes
    launches: list[Launch]


class Record(NamedTuple):
    libraries: dict[str, str]
    calls: list[Call]


def record(cases: Sequence[Any] | None = None, libraries: dict[str, str] | None = None) -> Record:
    """Every case's small shapes in fp16, and in fp32 where the op takes it."""
    import torch

    from eet_lab.ops import cuda, native
    from eet_lab.ops.all_cases import ALL_CASES
    from eet_lab.ops.cases import Case
    from eet_lab.ops.shapes import copied

    calls: list[Call] = []
    with _pretended() as recorder:
        for case in ALL_CASES if cases is None else cases:
            assert isinstance(case, Case)
            for shape in (shape for shape in case.shapes if shape.read_bytes(2) <= MOST_BYTES):
                for dtype in (each for each in (torch.float16, torch.float32) if each in case.dtypes):
                    inputs = copied(shape.inputs("cpu", dtype, 0))
                    case.poison(inputs)
                    recorder.begin()
                    case.call(getattr(cuda, case.op), inputs, recorder.empty)
                    calls.append(recorder.call(f"{case.name}/{shape} {dtype}"))
    if libraries is None:
        libraries = {name: str(path) for name, path in native.build().items()}
    return Record(libraries, calls)


class _Recorder:
    """Notes launches, and where their pointers point."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new call of an op."""
        self._given: list[Any] = []  # kept alive, so that no other tensor lies there
        self._buffers: dict[int, int] = {}  # by where they begin on the CPU
        self._sizes: list[int] = []
        self._contents: dict[int, bytes] = {}
        self._launches: list[Launch] = []

    def call(self, name: str) -> Call:
        """What happened since."""
        return Call(name, self._sizes, self._launches)

    def empty(self, name: str, shape: tuple[int, ...], like: Any, dtype: Any = None) -> Any:
        """Memory without contents."""
        import torch

        dtype = dtype or like.dtype
        num_bytes = max(16, torch.Size(shape).numel() * dtype.itemsize)
        whole = torch.full((num_bytes,), SENTINEL, dtype=torch.uint8)
        self._given.append(whole)
        return whole[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def launcher(self, kernel: str, name: str, parameters: Sequence[Any]) -> Callable[..., None]:
        """What stands in for one."""
        letters = {ctypes.c_void_p: "p", ctypes.c_int: "i", ctypes.c_int64: "l", ctypes.c_float: "f"}
        kinds = "".join(letters[parameter.ctype] for parameter in parameters)

        def launch(*args: Any) -> None:
            lies, written = _Memory(), dict[int, bytes]()
            converted = tuple(
                self._pointer(value, parameter.name, lies, written) if kind == "p" else value
                for value, kind, parameter in zip(args, kinds, parameters, strict=True)
            )
            self._launches.append(Launch(kernel, name, kinds, converted, written))

        return launch

    def _pointer(self, value: int | None, name: str, lies: _Memory, written: dict[int, bytes]) -> Any:
        if not value or name == "stream":
            return None
        if name in LISTS:
            held = (ctypes.c_void_p * LISTS[name]).from_address(value)
            return tuple(self._pointer(each, "", lies, written) for each in held)
        begin, size = lies.around(value, name)
        buffer = self._buffers.get(begin)
        if buffer is None:
            buffer = self._buffers[begin] = len(self._sizes)
            self._sizes.append(size)
        contents = ctypes.string_at(begin, size)
        given = any(whole.data_ptr() == begin for whole in self._given)
        known = self._contents.get(buffer, bytes([SENTINEL]) * size if given else None)
        if contents != known:
            written[buffer] = contents
        self._contents[buffer] = contents
        return At(buffer, value - begin)


class _Memory:
    """Where tensors lie at present."""

    def __init__(self) -> None:
        import gc

        import torch

        tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
        storages = (each.untyped_storage() for each in tensors if each.device.type == "cpu" and not each.is_sparse)
        self._ranges = {each.data_ptr(): each.nbytes() for each in storages if each.nbytes()}

    def around(self, pointer: int, name: str) -> tuple[int, int]:
        """Where a pointer's tensor begins, and how many bytes it has."""
        for begin, size in self._ranges.items():
            if begin <= pointer < begin + size:
                return begin, size
        raise LookupError(f"{name} points to no tensor.")


class _pretended:
    """On the CPU ops take the ways of an H200, and launch into a recorder."""

    def __enter__(self) -> _Recorder:
        from functools import cache
        from importlib import import_module
        from types import SimpleNamespace

        import torch

        from eet_lab.ops import native
        from eet_lab.ops.cuda import layer, linear
        from eet_lab.ops.native.build import source
        from eet_lab.ops.native.launchers import signatures

        recorder = _Recorder()

        @cache
        def library(kernel: str) -> Any:
            launchers = signatures(source(kernel).read_text())
            return SimpleNamespace(**{name: recorder.launcher(kernel, name, each) for name, each in launchers.items()})

        attention = import_module("eet_lab.ops.cuda.attention")
        self._changed: list[tuple[Any, str, Any]] = []
        for place, name, value in (
            (native, "loaded", library),
            (attention, "_is_hopper", lambda device: True),
            (linear, "limits", lambda: layer.HOPPER),
            (layer, "limits", lambda: layer.HOPPER),
            (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
        ):
            self._changed.append((place, name, getattr(place, name, None)))
            setattr(place, name, value)
        return recorder

    def __exit__(self, *error: object) -> None:
        for place, name, value in self._changed:
            setattr(place, name, value)


def play(found: Record, kernel: str | None = None) -> int:
    """Makes the launches of the calls that have one of this kernel; gives their number."""
    gpu, libraries, num_launches = _Gpu(), dict[str, ctypes.CDLL](), 0
    for call in found.calls:
        if kernel and kernel not in {launch.kernel for launch in call.launches}:
            continue
        buffers = [gpu.allocated(size) for size in call.sizes]
        for launch in call.launches:
            for buffer, contents in launch.written.items():
                gpu.upload(buffers[buffer], contents)
            path = found.libraries[launch.kernel]
            function = libraries.setdefault(path, ctypes.CDLL(path))[launch.launcher]
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
    for kind, value in zip(launch.kinds, launch.args, strict=True):
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


def main() -> int:
    what, file, *rest = sys.argv[1:]
    if what == "record":
        found = record()
        Path(file).write_bytes(pickle.dumps(found))
        print(f"{len(found.calls)} calls, {sum(len(call.launches) for call in found.calls)} launches")
        return 0
    # Pickles name classes by their module, which is another one when it is run as a script.
    with open(file, "rb") as saved:
        found = _Unpickler(saved).load()
    print(f"{play(found, *rest)} launches")
    return 0


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return globals()[name] if name in ("Record", "Call", "Launch", "At") else super().find_class(module, name)


if __name__ == "__main__":
    sys.exit(main())
