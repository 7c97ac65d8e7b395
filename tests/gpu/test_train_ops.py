"""The kernels of training on a GPU: values and every gradient against plain PyTorch, odd shapes, and whole models."""

from __future__ import annotations

from functools import partial
from itertools import product

import encoders
import families
import pytest
import seq2seqs
import test_vision
import torch
from test_seq2seq_training import examples
from test_training import language, masked

from eet_lab.models import load
from eet_lab.models.decoder import mapped
from eet_lab.ops import reference
from eet_lab.ops.cuda import train_embedding, train_epilogue, train_norm
from eet_lab.ops.noise import Dropout, all_kept, token_keys
from eet_lab.ops.residuals import Residuals
from eet_lab.ops.types import Linear, Norm, autograd
from eet_lab.technique import Recipe
from eet_lab.training import Example, Trainer
from gpu.launches import replayed

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FUSED = "fused_norms,fused_activations,fused_residuals,fused_embeddings"
SHAPES = [(1, 64), (7, 520), (33, 768), (8191, 768), (7, 1600), (70, 4096), (300, 8192), (2113, 512)]
NARROW = [(1, 64), (7, 520), (1027, 768), (8191, 64), (33, 4096)]


def made(*shape: int, dtype: torch.dtype, std: float = 1.0, mean: float = 0.0, seed: int = 0) -> torch.Tensor:
    """Numbers of a dtype, which are the same in all that compare them."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * std + mean).to(DEVICE, dtype)


def run(op, inputs, dout):
    """Value and gradients of those inputs that are real numbers."""
    inputs = [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]
    out = op(*inputs)
    return [out.detach(), *torch.autograd.grad(out, [each for each in inputs if each.requires_grad], dout)]


def check(ours, plain, inputs, dout) -> None:
    """Each result within twice the error of plain PyTorch in the same dtype, both against 64 bits; and the same bits
    in a second run.
    """
    exact = run(plain, [each.double() if each.is_floating_point() else each for each in inputs], dout.double())
    low, found, again = run(plain, inputs, dout), run(ours, inputs, dout), run(ours, inputs, dout)
    eps = torch.finfo(dout.dtype).eps
    for place, (one, other, wanted, second) in enumerate(zip(found, low, exact, again, strict=True)):
        assert one.dtype == dout.dtype and one.isfinite().all(), place
        error, budget = ((each.double() - wanted).abs().max().item() for each in (one, other))
        assert error <= 2 * budget + 4 * eps * wanted.abs().max().item(), (place, error, budget)
        assert torch.equal(one, second), place


def dropout(T: int, p: float = 0.1) -> Dropout:
    numbers = torch.arange(T, device=DEVICE)
    return Dropout(p, 0.0, token_keys(73, numbers // 50, numbers % 50), numbers)


@pytest.mark.parametrize("T, C", SHAPES)
@pytest.mark.parametrize("kind", ["layer", "rms", "shifted", "no weight", "small"])
def test_norms(T, C, kind, dtype):
    eps, std = (1e-3, 1e-2) if kind == "small" else (1e-5, 1.0)  # where numbers are small, epsilon decides

    def of(norm):
        return lambda x, weight, bias=None: norm(x, Norm(weight, bias, eps), empty=autograd)

    weight = made(C, dtype=dtype, std=0.3, mean=1.0)
    if kind == "no weight":  # what was normed tells nothing of these channels then
        weight[::3] = 0
    x = made(T, C, dtype=dtype, std=std, mean=10.0 if kind == "shifted" else 0.2 * std, seed=1)
    inputs = [x, weight] if kind == "rms" else [x, weight, made(C, dtype=dtype, seed=2)]
    check(of(train_norm.norm), of(reference.norm), inputs, made(T, C, dtype=dtype, seed=3))


@pytest.mark.parametrize("T, C", [*SHAPES, (25, 8), (1000, 1024), (9, 2048)])
@pytest.mark.parametrize("kind", ["layer", "rms", "no gradient of what is normed"])
def test_norms_whose_input_goes_on(T, C, kind, dtype):
    """The gradient of x as it goes on is added to that of the norm, which alone may be all zeros."""
    inputs = [made(T, C, dtype=dtype, mean=0.2, seed=1), made(C, dtype=dtype, std=0.3, mean=1.0)]
    inputs += [] if kind == "rms" else [made(C, dtype=dtype, seed=2)]
    dout = made(2 * T, C, dtype=dtype, seed=3)
    if kind.startswith("no"):
        dout[:T] = 0

    def ours(x, weight, bias=None):
        return torch.cat(train_norm.norm_passing_on(x, Norm(weight, bias, 1e-5), empty=autograd))

    def plain(x, weight, bias=None):
        return torch.cat((reference.norm(x, Norm(weight, bias, 1e-5), empty=autograd), x))

    check(ours, plain, inputs, dout)
    if kind.startswith("no"):
        _, dx, *of_weights = run(ours, inputs, dout)
        assert torch.equal(dx, dout[T:]) and not any(each.any() for each in of_weights)


@pytest.mark.parametrize("act", ["gelu_tanh", "gelu", "relu", "silu", "tanh", "swiglu", "geglu"])
@pytest.mark.parametrize("T, F", [(1, 64), (7, 520), (1027, 768), (130, 4096)])
@pytest.mark.parametrize("biased", [True, False])
def test_activations(act, T, F, biased, dtype):
    N = 2 * F if act in reference.GATED else F
    inputs = [made(T, N, dtype=dtype, std=2.0), *([made(N, dtype=dtype, seed=1)] if biased else [])]

    def ours(y, bias=None):
        return train_epilogue.Epilogue.apply(y, bias, None, act, None)

    def plain(y, bias=None):
        return reference.activate(y if bias is None else y + bias, act, empty=autograd)

    check(ours, plain, inputs, made(T, F, dtype=dtype, seed=2))


@pytest.mark.parametrize("T, C, N", [(1, 64, 64), (7, 64, 520), (7, 64, 10), (1027, 128, 2304)])
def test_biases_of_layers_without_an_activation(T, C, N, dtype):
    """Their product adds them; 10 outputs are none for kernels."""
    inputs = [made(T, C, dtype=dtype), made(N, C, dtype=dtype, std=0.1, seed=1), made(N, dtype=dtype, seed=2)]

    def ours(x, weight, bias):
        return train_epilogue.linear_act(x, Linear(weight, bias), None, empty=autograd)

    def plain(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)

    check(ours, plain, inputs, made(T, N, dtype=dtype, seed=3))


@pytest.mark.parametrize("T, C", NARROW)
@pytest.mark.parametrize("p, biased", product([0.0, 0.1], [True, False]))
def test_residuals(T, C, p, biased, dtype):
    inputs = [made(T, C, dtype=dtype, std=2.0), made(T, C, dtype=dtype, seed=1)]
    inputs += [made(C, dtype=dtype, seed=2)] if biased else []

    def ours(y, residual, bias=None):
        return train_epilogue.Epilogue.apply(y, bias, residual, None, dropout(T, p).noise())

    def plain(y, residual, bias=None):
        return dropout(T, p)(y if bias is None else y + bias) + residual

    check(ours, plain, inputs, made(T, C, dtype=dtype, seed=3))


@pytest.mark.parametrize("T, C", NARROW)
def test_what_is_dropped_is_what_the_reference_drops(T, C, dtype):
    """Forward and backward, in each call of a pass."""
    ones, zeros = torch.ones(T, C, device=DEVICE, dtype=dtype), torch.zeros(T, C, device=DEVICE, dtype=dtype)
    drops = dropout(T, 0.3), dropout(T, 0.3)
    for _ in range(3):
        out, of_y = run(lambda y: train_epilogue.dropped(y, drops[0]), [ones], ones)
        wanted = drops[1](ones)
        assert torch.equal(out, wanted) and torch.equal(of_y, wanted)
    table = torch.ones(3, C, device=DEVICE, dtype=dtype)
    ids = torch.arange(T, device=DEVICE) % 3
    embed = partial(train_embedding.embedded, ids, ids, None)
    assert torch.equal(embed(table, None, None, empty=autograd, drop=drops[0]), drops[1](ones))
    assert torch.equal(zeros, dropout(T)(zeros)) and torch.equal(train_epilogue.dropped(ones, all_kept), ones)


@pytest.mark.parametrize("T, C", [(1, 64), (7, 520), (1027, 768), (8191, 64), (33, 4096), (320, 64), (4096, 8)])
@pytest.mark.parametrize("kind", ["uniform", "frequent", "one", "padded", "typed", "bare"])
def test_embeddings(T, C, kind, dtype):
    V, S = 503, 97
    generator = torch.Generator().manual_seed(T)
    ids = torch.randint(V, (T,), generator=generator)
    if kind == "frequent":
        ids = torch.where(torch.rand(T, generator=generator) < 0.6, ids % 3, ids)
    ids, positions = (torch.full_like(ids, 5) if kind == "one" else ids).to(DEVICE), torch.arange(T, device=DEVICE) % S
    types = ids % 2 if kind == "padded" else None
    tables = [made(V, C, dtype=dtype), made(S, C, dtype=dtype, seed=1), made(2, C, dtype=dtype, seed=2)]
    tables = tables[: 1 if kind == "bare" else 3 if kind in ("padded", "typed") else 2]
    how = {"scale": 1.5, "padding": int(ids[0])} if kind == "padded" else {}
    p = 0.1 if kind in ("frequent", "padded") else 0.0

    def of(op):
        def call(token, position=None, kind=None):
            return op(ids, positions, types, token, position, kind, empty=autograd, drop=dropout(T, p), **how)

        return call

    check(of(train_embedding.embedded), of(reference.embedded), tables, made(T, C, dtype=dtype, seed=3))


def composed(x, weight, bias, norm_weight, norm_bias):
    """A layer's worth of pieces."""
    norm_w, w = Norm(norm_weight, norm_bias, 1e-5), Linear(weight, bias)
    drop, residuals = dropout(len(x)), Residuals(train_norm.norm_passing_on)
    y = reference.norm_linear(
        x, norm_w, w, "gelu", empty=autograd, norm=residuals.norm, linear_act=train_epilogue.linear_act
    )
    return residuals.linear_residual(y, w, x, linear_residual=train_epilogue.linear_residual, empty=autograd, drop=drop)


def test_a_captured_pass_gives_the_same_bits(dtype):
    T, C = 130, 520
    inputs = [
        made(T, C, dtype=dtype),
        made(C, C, dtype=dtype, std=0.05),
        *(made(C, dtype=dtype, seed=i) for i in (1, 2, 3)),
    ]
    dout, eager = made(T, C, dtype=dtype, seed=4), None
    eager = run(composed, inputs, dout)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(composed, inputs, dout)
    torch.cuda.synchronize()
    for one, other in zip(replayed(lambda: run(composed, inputs, dout)), eager, strict=True):
        assert torch.equal(one, other)
    ids, table = torch.arange(T, device=DEVICE) % 7, made(9, C, dtype=dtype)
    gradient = partial(train_embedding.table_gradient, dout, ids, len(table), 1.0, None, dropout(T).noise())
    assert torch.equal(replayed(gradient), gradient())


def images() -> list[Example]:
    return [Example(pixels=image, labels=number % 2) for number, image in enumerate(test_vision.images())]


MODELS = {
    "gpt2": (families.theirs, "gpt2", language),
    "llama": (families.theirs, "llama", language),
    "llama with biases": (families.theirs, "llama-tied", language),
    "bert": (encoders.theirs, "bert-mlm", masked),
    "bart": (seq2seqs.theirs, "bart", examples),
    "t5": (seq2seqs.theirs, "t5-gated", examples),
    "vit": (test_vision.theirs, "classes", images),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_gradients_of_whole_models(name, p):
    theirs, kind, data = MODELS[name]
    layout = "pre_padding,mask_removal,packed_prefill"

    def gradients(dtype, recipe):
        is_exact = dtype == torch.float64
        network = load(theirs(kind), device=DEVICE, dtype=torch.float32 if is_exact else dtype).network
        network = mapped(network, torch.Tensor.double) if is_exact else network
        return Trainer(network, Recipe.parse(recipe).parts, dropout=p, attention_dropout=p).gradients(data())

    loss, exact = gradients(torch.float64, layout)
    for dtype in (torch.float32, torch.bfloat16):
        eps = torch.finfo(dtype).eps
        (_, low), (value, ours), again = (gradients(dtype, words) for words in (layout, *[f"{layout},{FUSED}"] * 2))
        assert value == pytest.approx(loss, rel=20 * eps), dtype
        assert ours.keys() == exact.keys()
        for path, wanted in exact.items():
            error, budget = ((each[path] - wanted).norm().item() for each in (ours, low))
            assert error <= 3 * budget + 16 * eps * wanted.norm().item(), (dtype, path, error, budget)
            assert torch.equal(ours[path], again[1][path]), (dtype, path)
