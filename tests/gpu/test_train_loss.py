"""Cross entropy by kernels on a GPU: values and gradients are fp32's, whatever the vocabulary and where rows begin."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional

from eet_lab.losses import cross_entropy, linear_cross_entropy
from eet_lab.models.config import Config
from eet_lab.models.decoder import mapped
from eet_lab.models.weights import random_decoder
from eet_lab.ops.cuda.train_loss import cross_entropy_grad, cross_entropy_loss, cross_entropy_with_grad
from eet_lab.parts import Parts, losses
from eet_lab.technique import Recipe
from eet_lab.training import Example, Trainer

from .launches import replayed

pytestmark = pytest.mark.gpu

# One word, fewer than a vector, odd ones, GPT-2's, and rows of which shared memory holds a part (in fp32, in any type).
WORDS = [1, 2, 7, 23, 1000, 4099, 50257, 131_077]


def batch(words: int, dtype: torch.dtype, rows: int = 13, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, some of them large, whose rows are `pad` numbers apart; and labels, some of which are ignored."""
    generator = torch.Generator("cuda").manual_seed(words + rows)
    whole = torch.randn(rows, words + pad, device="cuda", generator=generator).mul_(4).to(dtype)
    logits = whole[:, :words]
    logits[1, words // 2] = 60.0
    labels = torch.randint(words, (rows,), device="cuda", generator=generator)
    labels[::4] = losses.IGNORED
    labels[1], labels[2] = 0, words - 1
    return logits, labels


def exact(logits: torch.Tensor, labels: torch.Tensor, smoothing: float, dtype: torch.dtype = torch.float64):
    """The loss and the gradient by PyTorch in a dtype."""
    leaf = logits.to(dtype, copy=True).requires_grad_()
    wide = leaf if dtype == torch.float64 else leaf.float()
    loss = functional.cross_entropy(wide, labels, reduction="sum", label_smoothing=smoothing)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def within(ours: torch.Tensor, low: torch.Tensor, true: torch.Tensor, dtype: torch.dtype) -> None:
    error, its = ((each.double() - true).abs().max().item() for each in (ours, low))
    assert error <= 2 * its + 4 * torch.finfo(dtype).eps * true.abs().max().item()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("words", WORDS)
def test_loss_and_gradient_are_fp32s(dtype, words, smoothing):
    for pad in (0, 5):
        logits, labels = batch(words, dtype, pad=pad)
        true, low = exact(logits, labels, smoothing), exact(logits, labels, smoothing, dtype)
        kept = logits.clone()
        loss, rows = cross_entropy_loss(logits, labels, smoothing)
        within(loss, low[0], true[0], torch.float32)
        assert torch.equal(logits, kept), "the forward pass leaves them"
        is_label = labels != losses.IGNORED
        sums = kept[is_label].double().logsumexp(-1)
        assert torch.allclose(rows.double().sum(0)[is_label], sums, rtol=1e-6, atol=1e-6)

        outer = torch.tensor(0.37, device="cuda")
        cross_entropy_grad(logits, labels, rows, smoothing, outer)
        within(logits, low[1] * 0.37, true[1] * 0.37, dtype)
        assert not logits[~is_label].any()

        once = batch(words, dtype, pad=pad)[0]
        within(cross_entropy_with_grad(once, labels, smoothing), low[0], true[0], torch.float32)
        within(once, low[1], true[1], dtype)


def test_nothing_beside_a_row_is_touched():
    """Rows of an odd number of words, in a larger matrix: what is between them, before and behind stays."""
    whole = torch.full((9, 4111), 7.0, device="cuda", dtype=torch.bfloat16)
    logits, labels = whole[1:-1, 3:4102], torch.arange(7, device="cuda")
    logits.copy_(torch.randn(7, 4099, device="cuda"))
    cross_entropy_with_grad(logits, labels, 0.1)
    _, rows = cross_entropy_loss(logits, labels, 0.1)
    cross_entropy_grad(logits, labels, rows, 0.1, torch.ones((), device="cuda"))
    logits.fill_(7.0)
    assert (whole == 7).all()


def test_two_calls_and_a_replay_are_equal_to_the_bit():
    found = []
    for call in (lambda make: make(), replayed):
        logits, labels = batch(50257, torch.bfloat16, rows=300)
        kept = logits.clone()

        def both(logits=logits, kept=kept, labels=labels):
            logits.copy_(kept)
            return cross_entropy_with_grad(logits, labels, 0.1)

        both()
        found.append((call(both).clone(), logits.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_numbers_that_are_not_finite_show_as_in_pytorch(value):
    logits, labels = batch(4099, torch.float32)
    logits[3, [0, 1, 2, 3, 700, 4098]] = value
    labels[3] = 5
    true = exact(logits, labels, 0.0, torch.float32)
    loss = cross_entropy_with_grad(logits, labels, 0.0)
    assert torch.equal(loss.isnan(), true[0].isnan())
    assert torch.equal(logits.isnan(), true[1].isnan())


def test_a_label_that_is_no_word_cannot_be_overlooked():
    logits, labels = batch(1000, torch.bfloat16)
    labels[5] = 1000
    assert cross_entropy_with_grad(logits, labels, 0.0).isnan()
    assert logits[5].isnan().all() and logits[:5].isfinite().all()


@pytest.mark.parametrize("in_place", [False, True])
def test_the_public_loss_scales_by_what_comes_from_outside(dtype, in_place):
    logits, labels = batch(1003, dtype)
    true, low = exact(logits, labels, 0.1), exact(logits, labels, 0.1, dtype)
    leaf = logits.clone().requires_grad_()
    made = leaf * 1.0
    loss = cross_entropy(made, labels, reduction="sum", label_smoothing=0.1, in_place=in_place)
    scale = torch.tensor(3.0, device="cuda", requires_grad=True)
    (loss * scale).backward(retain_graph=not in_place)
    within(leaf.grad, low[1] * 3, true[1] * 3, dtype)
    assert torch.equal(made, logits) is not in_place
    if not in_place:
        [again] = torch.autograd.grad(loss * scale, leaf)
        assert torch.equal(again, leaf.grad), "what is not in place can be differentiated again"
    if in_place:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            cross_entropy(leaf.tanh(), labels, in_place=True).backward()


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_head_in_chunks(dtype, has_bias):
    """Odd words, chunks that do not divide the rows, and a sum in fp32 over many of them."""
    torch.manual_seed(3)
    states, weight, bias = (torch.randn(shape, device="cuda").to(dtype) for shape in ((301, 96), (1021, 96), (1021,)))
    labels = torch.randint(1021, (301,), device="cuda")
    labels[::7] = losses.IGNORED
    inputs = [states, weight * 0.3, bias][: 2 + has_bias]

    def gradients(loss, wide: torch.dtype):
        leaves = [each.to(wide, copy=True).requires_grad_() for each in inputs]
        value = loss(*leaves)
        return [value.detach(), *torch.autograd.grad(2 * value, leaves)]

    def plain(states, weight, bias=None):
        return functional.cross_entropy(functional.linear(states, weight, bias), labels, label_smoothing=0.1)

    def ours(states, weight, bias=None):
        return linear_cross_entropy(states, weight, labels, linear_bias=bias, label_smoothing=0.1, chunk=64)

    for mine, low, true in zip(
        gradients(ours, dtype), gradients(plain, dtype), gradients(plain, torch.float64), strict=True
    ):
        within(mine, low, true, dtype)


@pytest.mark.parametrize("recipe", ["fused_cross_entropy", "fused_cross_entropy,chunked_cross_entropy:chunk=50"])
def test_a_models_gradients(recipe):
    config = Config(2, 64, 4, 256, 503, 64)
    network = random_decoder(config, 0, torch.device("cuda"), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    examples = [Example(torch.randint(503, (n,), generator=generator).tolist()) for n in (64, 30, 47)]

    def of(parts: Parts, dtype: torch.dtype):
        return Trainer(mapped(network, lambda t: t.to(dtype)), parts, label_smoothing=0.1).gradients(examples)

    true, low = of(Parts(), torch.float32), of(Parts(), torch.bfloat16)
    mine = of(Recipe.parse(recipe, "cuda").check("cuda").parts, torch.bfloat16)
    assert abs(mine[0] - true[0]) <= 2 * abs(low[0] - true[0]) + 1e-3 * abs(true[0])
    for path, grad in true[1].items():
        within(mine[1][path], low[1][path], grad.double(), torch.bfloat16)


def test_the_peak_of_memory_is_that_of_a_chunk():
    states = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50257, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(50257, (4096,), device="cuda")
    call = partial(linear_cross_entropy, states, weight, labels, chunk=512)
    call().backward()
    states.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call().backward()
    most = torch.cuda.max_memory_allocated() - before
    logits, of_weight = 512 * 50257 * 2, weight.numel() * 4
    assert most < 1.2 * (logits + of_weight) + 8 * states.numel() * 2


def test_parts_are_those_of_the_kernels():
    parts = Recipe.parse("fused_cross_entropy", "cuda").parts
    assert parts.loss.keywords == {"cross_entropy": losses.fused_cross_entropy}
    assert replace(parts, loss=losses.whole) == Parts()
