"""Writes down the launches of every case's small shapes, with what their kernels read: needs no GPU.

    python benchmarks/sanitize/record.py PLAIN TOLD [KERNEL ...]

Two files for play.py, of the calls that launch these sources of csrc/, or of all: the second one of kernels that tell
racecheck what it cannot see (EET_RACECHECK).

Ops run on the CPU over kernels that launch nothing but note their arguments, as in the tests. What an op got from
`empty` has no contents, unless PyTorch wrote to it between two launches: who reads it before a kernel wrote it is
found.
"""

from __future__ import annotations

import ctypes
import gc
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from play import At, Call, Launch, Record
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from train_calls import TrainCall, train_calls

from eet_lab.ops import cuda, native
from eet_lab.ops.cases import Case
from eet_lab.ops.cuda import layer, linear
from eet_lab.ops.cuda.launching import HOPPER, Limits
from eet_lab.ops.native.build import source
from eet_lab.ops.native.launchers import signatures
from eet_lab.ops.records import ALL_CASES
from eet_lab.ops.shapes import copied

STREAMED = {"norm_linear", "linear_residual", "fused_layer"}  # ops whose weights go through a ring


class Pass(NamedTuple):
    """Which shapes, by the bytes that they read, of which ops, on a pretended GPU of so many multiprocessors."""

    num_blocks: int
    most_bytes: int
    ops: Set[str]
    names: Set[str] = frozenset()  # of the shapes; none: all of them
    dtypes: Set[torch.dtype] = frozenset({torch.float16, torch.bfloat16, torch.float32})

    def calls(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Any, torch.dtype]]:
        """Case, shape and type."""
        for case in (case for case in cases if case.op in self.ops):
            for shape in (shape for shape in case.shapes if shape.read_bytes(2) <= self.most_bytes):
                if not self.names or str(shape) in self.names:
                    yield from ((case, shape, dtype) for dtype in case.dtypes if dtype in self.dtypes)


# Prompts that go round Hopper's ring of keys, which holds 384 columns up to D=64, 320 up to 128, and 128 beyond: keys
# of the prompt itself, and with slack those of the cache. A few, since racecheck looks at every access of all of them.
LONG_PROMPTS = {f"b4/s1-515/h4g2/d{D}/packed" for D in (64, 128)}
LONG_PROMPTS |= {"b2/s300-333/h2/d96/slack", "b4/s1-130/h4/d256/packed"}
# Linears of few tokens that on two multiprocessors have as many weights a block as on 132 those of large models.
MANY_WEIGHTS = {*(f"t{T}/n96/c3072" for T in (2, 4)), *(f"b2/t2/v3003/c96{how}" for how in ("", "/temp0.8"))}
# Rows that share blocks on a GPU of few multiprocessors.
SHARED_ROWS = {"b11/kv1-2100/h4g1/d64/page16/rope", "b11/kv1-4200/h4g1/d128/page16/rope"}
PASSES = (
    Pass(132, 250_000, {case.op for case in ALL_CASES}),
    Pass(8, 2_000_000, STREAMED),  # with few blocks the same weights fill rings again
    Pass(2, 1_000_000, {"norm_linear", "next_token"}, MANY_WEIGHTS, {torch.float16, torch.bfloat16}),
    Pass(132, 4_000_000, {"attention"}, LONG_PROMPTS, {torch.float16, torch.bfloat16}),  # float32 has no ring
    Pass(8, 4_000_000, {"attention"}, SHARED_ROWS, {torch.float16, torch.bfloat16}),
)
LISTS = {"linears": 16}  # pointers to host memory that holds so many pointers
SENTINEL = 0x7B  # in every byte of what has no contents: large numbers, whose sums and products are others


def record(
    cases: Sequence[Case] = ALL_CASES,
    passes: Sequence[Pass] = PASSES,
    training: Callable[[], Iterable[TrainCall]] = train_calls,
) -> list[Call]:
    """Every case's small shapes, in every type that its op takes; where a ring is filled again, larger ones; and what
    training launches.
    """
    calls: list[Call] = []
    for each in passes:
        with _pretended(Limits(HOPPER.shared_bytes, each.num_blocks)) as recorder:
            for case, shape, dtype in each.calls(cases):
                inputs = copied(shape.inputs("cpu", dtype, 0))
                case.poison(inputs)
                recorder.begin(inputs)
                case.call(getattr(cuda, case.op), inputs, recorder.empty)
                calls.append(recorder.call(f"{case.name}/{shape} {dtype}, {each.num_blocks} blocks"))
    with _pretended(HOPPER) as recorder:
        for made in training():
            recorder.begin(made.inputs)
            with _Watched(recorder):
                made.call()
            calls.append(recorder.call(made.name))
    return calls


class _Recorder:
    """Notes launches, and where their pointers point."""

    def __init__(self) -> None:
        self.begin(())

    def begin(self, inputs: tuple[Any, ...]) -> None:
        """A new call of an op."""
        self._memory = _Memory(inputs)
        self._given: dict[int, Tensor] = {}  # by where they begin; kept alive, so that no other tensor lies there
        self._kept: list[Tensor] = []
        self._buffers: dict[int, int] = {}  # by where they begin on the CPU
        self._sizes: list[int] = []
        self._contents: dict[int, tuple[bytes, int]] = {}  # and how often PyTorch wrote there
        self._launches: list[Launch] = []

    def call(self, name: str) -> Call:
        """What happened since."""
        return Call(name, self._sizes, self._launches)

    def empty(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory without contents."""
        dtype = dtype or like.dtype
        num_bytes = max(16, torch.Size(shape).numel() * dtype.itemsize)
        whole = torch.full((num_bytes,), SENTINEL, dtype=torch.uint8)
        self._given[whole.data_ptr()] = whole
        self._memory.add(whole)
        return whole[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def made(self, tensor: Tensor, has_contents: bool) -> None:
        """Memory that PyTorch gave."""
        self._memory.add(tensor)
        self._kept.append(tensor)
        if not has_contents:
            ctypes.memset(tensor.data_ptr(), SENTINEL, tensor.nbytes)
            self._given[tensor.data_ptr()] = tensor

    def launcher(self, kernel: str, name: str, parameters: Sequence[Any]) -> Callable[..., None]:
        """What stands in for one."""
        letters = {ctypes.c_void_p: "p", ctypes.c_int: "i", ctypes.c_int64: "l", ctypes.c_float: "f"}
        kinds = "".join(letters[parameter.ctype] for parameter in parameters)

        def launch(**arguments: Any) -> None:
            names = [parameter.name for parameter in parameters]
            if set(arguments) != set(names):
                raise TypeError(f"{name} takes {', '.join(names)}, and was given {', '.join(arguments)}.")
            written = dict[int, bytes]()
            converted = {
                each: self._pointer(arguments[each], each, written) if kind == "p" else arguments[each]
                for each, kind in zip(names, kinds, strict=True)
            }
            self._launches.append(Launch(kernel, name, kinds, converted, written))

        return launch

    def _pointer(self, value: int | None, name: str, written: dict[int, bytes]) -> Any:
        if not value or name == "stream":
            return None
        if name in LISTS:
            held = (ctypes.c_void_p * LISTS[name]).from_address(value)
            return tuple(self._pointer(each, "", written) for each in held)
        begin, size = self._memory.around(value, name)
        buffer = self._buffers.get(begin)
        if buffer is None:
            buffer = self._buffers[begin] = len(self._sizes)
            self._sizes.append(size)
        given = self._given.get(begin)
        # What PyTorch computes of numbers that no kernel wrote may be the same again.
        now = ctypes.string_at(begin, size), 0 if given is None else given._version
        if now != self._contents.get(buffer, None if given is None else (bytes([SENTINEL]) * size, 0)):
            written[buffer] = now[0]
        self._contents[buffer] = now
        return At(buffer, value - begin)


class _Watched(TorchDispatchMode):
    """Tells a recorder of all memory that PyTorch gives meanwhile, and has none of it used twice."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor):
                self._recorder.made(each, has_contents="empty" not in func.name())
        return found


class _Memory:
    """Where tensors lie: an op's inputs, what it was given, and what is looked for when neither is meant."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self._ranges: dict[int, int] = {}
        self._visit(inputs)

    def add(self, tensor: Tensor) -> None:
        """One more."""
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu" and storage.nbytes():
            self._ranges[storage.data_ptr()] = storage.nbytes()

    def around(self, pointer: int, name: str) -> tuple[int, int]:
        """Where a pointer's tensor begins, and how many bytes it has."""
        for generation in (None, *range(3)):
            if generation is not None:  # what is made on the way is young, what stays from call to call is not
                for each in gc.get_objects(generation):
                    if type(each) in (Tensor, Parameter):  # not fake ones, which have no memory
                        self.add(each)
            for begin, size in self._ranges.items():
                if begin <= pointer < begin + size:
                    return begin, size
        raise LookupError(f"{name} points to no tensor.")

    def _visit(self, each: Any) -> None:
        if isinstance(each, Tensor):
            self.add(each)
        elif isinstance(each, (tuple, list)):
            for part in each:
                self._visit(part)
        elif hasattr(each, "__dict__") and not isinstance(each, Enum):
            self._visit(tuple(vars(each).values()))


@contextmanager
def _pretended(gpu: Limits) -> Iterator[_Recorder]:
    """On the CPU ops take the ways of a Hopper GPU, and launch into a recorder."""
    recorder = _Recorder()

    @cache
    def library(kernel: str) -> SimpleNamespace:
        launchers = signatures(source(kernel).read_text())
        return SimpleNamespace(**{name: recorder.launcher(kernel, name, each) for name, each in launchers.items()})

    attention = import_module("eet_lab.ops.cuda.attention")  # its package has an op of that name
    replaced = (
        (native, "loaded", library),
        (attention, "_is_hopper", lambda device: True),
        (attention, "gpu", lambda: gpu),
        (linear, "gpu", lambda: gpu),
        (linear, "_most_clusters", lambda *_: tuple(gpu.num_blocks >> log for log in range(3))),
        (layer, "gpu", lambda: gpu),
        (layer, "_exchange", cache(layer._exchange.__wrapped__)),  # memory of its own, which a search of the heap finds
        (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
    )
    with ExitStack() as stack:
        for place, name, value in replaced:
            # PyTorch's build for the CPU has no streams.
            stack.enter_context(patch.object(place, name, value, create=place is torch._C))
        yield recorder


def built(calls: list[Call], *flags: str) -> Record:
    """For play.py, of kernels built with these flags for nvcc; none but those that are launched."""
    launched = frozenset().union(*(call.kernels for call in calls))
    libraries = native.build(sorted(launched), extra_flags=flags)
    return Record({name: str(path) for name, path in libraries.items()}, calls)


def main(plain: str, told: str, *kernels: str) -> None:
    """Write both files."""
    calls = [call for call in record() if not kernels or not call.kernels.isdisjoint(kernels)]
    Path(plain).write_bytes(pickle.dumps(built(calls)))
    Path(told).write_bytes(pickle.dumps(built(calls, "-DEET_RACECHECK")))
    print(f"{len(calls)} calls, {sum(len(call.launches) for call in calls)} launches")


if __name__ == "__main__":
    main(*sys.argv[1:])
