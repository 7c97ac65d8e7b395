"""Kernels for training, as far as a CPU sees them: how pieces combine, what is launched, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from test_launch_arguments import launched  # noqa: F401  a fixture
from test_training import language

from eet_lab.bench.op_providers import piece
from eet_lab.errors import KernelError, RecipeError
from eet_lab.ops import reference
from eet_lab.ops.cuda import train_epilogue, train_norm, train_optimizer
from eet_lab.ops.cuda.train_loss import cross_entropy_grad, cross_entropy_loss, cross_entropy_with_grad
from eet_lab.ops.types import Linear, autograd
from eet_lab.parts import Parts, losses, optimizers
from eet_lab.parts.buffers import Update
from eet_lab.parts.products import ALIGNED_ROWS, Summed, add_product
from eet_lab.technique import Recipe, known
from eet_lab.techniques.fused_cross_entropy import FusedCrossEntropy
from eet_lab.training import Trainer


def test_the_fused_cross_entropy_combines_with_chunks_and_is_greyed_on_a_cpu():
    alone, both = (
        Recipe.parse(words) for words in ("fused_cross_entropy", "fused_cross_entropy,chunked_cross_entropy")
    )
    assert alone.parts.loss.func is losses.whole and both.parts.loss.func == losses.Chunked(2048)
    assert {recipe.parts.loss.keywords["cross_entropy"] for recipe in (alone, both)} == {losses.fused_cross_entropy}
    assert "CUDA kernels need an NVIDIA GPU" in known("fused_cross_entropy")().unavailable("cpu")
    with pytest.raises(RecipeError, match="fused_cross_entropy"):
        alone.check("cpu")
    with pytest.raises(RecipeError, match=r"takes? a cross entropy by the keyword `cross_entropy`"):
        FusedCrossEntropy().apply(replace(Parts(), loss=lambda states, labels, head, smoothing=0.0: states.sum()))


def test_pieces_that_are_timed_alone_are_those_of_the_recipe():
    """However many techniques have set keywords of the same op."""
    parts = Recipe.parse("fused_norms,fused_activations,fused_cross_entropy,chunked_cross_entropy").parts
    assert piece(parts.train_ops.norm_linear, "norm") is train_norm.norm
    assert piece(parts.train_ops.norm_linear, "linear_act") is train_epilogue.linear_act
    assert piece(parts.loss, "cross_entropy") is losses.fused_cross_entropy
    assert piece(Parts().train_ops.norm_linear, "norm") is reference.norm
    assert piece(Parts().loss, "cross_entropy") is losses.cross_entropy


def test_a_product_of_its_own_keeps_its_bias():
    """As that of a head in chunks has, which sums the gradients of both."""
    given, w = [], Linear(torch.randn(8, 4, requires_grad=True), torch.randn(8, requires_grad=True))

    def product(x, w, *, empty):
        given.append(w)
        return reference.linear(x, w, empty=empty)

    train_epilogue.linear_act(torch.randn(3, 4), w, None, empty=autograd, linear=product).sum().backward()
    assert given[0].bias is w.bias and torch.equal(w.bias.grad, torch.full((8,), 3.0))


def test_what_a_bias_was_added_to_can_be_written_over(monkeypatch):
    """As the product itself: queries are rotated in their place."""
    monkeypatch.setattr(
        train_epilogue, "epilogue_backward", lambda dout, *_, wants_bias: (dout, dout.sum(0) if wants_bias else None)
    )
    x, w = torch.randn(3, 4), Linear(torch.randn(8, 4, requires_grad=True), torch.randn(8, requires_grad=True))
    made = train_epilogue.linear_act(x, w, None, empty=autograd)
    made[:, :4].mul_(2)
    made.sum().backward()
    assert torch.equal(w.bias.grad, torch.tensor([6.0] * 4 + [3.0] * 4))
    assert torch.allclose(w.weight.grad, x.sum(0) * w.bias.grad[:, None] / 3)


@pytest.mark.parametrize("loss", [losses.whole, losses.Chunked(5)])
def test_a_piece_takes_the_place_of_the_cross_entropy(loss, tiny):
    """By any of them a model's gradients are the same; here by one that counts its calls."""
    calls = []

    def counted(name, step):
        return lambda *arguments: calls.append(name) or step(*arguments)

    plain = losses.cross_entropy_in_place
    names = ("loss", "gradient", "with_gradient")
    piece = losses.InPlace(*(counted(name, getattr(plain, name)) for name in names))
    given = replace(Parts(), loss=partial(loss, cross_entropy=piece))
    mine, its = (Trainer(tiny.network, parts, label_smoothing=0.1) for parts in (given, Parts()))
    value, grads = mine.gradients(language())
    wanted, theirs = its.gradients(language())
    assert value == pytest.approx(wanted, rel=1e-5)
    assert all(torch.allclose(grads[path], grad, rtol=1e-4, atol=1e-6) for path, grad in theirs.items())
    assert {*calls} == ({"loss", "gradient"} if loss is losses.whole else {"with_gradient"})
    calls.clear()
    assert mine.evaluate(language()) == pytest.approx(its.evaluate(language()), rel=1e-5)
    assert {*calls} == {"loss"}


@pytest.mark.parametrize("num_words", [23, ALIGNED_ROWS, ALIGNED_ROWS + 23])
def test_a_heads_products_are_summed_in_fp32_and_its_words_are_a_multiple_of_many(num_words):
    torch.manual_seed(0)
    weight, bias = torch.randn(num_words, 8, dtype=torch.bfloat16), torch.randn(num_words, dtype=torch.bfloat16)
    other = weight.clone().requires_grad_()
    layer = Linear(weight.requires_grad_(), bias.requires_grad_())
    product, x = Summed([weight], torch.float32), torch.randn(40, 8, dtype=torch.bfloat16, requires_grad=True)
    outer = torch.randn(40, num_words).bfloat16()
    aligned = product.aligned[id(weight)]
    storages = [each.untyped_storage().data_ptr() for each in (aligned.weight, weight)]
    assert storages[0] == storages[1] and len(aligned.rest) <= ALIGNED_ROWS, "no copy of the whole"
    rows = len(aligned.total)
    assert num_words <= rows < num_words + ALIGNED_ROWS and not rows % ALIGNED_ROWS
    for some, its in zip(x.split(10), outer.split(10), strict=True):
        y = product(some, layer)
        assert y.stride() == (rows, 1) and torch.equal(y, reference.linear(some, layer, empty=autograd))
        if some.data_ptr() == x.data_ptr():  # as the loss does
            with torch.no_grad():
                y.detach().copy_(its)
            y.backward(y.detach())
        else:
            y.backward(its)
    [total] = product.sums
    assert weight.grad is None and torch.allclose(total, outer.float().t() @ x.detach().float(), rtol=2e-2, atol=5e-2)
    assert torch.allclose(x.grad.float(), outer.float() @ weight.detach().float(), rtol=2e-2, atol=5e-2)
    assert torch.allclose(bias.grad.float(), outer.float().sum(0), rtol=2e-2, atol=5e-2)
    assert product(x.detach(), Linear(other, None)).requires_grad, "another weight has its own gradient"
    exact = torch.ones(2, 2)
    add_product(exact, torch.eye(2), torch.eye(2))
    assert torch.equal(exact, torch.ones(2, 2) + torch.eye(2))


def test_launches_of_the_loss_have_their_arguments(launched):  # noqa: F811
    labels, smoothing = torch.tensor([1, -100, 4]), 0.1
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        logits = torch.zeros(3, 8, dtype=dtype)[:, :5]
        _, kept = cross_entropy_loss(logits, labels, smoothing)
        before = logits._version
        cross_entropy_grad(logits, labels, kept, smoothing, torch.ones(()))
        cross_entropy_with_grad(logits, labels, smoothing)
        assert logits._version == before + 2, "who still needs the logits is told"
    assert launched == ["eet_cross_entropy_loss", "eet_cross_entropy_grad", "eet_cross_entropy"] * 3
    launched.clear()
    assert cross_entropy_with_grad(torch.zeros(0, 5), labels[:0], 0.0) == 0
    assert not launched
    for logits, wrong, says in (
        (torch.zeros(3, 5).double(), labels, "float64"),
        (torch.zeros(5, 3).t(), labels, r"strides \(1, 3\)"),
        (torch.zeros(3, 5), labels[:2], r"labels are \(2,\).*takes \[3\]"),
        (torch.zeros(3, 5), labels.int(), "int32"),
    ):
        with pytest.raises(KernelError, match=says):
            cross_entropy_with_grad(logits, wrong, 0.0)


@pytest.fixture
def by_kernels(monkeypatch, launched):  # noqa: F811
    """Optimizers take their kernels, which note their launches."""
    monkeypatch.setattr(optimizers, "takes", lambda x: x.dtype != torch.float64)
    monkeypatch.setattr(optimizers.native, "prepare", lambda names: None)
    of = Update.of.__func__
    narrow = lambda cls, *numbers: cls(*(t.float() if t.dtype == torch.float64 else t for t in of(cls, *numbers)))  # noqa: E731
    monkeypatch.setattr(Update, "of", classmethod(narrow))
    return launched


@pytest.mark.parametrize("master", ["float32", "none", "stochastic"])
def test_flat_optimizers_launch_once_for_each_buffer(by_kernels, master):
    weights = [torch.zeros(shape, dtype=torch.bfloat16).requires_grad_() for shape in ((3, 5), (7,))]
    groups = [{"params": [weight]} for weight in weights]
    for kind, settings, name in (
        (optimizers.FlatAdamW, {}, "eet_adamw"),
        (optimizers.FlatSGD, {}, "eet_sgd"),
        (optimizers.FlatSGD, {"momentum": 0.9, "nesterov": True}, "eet_sgd"),
    ):
        by_kernels.clear()
        optimizer = kind([dict(group) for group in groups], master=master, **settings)
        optimizer.step()
        assert by_kernels == [name] * 2
        optimizer.grad_norm()
        assert by_kernels[2:] == ["eet_squares"] * 2 + ["eet_root"]
    by_kernels.clear()
    optimizers.AdamW([torch.zeros(3).requires_grad_()]).step()
    optimizers.FlatAdamW([torch.zeros(3, dtype=torch.float64).requires_grad_()]).step()
    assert not by_kernels, "tensor by tensor, and in other types, the formulas are PyTorch's"


def test_what_an_update_cannot_take(launched):  # noqa: F811
    weights, numbers = torch.zeros(8), Update(*(torch.zeros(()) for _ in range(3)), torch.zeros((), dtype=torch.bool))
    update = partial(train_optimizer.sgd, momentum=0.0, weight_decay=0.0, nesterov=False)
    for arguments, says in (
        ((weights.double(), weights.double(), [], None, numbers), "float64"),
        ((weights, weights.half(), [], None, numbers), "grads is .*float16.*needs .*float32"),
        ((weights.half(), weights.half(), [weights.half()], None, numbers), "a moment or master copy is .*float16"),
        ((weights, weights, [], None, numbers._replace(step=torch.zeros((), dtype=torch.int64))), "step is .*int64"),
        ((weights.view(2, 4), weights.view(2, 4), [], None, numbers), r"\(2, 4\)"),
    ):
        with pytest.raises(KernelError, match=says):
            update(*arguments)
    with pytest.raises(KernelError, match="rounding at random is for torch.bfloat16"):
        update(weights, weights, [], None, numbers, noise=1)
    assert not launched
