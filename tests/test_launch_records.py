"""Launches that are written down and made again elsewhere: with the same arguments, and what they read."""

from __future__ import annotations

import ctypes
import pickle
import sys
from dataclasses import replace

import pytest

from eet_lab.ops.all_cases import ALL_CASES
from eet_lab.ops.native import all_names
from eet_lab.paths import benchmarks_dir

sys.path.insert(0, str(benchmarks_dir()))
import launches
from launches import At


def recorded(name: str, shape: str) -> launches.Call:
    """The call in fp16 of one shape."""
    [case] = [case for case in ALL_CASES if case.name == name]
    shapes = tuple(each for each in case.shapes if str(each) == shape)
    return launches.record([replace(case, shapes=shapes)], {}).calls[0]


def test_every_source_is_launched_from():
    found = launches.record(libraries={})
    assert {launch.kernel for call in found.calls for launch in call.launches} == set(all_names())
    assert pickle.loads(pickle.dumps(found)) == found


def test_inputs_have_contents_and_what_is_new_has_none():
    call = recorded("norm_linear", "t1/n96/c64/gelu_tanh")
    [launch] = call.launches
    out, best, x = launch.args[:3]
    assert launch.launcher == "eet_vector_linear" and best is None
    assert isinstance(out, At) and out.buffer not in launch.written
    assert len(launch.written[x.buffer]) == call.sizes[x.buffer] == 64 * 2
    assert call.sizes[out.buffer] == 96 * 2


def test_what_pytorch_writes_between_two_launches_is_told():
    """More tokens: our norm, its product by cuBLAS, and our epilogue over that."""
    call = recorded("norm_linear", "t17/n96/c64/gelu_tanh")
    norm, epilogue = call.launches
    out = epilogue.args[0]
    assert norm.args[0].buffer not in norm.written, "our norm writes it"
    assert out.buffer in epilogue.written and epilogue.args[1] == out


class FakeGpu:
    """Memory of a GPU, as far as pointers go."""

    def __init__(self) -> None:
        self.uploads: dict[int, bytes] = {}
        self._next = 0x1000

    def allocated(self, size: int) -> int:
        self._next += 0x100000
        return self._next

    def upload(self, to: int, contents: bytes) -> None:
        self.uploads[to] = contents

    def free(self, pointer: int) -> None:
        pass

    def synchronize(self, what: str) -> None:
        pass


@pytest.mark.parametrize("error", [0, 700])
def test_a_launch_is_made_with_the_same_arguments(monkeypatch, error):
    call, made, gpu = recorded("rest_of_layer", "t1/c64/f256"), [], FakeGpu()

    def launcher(*args):
        places = (ctypes.c_void_p * 16).from_address(args[6].value)
        made.append(([arg.value for arg in args], list(places)))
        return error

    monkeypatch.setattr(launches, "_Gpu", lambda: gpu)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: {"eet_vector_layer": launcher})
    record = launches.Record({"vector_layer": "a.so"}, [call])
    if error:
        with pytest.raises(RuntimeError, match="rest_of_layer/t1/c64/f256 .*eet_vector_layer failed: CUDA error 700"):
            launches.play(record)
        return
    assert launches.play(record) == 1 and launches.play(record, "linear") == 0
    [(args, places)] = made
    [launch] = call.launches
    for value, given in zip(args, launch.args, strict=True):
        assert isinstance(given, tuple) or (value is given is None) or value == pytest.approx(float(given))
    assert [place is None for place in places] == [given is None for given in launch.args[6]]
    x = args[0]
    assert len(gpu.uploads[x]) == 64 * 2
