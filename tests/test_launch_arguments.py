"""What ops hand to launchers, held against the launchers' own signatures: mistakes there show without a GPU."""

from __future__ import annotations

import ctypes
from functools import cache, partial
from importlib import import_module

import pytest
import torch

from eet_lab.engine.settings import Settings
from eet_lab.errors import KernelError
from eet_lab.ops import cuda, native
from eet_lab.ops.cuda.attention import Split
from eet_lab.ops.cuda.launching import Limits
from eet_lab.ops.native.build import source
from eet_lab.ops.native.launchers import signatures
from eet_lab.ops.records import ALL_CASES
from eet_lab.ops.shapes import AttentionShape
from eet_lab.ops.types import Batch, Linear, Norm, Sampling, fresh

SMALL = 300_000  # bytes that a shape may read, so that the CPU is not kept busy
SHAPES = [(case, shape) for case in ALL_CASES for shape in case.shapes if shape.read_bytes(4) < SMALL]
KINDS = {
    ctypes.c_void_p: (int, type(None)),
    ctypes.c_int: (int,),
    ctypes.c_int64: (int,),
    ctypes.c_float: (int, float),
}


class Library:
    """Launchers that launch nothing: they look at their arguments, and note their names."""

    def __init__(self, kernel: str, launched: list[str]) -> None:
        self._signatures, self._launched = signatures(source(kernel).read_text()), launched

    def __getattr__(self, name: str):
        parameters = self._signatures[name]

        def launch(**arguments):
            assert set(arguments) == {p.name for p in parameters}, (
                f"{name} takes {', '.join(p.name for p in parameters)}"
            )
            for parameter, kind in parameters:
                value = arguments[parameter]
                assert isinstance(value, KINDS[kind]), f"{name}: {parameter} is {value!r}"
            if "stream" in arguments:  # else it tells of the GPU
                self._launched.append(name)

        return launch


@pytest.fixture
def launched(monkeypatch):
    names: list[str] = []
    monkeypatch.setattr(native, "loaded", cache(lambda kernel: Library(kernel, names)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return names


@pytest.mark.parametrize("on_hopper", [False, True], ids=["ampere", "hopper"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in ALL_CASES for dtype in (torch.float16, torch.float32) if dtype in case.dtypes],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_every_launch_has_the_arguments_that_its_launcher_takes(case, dtype, on_hopper, launched, monkeypatch):
    module = import_module("eet_lab.ops.cuda.attention")  # its package has an op of that name
    monkeypatch.setattr(module, "_is_hopper", lambda device: on_hopper)
    for shape in (shape for each, shape in SHAPES if each is case):
        case.call(getattr(cuda, case.op), shape.inputs("cpu", dtype, 0), fresh)
    assert launched
    streams = on_hopper and case.name == "decode_attention" and dtype == torch.float16
    assert ("eet_stream_attention" in launched) == streams


@pytest.mark.parametrize(
    ("rows", "heads", "longest", "name"),
    [
        (67, (2, 2, 64), 2049, "balanced"),
        (66, (2, 2, 64), 2049, "stream"),
        (67, (2, 2, 64), 2048, "stream"),
        (67, (2, 2, 128), 4097, "balanced"),
        (67, (2, 2, 128), 4096, "decode"),
        (45, (24, 1, 64), 2049, "balanced"),  # a KV head's queries take three blocks
    ],
)
def test_rows_share_blocks_where_many_may_be_long(rows, heads, longest, name, launched, monkeypatch):
    module = import_module("eet_lab.ops.cuda.attention")
    monkeypatch.setattr(module, "_is_hopper", lambda device: True)
    shape = AttentionShape((longest, *(1,) * (rows - 1)), *heads, decode=True, page=16)
    cuda.attention(*shape.inputs("cpu", torch.float16, 0), empty=fresh)
    assert launched == [f"eet_{name}_attention"]


def nothing_but(each: torch.Tensor, max_q: int) -> Batch:
    """A batch of which an op may ask which tokens are the newest, and how many a row has."""
    nothing = Batch(*[None] * 10)  # type: ignore[arg-type]
    return nothing._replace(last=each, positions=each, rows=each, first=each, max_q=max_q)


@pytest.mark.parametrize(
    ("how", "chooses"),
    [
        ((0.0, 0, 1.0), "eet_choose_best"),
        ((0.0, 5, 0.5), "eet_choose_best"),  # without a temperature there is no draw
        ((0.7, 0, 1.0), "eet_choose_best"),
        ((0.7, 300, 1.0), "eet_choose_best"),  # as many words as there are
        ((0.7, 132, 1.0), "eet_choose_top_k"),
        ((0.7, 9, 0.5), "eet_choose_top_k"),
        ((0.7, 133, 1.0), "eet_choose_top_k"),  # more than there are blocks
        ((0.7, 0, 0.5), "eet_choose_top_k"),
        ((0.7, 300, 0.5), "eet_choose_top_k"),
    ],
)
def test_the_choice_of_a_token_too(how, chooses, launched):
    x, head, each = torch.ones(3, 16), Linear(torch.ones(300, 16), None), torch.arange(3)
    batch = nothing_but(each, max_q=1)
    sampling = Sampling.of(torch.arange(3), [how] * 3, 300)
    cuda.next_token(x, batch, Norm(torch.ones(16), None, 1e-5), head, sampling, empty=fresh)
    assert launched == ["eet_linear", chooses]


def test_a_draw_on_a_gpu_of_more_blocks_than_threads_takes_the_other_way(launched, monkeypatch):
    module = import_module("eet_lab.ops.cuda.linear")
    monkeypatch.setattr(module, "gpu", lambda: Limits(227 * 1024, 513))
    x, head, each = torch.ones(3, 16), Linear(torch.ones(600, 16), None), torch.arange(3)
    batch = nothing_but(each, max_q=1)
    sampling = Sampling.of(torch.arange(3), [(0.7, 9, 1.0)] * 3, 600)
    cuda.next_token(x, batch, Norm(torch.ones(16), None, 1e-5), head, sampling, empty=fresh)
    assert launched == ["eet_linear", "eet_choose"]


def test_the_newest_of_as_many_tokens_as_rows_are_picked_where_a_row_has_several(launched):
    """Of 20 slots ten read two tokens each: as many tokens as rows, and not one each."""
    x, head = torch.ones(20, 16), Linear(torch.ones(300, 16), None)
    each, sampling, norm = torch.arange(20), Settings().sampling(20), Norm(torch.ones(16), None, 1e-5)
    asked = []

    def empty(name, *args, **options):
        asked.append(name)
        return fresh(name, *args, **options)

    for counts, picks in (([2, 0] * 10, True), ([1] * 20, False)):
        batch = nothing_but(each, max_q=max(counts))
        asked.clear()
        cuda.next_token(x, batch, norm, head, sampling, empty=empty)
        assert ("newest" in asked) == picks


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_no_rows_need_no_launch(temperature, launched):
    """A grid of 0 blocks would be refused as an invalid configuration."""
    head, none = Linear(torch.ones(40, 16), None), torch.empty(0, dtype=torch.long)
    batch = nothing_but(none, max_q=0)
    sampling = Settings(temperature=temperature).sampling(0)
    norm = Norm(torch.ones(16), None, 1e-5)
    assert cuda.next_token(torch.ones(0, 16), batch, norm, head, sampling, empty=fresh).shape == (0,)
    assert launched == []


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (Split("decode_attention", blocks=3), "3 blocks and 0 warps.*1, 2, 4 or 8"),
        (Split("decode_attention", blocks=2), "2 blocks and 0 warps"),  # one without the other
        (Split("decode_attention", warps=4), "0 blocks and 4 warps"),
        (Split("decode_attention", blocks=2, warps=5), "2 blocks and 5 warps"),
        (Split("stream_attention", blocks=16), "16 blocks and 0 warps.*[Ll]eave"),
        (Split("stream_attention", blocks=2, warps=4), "2 blocks and 4 warps"),
        (Split("balanced_attention", blocks=2), "2 blocks and 0 warps"),
        (Split("stream"), "names 'stream'.*stream_attention.*Take one"),
    ],
)
def test_a_split_that_no_launcher_takes_is_told(split, says, launched):
    inputs = AttentionShape((9, 20), 4, 4, 64, decode=True).inputs("cpu", torch.float16, 0)
    with pytest.raises(KernelError, match=says):
        cuda.attention(*inputs, empty=fresh, split=split)
    assert launched == []


@pytest.mark.parametrize("columns", [1_300_000, 1_400_000])
def test_a_cache_of_too_many_columns_for_decode_attention_is_told_in_the_meta_trace(columns):
    shape = AttentionShape((9, 20), 25, 25, 64, decode=True)
    qkv, _, batch, spec = shape.inputs("cpu", torch.float16, 0)
    keys = torch.empty(2, 25, columns, 64, dtype=torch.float16, device="meta")
    call = partial(cuda.attention, qkv.to("meta"), (keys, keys), batch, spec, empty=fresh)
    if keys.stride(0) < 2**31:
        assert call().shape == (2, 25 * 64)
        return
    with pytest.raises(KernelError, match=r"2,240,000,000 .*2,147,483,647.*fewer columns.*kv=paged"):
        call()
    cuda.attention(qkv.float().to("meta"), (keys.float(), keys.float()), batch, spec, empty=fresh)


def test_a_launch_with_an_argument_too_few_is_noticed(launched):
    with pytest.raises(AssertionError, match="eet_choose_best takes token, best, B"):
        native.loaded("sampling").eet_choose_best(token=0, best=0, B=1, num_blocks=1, dependent=0)
    with pytest.raises(AssertionError, match="num_blocks is None"):
        native.loaded("sampling").eet_choose_best(token=0, best=0, B=1, num_blocks=None, dependent=0, stream=0)
