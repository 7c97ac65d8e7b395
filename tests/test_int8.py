"""Weight-only int8: what rounding costs, the pass over a decoder, and the check of a lossy recipe."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.bench.parity import ParityCheck
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import KernelError
from eet_lab.models.decoder import mapped, tensors
from eet_lab.ops import cuda, reference
from eet_lab.ops.cases import CaseFailed
from eet_lab.ops.cuda import int8, linear
from eet_lab.ops.int8 import LARGEST, dequantized, group_size, quantized
from eet_lab.ops.int8_cases import INT8_CASES, Int8Shape
from eet_lab.ops.native.build import source
from eet_lab.ops.native.launchers import signatures
from eet_lab.ops.shapes import LinearShape
from eet_lab.ops.types import Linear, Norm, fresh
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, everything
from eet_lab.techniques.int8_weights import Int8Weights, ToInt8

ROWS = [[5], [7, 8, 9, 10], [3, 1, 4, 1, 5, 9, 2]]
SETTINGS = Settings(max_new_tokens=9)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def matrix(N: int, C: int, seed: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> torch.Tensor:
    """Rows of very different sizes, as trained weights have them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (torch.randn(N, 1, generator=generator) * spread).exp()
    return (torch.randn(N, C, generator=generator) * sizes).to(dtype)


@given(
    N=st.integers(1, 9),
    C=st.integers(1, 40).map(lambda n: 8 * n),
    group=st.sampled_from([0, 64, 128]),
    seed=st.integers(0, 999),
    dtype=st.sampled_from(list(DTYPES.values())),
)
def test_no_weight_is_off_by_more_than_half_its_scale(N, C, group, seed, dtype):
    weight = matrix(N, C, seed, dtype)
    whole, scale = quantized(weight, group)
    assert whole.shape == weight.shape
    assert whole.dtype == torch.int8
    assert whole.is_contiguous()
    assert int(whole.abs().max()) <= LARGEST
    assert scale.dtype == torch.float32
    assert scale.shape == (N, -(-C // group) if group else 1)
    again = dequantized(whole, scale, out=torch.empty(N, C, dtype=torch.float64))
    each = scale.repeat_interleave(group_size(C, scale.shape[1]), 1)[:, :C]
    assert bool(((again - weight.double()).abs() <= each.double() * 0.5001).all())
    assert bool((whole.abs().amax(1) == LARGEST).all())  # the whole range is used, so no larger scale would do


@given(C=st.integers(1, 5000), group=st.sampled_from([64, 128, 256]))
def test_the_group_is_known_from_the_shapes(C, group):
    num_groups = -(-C // group)
    assert group_size(C, num_groups) == (group if num_groups > 1 else C)


@given(seed=st.integers(0, 999), group=st.sampled_from([64, 128]))
def test_groups_lose_no_more_than_a_channel_does(seed, group):
    weight = matrix(4, 320, seed)
    weight[:, ::67] *= 20  # outliers, which cost only their own group
    errors = []
    for each in (group, 0):
        whole, scale = quantized(weight, each)
        errors.append((dequantized(whole, scale, out=torch.empty_like(weight)) - weight).pow(2).mean().item())
    assert errors[0] < errors[1]


def test_nothing_stays_nothing_and_nan_stays_nan():
    whole, scale = quantized(torch.zeros(2, 16))
    assert bool((dequantized(whole, scale, out=torch.empty(2, 16)) == 0).all())
    for bad in (float("nan"), float("inf")):
        weight = torch.ones(2, 16)
        weight[1, 3] = bad
        again = dequantized(*quantized(weight), out=torch.empty(2, 16))
        assert bool(again[0].isfinite().all())
        assert bool(again[1].isnan().any())


def test_quantizing_what_is_quantized_changes_nothing():
    whole, scale = quantized(matrix(5, 96, 1), 64)
    weight = dequantized(whole, scale, out=torch.empty(5, 96))
    assert torch.equal(quantized(weight, 64)[0], whole)


@pytest.mark.parametrize("group", [0, 64])
def test_the_reference_computes_with_the_weight_that_it_stands_for(group):
    x, weight, bias = matrix(3, 96, 1), matrix(10, 96, 2), torch.randn(10)
    whole, scale = quantized(weight, group)
    plain = Linear(dequantized(whole, scale, out=torch.empty_like(weight)), bias)
    int8 = Linear(whole, bias, scale)
    norm = Norm(torch.ones(96), torch.zeros(96), 1e-5)
    for op, args in ((reference.norm_linear, (x, norm)), (reference.linear_residual, (x,))):
        rest = (torch.ones(3, 10),) if op is reference.linear_residual else ()
        assert torch.equal(op(*args, int8, *rest, empty=fresh), op(*args, plain, *rest, empty=fresh))


SMALL = [(case, shape) for case in INT8_CASES for shape in case.shapes if shape.read_bytes(4) < 1_000_000]


@pytest.mark.parametrize(("case", "shape"), SMALL, ids=[f"{case.name}/{shape}" for case, shape in SMALL])
def test_the_reference_in_fp32_is_within_the_budget(case, shape):
    case.check(getattr(reference, case.op), shape, "cpu", torch.float32)


@pytest.mark.parametrize("case", INT8_CASES, ids=lambda case: case.name)
def test_a_case_fails_an_op_that_forgets_a_scale(case):
    def forgetful(*args, empty):
        args = [a._replace(scale=a.scale.clone().index_fill_(0, torch.tensor([3]), 1.0)) if isinstance(a, Linear) else a
                for a in args]  # fmt: skip
        return getattr(reference, case.op)(*args, empty=empty)

    with pytest.raises(CaseFailed, match="error"):
        case.check(forgetful, case.shapes[0], "cpu", torch.float32)


def test_int8_shapes_have_half_the_bytes_and_their_own_names():
    shape = Int8Shape(1, 4800, 1600, group=64)
    assert str(shape) == "t1/n4800/c1600/int8g64"
    assert shape.read_bytes(2) == 4800 * (1600 + 4 * 25) + 2 * (1600 + 4800)
    assert Int8Shape(1, 50257, 1600).read_bytes(2) < 0.51 * LinearShape(1, 50257, 1600).read_bytes(2)


def asked(shape: Int8Shape) -> list[str]:
    """What the op of the kernels asks `empty` for, on meta tensors."""

    def empty(name, size, like, dtype=None):
        names.append(name)
        return like.new_empty(size, dtype=dtype)

    names: list[str] = []
    inputs = mapped(shape.inputs("cpu", torch.float16, 0), lambda tensor: tensor.to("meta"))
    (cuda.linear_residual if shape.residual else cuda.norm_linear)(*inputs, empty=empty)
    return names


def test_only_many_tokens_and_odd_widths_are_expanded():
    assert asked(Int8Shape(1, 40, 1600)) == asked(Int8Shape(8, 40, 1600, group=64)) == ["linear"]
    assert asked(Int8Shape(17, 40, 1600)) == ["normed", "dequantized", "linear"]
    assert asked(Int8Shape(2, 40, 200)) == ["normed", "dequantized", "linear"]
    assert asked(Int8Shape(4, 40, 1600, residual=True)) == []
    assert asked(Int8Shape(40, 40, 1600, residual=True)) == ["dequantized", "linear"]


@pytest.fixture
def launched(monkeypatch):
    """Launches as {parameter: argument}, by launcher; nothing runs."""
    calls: dict[str, dict] = {}

    class Library:
        def __init__(self, name):
            self.parameters = signatures(source(name).read_text())

        def __getattr__(self, launcher):
            names = [parameter.name for parameter in self.parameters[launcher]]
            return lambda *args: calls.update({launcher: dict(zip(names, args, strict=True))})

    for module in (int8, linear):
        monkeypatch.setattr(module.native, "loaded", Library)
        monkeypatch.setattr(module, "stream_of", lambda x: 0)
    return calls


@pytest.mark.parametrize("group", [0, 64])
def test_launchers_get_what_they_are_declared_to_take(launched, group):
    x, norm, w, act = Int8Shape(3, 48, 1600, "gelu_tanh", group=group).inputs("cpu", torch.float16, 0)
    cuda.norm_linear(x, norm, w, act, empty=fresh, dependent=True)
    call = launched["eet_int8_linear"]
    sizes = {"T": 3, "N": 48, "K": 1600, "G": 25 if group else 1, "log_inputs": 6 if group else 0, "act": 1}
    assert sizes.items() <= call.items()
    places = {"weight": w.weight, "scale": w.scale, "bias": w.bias, "norm_weight": norm.weight, "x": x}
    assert all(call[name] == tensor.data_ptr() for name, tensor in places.items())
    assert (call["residual"], call["best"], call["at"], call["dependent"]) == (None, None, None, True)
    rows = torch.tensor([2, 0])
    best = linear.largest_outputs(x, rows, norm, w, empty=fresh)
    call = launched["eet_int8_linear"]
    assert (call["out"], call["best"], call["at"], call["T"]) == (None, best.data_ptr(), rows.data_ptr(), 2)
    with pytest.raises(KernelError, match="int8 head draws no tokens.*logits"):
        linear.largest_outputs(x, rows, norm, w, linear.Draw(rows, rows[:1], norm.weight), empty=fresh)
    made = int8.expanded(w, x, empty=fresh)
    call = launched["eet_dequantize"]
    assert (call["out"], call["N"], call["K"], call["G"]) == (made.data_ptr(), 48, 1600, sizes["G"])
    plain = Linear(made, w.bias)
    cuda.linear_residual(x, plain, residual := torch.zeros(3, 48).half(), empty=fresh)
    call = launched["eet_vector_linear"]
    assert call["out"] == call["residual"] == residual.data_ptr()
    assert (call["weight"], call["norm_weight"], call["K"]) == (made.data_ptr(), None, 1600)


def test_a_scale_that_does_not_fit_is_named():
    x, norm, w, act = mapped(Int8Shape(1, 40, 64).inputs("cpu", torch.float16, 0), lambda tensor: tensor.to("meta"))
    for bad in (w._replace(scale=w.scale.half()), w._replace(scale=w.scale[:20])):
        with pytest.raises(KernelError, match="scale is"):
            cuda.norm_linear(x, norm, bad, act, empty=fresh)
    with pytest.raises(KernelError, match=r"weight is .*float16.*the kernel needs \(40, 64\) torch.int8"):
        cuda.norm_linear(x, norm, w._replace(weight=w.weight.half()), act, empty=fresh)


@pytest.mark.parametrize("head", [True, False])
def test_the_pass_quantizes_linears_alone_and_once(tiny, head):
    change, before = ToInt8(0, head), [t.clone() for t in tensors(tiny.decoder)]
    model = change(tiny.decoder)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(tiny.decoder), strict=True))
    for layer in model.layers:
        assert all(part.weight.dtype == torch.int8 for part in layer if isinstance(part, Linear))
        assert all(part.weight.dtype == torch.float32 for part in layer if isinstance(part, Norm))
    assert (model.head.scale is not None) == head
    assert model.token_embedding is tiny.decoder.token_embedding
    assert model.weight_bytes < tiny.decoder.weight_bytes
    assert model.dtype == torch.float32
    assert change(tiny.decoder).layers[0].qkv.weight is model.layers[0].qkv.weight


def test_a_copy_goes_with_its_weight(tiny):
    weight = tiny.decoder.layers[0].qkv.weight.clone()
    layer = tiny.decoder.layers[0]._replace(qkv=Linear(weight, None))
    model = ToInt8(0, True)(tiny.decoder._replace(layers=(layer,)))
    gone = weakref.ref(model.layers[0].qkv.weight)
    del weight, layer, model
    gc.collect()
    assert gone() is None


def test_it_is_not_among_all_and_says_so():
    assert "int8_weights" not in everything("cpu").names
    assert Recipe((Int8Weights(64, False),)).tolerance > 0
    assert Recipe((Int8Weights(),)).lossy
    assert not Recipe.parse("all").lossy
    assert str(Int8Weights(64, False)) == "int8_weights:group=64:head=False"


@pytest.fixture(scope="module")
def witness(tiny):
    return ParityCheck(tiny.decoder, ROWS, SETTINGS)


@pytest.mark.parametrize("technique", [Int8Weights(), Int8Weights(64), Int8Weights(128, False)], ids=str)
@pytest.mark.parametrize("words", ["", "all"])
def test_it_runs_on_a_cpu_and_is_judged_by_its_own_bound(tiny, witness, words, technique):
    recipe = Recipe((*Recipe.parse(words).techniques, technique))
    found = witness.judge(recipe.parts, tolerance=recipe.tolerance)
    assert found.verdict == "lossy", found.explanation
    assert witness.budget < found.max_error <= found.budget
    assert "its stated bound" in found.explanation
    tokens = Engine(tiny.decoder, recipe.parts).generate(ROWS, SETTINGS).tokens
    assert tokens == Engine(technique.apply(Parts()).weights[0](tiny.decoder)).generate(ROWS, SETTINGS).tokens


def test_beyond_its_bound_it_is_different(witness):
    parts = Recipe((Int8Weights(),)).parts
    found = witness.judge(parts, tolerance=1e-5)
    assert found.verdict == "different"
    assert "Beyond its bound" in found.explanation


def test_a_wrong_kernel_does_not_hide_behind_the_bound(witness):
    def linear_residual(x, w, residual, *, empty):
        return reference.linear_residual(x, w, residual, empty=empty).mul_(1 + 3e-4)

    parts = Recipe((Int8Weights(),)).parts
    spoiled = replace(parts, ops=replace(parts.ops, linear_residual=linear_residual))
    found = witness.judge(spoiled, tolerance=0.1)
    assert found.verdict == "different"
    assert "not what plain PyTorch computes with its weights" in found.explanation


def test_a_lossy_baseline_is_held_against_its_own_weights(tiny):
    baseline = Recipe((Int8Weights(),)).parts
    both = ParityCheck(tiny.decoder, ROWS, SETTINGS, baseline)
    more = Recipe((*Recipe.parse("all").techniques, Int8Weights()))
    assert both.judge(more.parts).verdict == "identical"
    assert both.judge(Parts(), tolerance=0.1).verdict == "lossy"
