"""Launches that are written down and made again elsewhere: with the same arguments, and what they read."""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from eet_lab.ops.cuda import layer, linear
from eet_lab.ops.cuda.launching import DTYPES
from eet_lab.ops.native import all_names
from eet_lab.ops.records import ALL_CASES

SANITIZE = Path(__file__).resolve().parents[1] / "benchmarks" / "sanitize"


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that records; it has what plays as `play`."""
    monkeypatch.setattr(sys, "path", [str(SANITIZE), *sys.path])
    import record

    yield record
    for name in ("record", "play", "train_calls"):
        del sys.modules[name]


def recorded(sanitize: Any, name: str, shape: str, which: int = 0) -> Any:
    """The first call of one shape, as on the GPU of a pass."""
    [case] = [case for case in ALL_CASES if case.name == name]
    shapes = tuple(each for each in case.shapes if str(each) == shape)
    return sanitize.record([replace(case, shapes=shapes)], sanitize.PASSES[which : which + 1], tuple)[0]


def test_every_source_is_launched_from(sanitize):
    found = sanitize.record()
    launched = frozenset().union(*(call.kernels for call in found))
    assert launched == set(all_names()) - ({"wgmma_linear"} if not linear.MOST_TILE_TOKENS else set())
    first = [*{call.kernels: call for call in reversed(found)}.values()]
    assert pickle.loads(pickle.dumps(first)) == first and len(first) > 9
    assert any(call.name.startswith("fused_layer/") and "8 blocks" in call.name for call in found)


def test_the_fused_choice_is_recorded(sanitize):
    """The LM head of every step: each kernel that leaves its largest outputs, in place and of gathered rows."""
    found = sanitize.record([case for case in ALL_CASES if case.name == "next_token"], training=tuple)
    launches = [launch for call in found for launch in call.launches]
    names = {launch.launcher for launch in launches}
    heads = {"eet_linear", "eet_vector_linear", "eet_int8_linear"}
    assert heads | {"eet_choose_best", "eet_choose_top_k", "eet_choose"} <= names
    for name in heads - {"eet_int8_linear"}:
        calls = [launch.arguments for launch in launches if launch.launcher == name]
        assert any(call["temperature"] and call["positions"] and call["noise"] for call in calls), "it draws"
        assert any(call["out"] and call["best"] for call in calls), "for top-k"
    for name in heads:
        calls = [launch.arguments for launch in launches if launch.launcher == name]
        assert all(call["x"] for call in calls), name
        assert any(call["best"] and call["rows"] for call in calls), name


def test_norms_are_recorded_alone_and_with_a_residual(sanitize):
    found = sanitize.record([], ())
    launches = [launch.arguments for call in found for launch in call.launches]
    kinds = {(each["dtype"], each["log_team"] > 3, bool(each["dresidual"])) for each in launches if "dresidual" in each}
    assert kinds == {*product(range(3), (False, True), (False, True))}


def test_blocks_of_many_weights_are_recorded(sanitize):
    """eet_linear for few tokens in 16 bits: with a norm, and heads that choose and that draw."""
    found = sanitize.record(passes=[each for each in sanitize.PASSES if each.num_blocks == 2], training=tuple)
    calls = [launch.arguments for call in found for launch in call.launches if launch.kernel == "linear"]
    assert {(call["T"], bool(call["best"]), bool(call["temperature"])) for call in calls} == {
        (2, False, False),
        (4, False, False),
        (2, True, False),
        (2, True, True),
    }
    assert {call["dtype"] for call in calls} == {DTYPES[torch.float16], DTYPES[torch.bfloat16]}


@pytest.mark.parametrize(("D", "columns"), [(64, 384), (96, 320), (128, 320), (256, 128)])
def test_prompts_go_round_hoppers_ring(sanitize, D, columns):
    """`columns` are the stages of its plan for this head dim, of 64 keys each (csrc/hopper_attention.cu)."""
    found = sanitize.record(
        passes=[each for each in sanitize.PASSES if each.names == sanitize.LONG_PROMPTS], training=tuple
    )
    launches = [launch for call in found for launch in call.launches if launch.kernel == "hopper_attention"]
    longest = [each.arguments["longest"] for each in launches if each.arguments["D"] == D]
    assert len(longest) == 2 and min(longest) > columns, "in both types of 16 bits"
    assert sum(sum(call.sizes) for call in found) < 64 << 20


def test_what_pytorch_writes_is_told_even_if_it_was_there_before(sanitize):
    """Numbers that no kernel wrote, times an identity, are the same numbers."""
    norm, choose = recorded(sanitize, "next_token", "b65/t65/v403/c64/tied").launches
    assert choose.arguments["logits"].buffer in choose.written and norm.launcher == "eet_norm"


def test_linears_fill_few_blocks_on_a_small_gpu(sanitize):
    for which, blocks in ((0, 96), (1, 8)):
        [launch] = recorded(sanitize, "norm_linear", "t1/n96/c64/gelu_tanh", which).launches
        assert launch.arguments["num_blocks"] == blocks


def test_calls_of_some_kernels_are_written_with_what_they_launch_alone(sanitize, monkeypatch, tmp_path):
    calls = [
        recorded(sanitize, name, shape)
        for name, shape in (("fused_layer", "t1/c64/f256"), ("linear_residual", "t65/n96/c64"))
    ]
    monkeypatch.setattr(sanitize, "record", lambda: calls)
    monkeypatch.setattr(
        sanitize.native, "build", lambda names, extra_flags: {name: Path(name + "".join(extra_flags)) for name in names}
    )
    plain, told = (str(tmp_path / name) for name in ("plain", "told"))
    sanitize.main(plain, told, "vector_layer")
    for file, library in ((plain, "vector_layer"), (told, "vector_layer-DEET_RACECHECK")):
        assert pickle.loads(Path(file).read_bytes()) == ({"vector_layer": library}, calls[:1])
    sanitize.main(plain, told)
    found = pickle.loads(Path(plain).read_bytes())
    assert found.calls == calls and set(found.libraries) == calls[0].kernels | calls[1].kernels


def test_nothing_of_a_pretended_gpu_stays(sanitize):
    def answers():
        choice = linear.streaming_kernel(12, 40, 1600, 4, normed=True)
        return linear.gpu(), layer.gpu(), choice, layer._exchange.cache_info()

    before = answers()
    recorded(sanitize, "fused_layer", "t1/c64/f256", 1)
    assert answers() == before


def test_inputs_have_contents_and_what_is_new_has_none(sanitize):
    call = recorded(sanitize, "norm_linear", "t1/n96/c64/gelu_tanh")
    [launch] = call.launches
    out, best, x = (launch.arguments[name] for name in ("out", "best", "x"))
    assert launch.launcher == "eet_vector_linear" and best is None
    assert isinstance(out, sanitize.At) and out.buffer not in launch.written
    assert len(launch.written[x.buffer]) == call.sizes[x.buffer] == 64 * 2
    assert call.sizes[out.buffer] == 96 * 2


def test_what_pytorch_writes_between_two_launches_is_told(sanitize):
    """More tokens: a product by cuBLAS, and our bias and residual over that."""
    [epilogue] = recorded(sanitize, "linear_residual", "t65/n96/c64").launches
    out, product = epilogue.arguments["out"], epilogue.arguments["y"]
    assert product.buffer in epilogue.written and product != out


def test_what_pytorch_reads_between_two_launches_has_no_contents(sanitize):
    """Our norm, and what cuBLAS makes of it, bias and activation included."""
    [norm] = recorded(sanitize, "norm_linear", "t65/n96/c64/gelu_tanh").launches
    assert norm.arguments["out"].buffer not in norm.written, "our norm writes it"


class FakeGpu:
    """Memory of a GPU, as far as pointers go."""

    def __init__(self) -> None:
        self.uploads: dict[int, bytes] = {}
        self.given: list[int] = []

    def allocated(self, size: int) -> int:
        self.given.append(0x100000 * (1 + len(self.given)))
        return self.given[-1]

    def upload(self, to: int, contents: bytes) -> None:
        self.uploads[to] = contents

    def free(self, pointer: int) -> None:
        pass

    def synchronize(self, what: str) -> None:
        pass


@pytest.mark.parametrize("error", [0, 700])
def test_a_launch_is_made_with_the_same_arguments(sanitize, monkeypatch, error):
    call, made, gpu = recorded(sanitize, "fused_layer", "t1/c64/f256"), [], FakeGpu()
    play = sys.modules["play"]

    def launcher(*args):
        places = (ctypes.c_void_p * 16).from_address(args[list(call.launches[0].arguments).index("linears")].value)
        made.append(([arg.value for arg in args], list(places)))
        return error

    monkeypatch.setattr(play, "_Gpu", lambda: gpu)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: {"eet_vector_layer": launcher})
    record = play.Record({"vector_layer": "a.so"}, [call])
    if error:
        with pytest.raises(RuntimeError, match="fused_layer/t1/c64/f256 .*eet_vector_layer failed: CUDA error 700"):
            play.play(record)
        return
    assert play.play(record) == 1 and play.play(record, "linear") == 0
    [(args, places)] = made
    [launch] = call.launches

    def real(given):
        """A pointer where its buffer lies now."""
        if not isinstance(given, sanitize.At):
            return given
        assert len(gpu.uploads.get(gpu.given[given.buffer], b"")) in (0, call.sizes[given.buffer])
        return gpu.given[given.buffer] + given.offset

    assert places == [real(given) for given in launch.arguments["linears"]]
    for value, given in zip(args, launch.arguments.values(), strict=True):
        if type(given) is not tuple:
            assert value is given is None or value == pytest.approx(0 + real(given))
    assert len(gpu.given) == len(call.sizes) == len(set(gpu.given))
