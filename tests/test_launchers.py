"""How a launcher is called: its signature is read from the definition, and every argument is told by its name."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from eet_lab.errors import KernelBuildError, KernelError
from eet_lab.ops.native.launchers import Launcher, Parameter, signatures


@pytest.fixture
def launcher():
    """Of a function that gives an error for negative sizes; `passed` is what arrived."""
    kinds = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_int]
    passed = []

    def function(out, size, step, scale, dependent):
        passed.append((out, size, step, scale, dependent))
        return int(size < 0)

    library = SimpleNamespace(
        cdll={"eet_answer": ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(function)}, error_string=lambda error: "too bad"
    )
    names = ("out", "size", "step", "scale", "dependent")
    made = Launcher(library, "eet_answer", [Parameter(*each) for each in zip(names, kinds, strict=True)])
    made.launch.passed = passed
    return made.launch


@pytest.mark.parametrize("size", [2**31, 2**32 + 5, -(2**31) - 1])
def test_a_size_that_an_int_cannot_hold_is_told_before_the_launch(launcher, size):
    """ctypes takes its lower 32 bits without a word."""
    with pytest.raises(KernelError) as told:
        launcher(out=1 << 40, size=size, step=3, scale=1.0, dependent=True)
    assert f"size is {size:,}" in str(told.value) and f"{2**31 - 1:,}" in str(told.value)
    assert launcher.passed == []


def test_sizes_up_to_the_largest_int_arrive(launcher):
    launcher(out=1 << 40, size=2**31 - 1, step=2**40, scale=0.5, dependent=True)
    launcher(dependent=False, scale=0.5, step=-(2**40), size=0, out=None)
    assert launcher.passed == [(1 << 40, 2**31 - 1, 2**40, 0.5, 1), (None, 0, -(2**40), 0.5, 0)]
    with pytest.raises(KernelError, match=r"eet_answer failed: too bad \(size=-5, step=3, scale=1.0, dependent=0\)"):
        launcher(out=None, size=-5, step=3, scale=1.0, dependent=0)


GIVEN = {"out": 1, "size": 2, "step": 3, "scale": 1.0, "dependent": 0}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"size": 2.5}, "size is 2.5, but C takes a whole number"),
        ({"dependent": "no"}, "dependent is 'no', but C takes a whole number"),
        ({"out": 1.5}, r"out is 1.5, but C takes an address, such as x.data_ptr\(\) of a tensor"),
        ({"out": torch.zeros(2)}, r"out is tensor\(\[0., 0.\]\), but C takes an address"),
        ({"step": None}, "step is None, but C takes a whole number"),
        ({"scale": "no"}, "scale is 'no', but C takes a number"),
        ({"scale": None, "size": 2.5}, "size is 2.5"),
    ],
)
def test_an_argument_of_another_type_is_named(launcher, wrong, says):
    with pytest.raises(KernelError, match=f"eet_answer: {says}"):
        launcher(**GIVEN | wrong)
    assert launcher.passed == []


@pytest.mark.parametrize("name", GIVEN)
def test_an_argument_that_is_missing_is_named(launcher, name):
    with pytest.raises(KernelError, match=f"eet_answer was not given {name}. It takes, by keyword: out, size, step,"):
        launcher(**{each: value for each, value in GIVEN.items() if each != name})
    with pytest.raises(KernelError, match="eet_answer was not given out, size, step, scale, dependent"):
        launcher()
    assert launcher.passed == []


def test_an_argument_that_no_parameter_has_is_named(launcher):
    with pytest.raises(KernelError, match="eet_answer has no parameter 'sizes'. Did you mean 'size'?"):
        launcher(**GIVEN, sizes=3)
    with pytest.raises(KernelError, match="eet_answer has no parameter 'dependant'. Did you mean 'dependent'?"):
        launcher(out=1, size=2, step=3, scale=1.0, dependant=0)
    with pytest.raises(TypeError, match="eet_answer.* takes 0 positional arguments"):
        launcher(*GIVEN.values())
    assert launcher.passed == []


def test_a_parameter_that_no_keyword_can_be_is_told():
    with pytest.raises(KernelBuildError, match="eet_x: no keyword of a call can be 'lambda'"):
        signatures('extern "C" cudaError_t eet_x(float lambda, cudaStream_t stream) {}')


def test_signatures_are_read_from_the_definition():
    text = 'extern "C" cudaError_t f(void* a, const int64_t* b, int c,\n   float d, cudaStream_t s) {\n}'
    assert [(p.name, p.ctype) for p in signatures(text)["f"]] == [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("c", ctypes.c_int),
        ("d", ctypes.c_float),
        ("s", ctypes.c_void_p),
    ]
    with pytest.raises(KernelBuildError, match="cannot pass 'double x'"):
        signatures('extern "C" cudaError_t f(double x) {}')
