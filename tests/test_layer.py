"""What lies between two layers' attention as one op: the same tokens, and a clear no to what it does not take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_paged import LAYOUTS, batch

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import KernelError
from eet_lab.models import weights
from eet_lab.models.config import PRESETS, Config
from eet_lab.models.decoder import fused
from eet_lab.ops import cuda, reference
from eet_lab.ops.cases import CaseFailed
from eet_lab.ops.cuda.launching import with_options
from eet_lab.ops.layer_cases import LAYER_CASES, LayerShape
from eet_lab.ops.types import fresh
from eet_lab.technique import Recipe

[CASE] = LAYER_CASES
META = torch.device("meta")


@pytest.mark.parametrize("words", LAYOUTS)
@pytest.mark.parametrize("most", [0, 2, 99])
def test_tokens_are_those_of_one_op_after_the_other(tiny, words, most):
    """Whether it takes no step, decode steps of two rows, or all."""
    parts = Recipe.parse(words).parts
    by_layer = with_options(fused, takes=lambda layers, T: most >= T)
    for lengths in ([5, 9], [1, 2, 3]):
        prompts = batch(0, lengths)
        expected = Engine(tiny.decoder, parts).generate(prompts, Settings(6))
        got = Engine(tiny.decoder, replace(parts, layers=by_layer)).generate(prompts, Settings(6))
        assert got.tokens == expected.tokens


@pytest.mark.parametrize("shape", [s for s in CASE.shapes if s.read_bytes(4) < 1_000_000], ids=str)
def test_the_reference_is_within_its_own_budget(shape):
    CASE.check(reference.fused_layer, shape, "cpu", torch.float32)


@pytest.mark.parametrize("scales", [(1 + 1e-3, 1), (1, 1 + 1e-3)])
def test_the_case_notices_what_is_wrong_in_either_tensor(scales):
    def wrong(*args, empty):
        return [part * scale for part, scale in zip(reference.fused_layer(*args, empty=empty), scales, strict=True)]

    with pytest.raises(CaseFailed, match="error"):
        CASE.check(wrong, CASE.shapes[0], "cpu", torch.float32)


def layers(config, dtype=torch.float16):
    return weights.random_decoder(config, 0, META, dtype).layers


def test_it_takes_one_or_two_tokens_in_16_bits():
    xl = layers(PRESETS["gpt2-xl"])
    assert [cuda.takes_layers(xl, T) for T in (0, 1, 2, 3)] == [False, True, True, False]
    assert not cuda.takes_layers(layers(PRESETS["gpt2-xl"], torch.float32), 1)
    assert not cuda.takes_layers(layers(PRESETS["gpt2"]), 1), "there it is slower"
    assert cuda.takes_layers(layers(Config(2, 4096, 32, 16384, 504, 64)), 1)
    assert not cuda.takes_layers(layers(Config(2, 12288, 96, 49152, 504, 64)), 1), "so many activations leave no ring"
    quantized = Recipe.parse("int8_weights", "cuda").parts.weights[0](
        weights.random_decoder(Config(1, 1600, 25, 6400, 504, 64), 0, torch.device("cpu"), torch.float16)
    )
    assert not cuda.takes_layers(quantized.layers, 1)


def changed(w, part, field, change):
    """The layer with one tensor of one of its parts changed."""
    its = getattr(w, part)
    return w._replace(**{part: its._replace(**{field: change(getattr(its, field))})})


@pytest.mark.parametrize(
    ("part", "field", "change", "says"),
    [
        ("proj", "weight", lambda t: t.t(), "proj's weight is .*not contiguous"),
        ("fc_1", "bias", lambda t: t.float(), "fc_1's bias is .*float32; the kernel needs .*float16"),
        ("fc_2", "weight", lambda t: t[:, :-8], r"fc_2's weight is \(64, 248\).*needs \(64, 256\)"),
        ("norm_2", "weight", lambda t: t[:8], r"norm_2's weight is \(8,\).*needs \(64,\)"),
        ("norm_1", "bias", lambda t: t.double(), "next norm_1's bias is .*float64"),
        ("qkv", "weight", lambda t: t.float(), "next qkv's weight is .*float32"),
        ("qkv", "scale", lambda t: torch.ones(192, 1), "weights are quantized"),
    ],
)
def test_tensors_that_the_kernel_cannot_read_are_named(part, field, change, says):
    inputs = list(LayerShape(1, 64, 256).inputs("cpu", torch.float16, 0))
    which = 3 if part in ("norm_1", "qkv") else 2  # what it reads of the next layer, and of this one
    inputs[which] = changed(inputs[which], part, field, change)
    with pytest.raises(KernelError, match=says):
        cuda.fused_layer(*inputs, empty=fresh)


@pytest.mark.parametrize(
    ("T", "C", "F", "dtype", "says"),
    [
        (3, 64, 256, "float16", "takes 1 to 2 tokens through a layer, and not 3"),
        (0, 64, 256, "float16", "takes 1 to 2 tokens through a layer, and not 0"),
        (1, 64, 256, "float32", "16 bits, and these are in torch.float32"),
        (1, 64, 260, "float16", "multiples of 8: these have 64, and 260 inside"),
        (2, 8, 65536, "float16", "no 2 tokens through layers of 8 channels and 65536 inside.*232,448 bytes"),
    ],
)
def test_what_it_does_not_take_is_told(T, C, F, dtype, says):
    inputs = LayerShape(T, C, F).inputs("cpu", getattr(torch, dtype), 0)
    with pytest.raises(KernelError, match=f"{says}.* Leave persistent_layers out"):
        cuda.fused_layer(*inputs, empty=fresh)


def test_layers_that_are_not_alike_are_told():
    inputs, other = (LayerShape(1, 64, F).inputs("cpu", torch.float16, 0) for F in (256, 512))
    with pytest.raises(KernelError, match=r"alike: here are Sizes\(A=64, C=64, F=256, .* and Sizes\(A=64, C=64, F=512"):
        cuda.fused_layer(*inputs[:3], other[2], "gelu", empty=fresh)


def test_a_decode_step_is_traced_with_it_and_a_prefill_without():
    engine = Engine(
        weights.random_decoder(Config(4, 1600, 25, 6400, 504, 64), 0, META, torch.float16),
        Recipe.parse("pre_padding,mask_removal,fused_kernels,persistent_layers", "cuda").parts,
    )
    found = engine.lifetimes([[1] * 9], Settings(5))
    ops = {name: {life.op for life in trace} for name, trace in found.items()}
    assert "fused_layer" in ops["decode"] and "linear_residual" not in ops["decode"]
    assert "fused_layer" not in ops["prefill"]
