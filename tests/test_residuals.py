"""Residuals whose gradient a norm adds to its own: the same gradients, fewer sums, and nothing that is kept."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import permutations

import encoders
import families
import pytest
import seq2seqs
import test_vision
import torch
from test_launch_arguments import launched  # noqa: F401  a fixture
from test_seq2seq_training import examples
from test_train_ops import PIECES
from test_training import language, masked

from eet_lab.bench.launches import around_each
from eet_lab.ops import native, reference
from eet_lab.ops.cuda import train_norm
from eet_lab.ops.cuda.launching import with_options
from eet_lab.ops.residuals import Residuals
from eet_lab.ops.types import Norm, autograd
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, known
from eet_lab.training import Example, Trainer


class PassingOn(torch.autograd.Function):
    """The reference's norm, and x as it goes on."""

    adds: list[bool] = []
    alive: list[weakref.ref] = []

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        PassingOn.alive.append(weakref.ref(x))
        return reference.norm(x, Norm(weight, bias, eps), empty=autograd), x

    @staticmethod
    def backward(ctx, dy, dresidual):
        inputs = [None if each is None else each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            normed = reference.norm(inputs[0], Norm(*inputs[1:], ctx.eps), empty=autograd)
        found = iter(torch.autograd.grad(normed, [each for each in inputs if each is not None], dy))
        dx, dweight, dbias = (None if each is None else next(found) for each in inputs)
        PassingOn.adds.append(dresidual is not None)
        return dx if dresidual is None else dx + dresidual, dweight, dbias, None


def passing_on(x, w, *, empty):
    return PassingOn.apply(x, w.weight, w.bias, w.eps)


def norm(x, w, *, empty):
    return reference.norm(x, w, empty=empty)


norm.passes_on = passing_on


def with_norm(parts: Parts) -> Parts:
    ops = parts.train_ops
    return replace(parts, train_ops=replace(ops, norm_linear=with_options(ops.norm_linear, norm=norm)))


def images() -> list[Example]:
    return [Example(pixels=image, labels=number % 2) for number, image in enumerate(test_vision.images())]


MODELS = {  # and how many of the norms' inputs are residuals, too
    "gpt2": (lambda: families.ours("gpt2"), language, 6),
    "llama": (lambda: families.ours("llama"), language, 6),
    "vit": (lambda: test_vision.ours("classes"), images, 6),
    "t5": (lambda: seq2seqs.ours("t5-gated"), examples, 12),
    "bart": (lambda: seq2seqs.ours("bart"), examples, 0),
    "bert": (lambda: encoders.ours("bert-mlm"), masked, 0),
}
RMS = ("llama", "t5")


@pytest.fixture
def noted():
    PassingOn.adds, PassingOn.alive = [], []
    return PassingOn


@pytest.mark.parametrize("recipe", ["pre_padding", "all"])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_that_autograd_adds(name, p, recipe, noted):
    """To the bit, but for RMS norms: PyTorch's are several steps, in between which autograd adds a residual's."""
    model, data, count = MODELS[name]
    network = model().network
    plain = Recipe.parse(recipe, "cpu", network.config.in_training).parts
    found = [
        Trainer(network, parts, dropout=p, attention_dropout=p, batch_tokens=9999).gradients(data())
        for parts in (plain, with_norm(plain))
    ]
    (wanted, theirs), (value, grads) = found
    assert value == wanted and grads.keys() == theirs.keys()
    for path, grad in theirs.items():
        off = 2e-6 * grad.norm() if name in RMS else 0
        assert (grads[path] - grad).norm() <= off, path
    assert sum(noted.adds) == count


def test_nothing_is_kept_beyond_the_pass(noted):
    network = families.ours("gpt2").network
    trainer = Trainer(network, with_norm(Parts()), batch_tokens=9999)
    gc.collect()
    gc.disable()
    try:
        trainer.gradients(language())
        trainer.evaluate(language())
        assert len(noted.alive) > 7 and not [each for each in noted.alive if each() is not None]
    finally:
        gc.enable()


def test_what_is_passed_on_is_kept_until_it_is_taken(noted):
    w, taken = Norm(torch.ones(8), None, 1e-5), []
    residuals = Residuals(passing_on)
    first, second = (torch.randn(3, 8, requires_grad=True) for _ in range(2))

    def op(x, w, residual, **how):
        taken.append((residual, how))

    adds = partial(residuals.linear_residual, linear_residual=op)
    residuals.norm(first, w, empty=autograd)
    adds(second, w, first, empty=autograd)  # which the norm passed on
    adds(second, w, first, drop=1)  # and that only once
    residuals.norm(first, w, empty=autograd)
    adds(second, w, second)  # another
    residuals.norm(first, w, empty=autograd)
    residuals.norm(second, w, empty=autograd)
    adds(second, w, first)  # one before the last
    (on, how), *others = taken
    assert on is not first and on.data_ptr() == first.data_ptr() and how == {"empty": autograd}
    assert [each for each, _ in others] == [first, second, first] and others[0][1] == {"drop": 1}


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "timed"])
def test_kernels_add_the_gradients_whatever_the_order_of_techniques(wrapped, launched, monkeypatch):  # noqa: F811
    library = native.loaded("train_norm")
    inner, adds = library.eet_norm_backward, []
    monkeypatch.setattr(
        library, "eet_norm_backward", lambda **a: (adds.append(a["dresidual"] is not None), inner(**a)), raising=False
    )

    @contextmanager
    def around(name):
        yield

    for order in permutations(PIECES):
        parts = Recipe.parse("pre_padding").parts
        for name in order:
            parts = known(name)().apply(parts)
        if wrapped:  # as a timeline and a fusion map have it
            parts = replace(parts, train_ops=around_each(parts.train_ops, around))
        adds.clear()
        Trainer(families.ours("gpt2").network, parts, dropout=0.1, batch_tokens=9999).gradients(language())
        assert adds == [False, *[True] * 6], "the norm before the head is the first, and adds nothing"


def test_an_op_that_shows_no_pieces_goes_as_before(launched):  # noqa: F811
    ops = Recipe.parse("fused_norms").parts.train_ops
    hidden = ops.wrapped(lambda name, op: lambda *given, **how: op(*given, **how))
    for each, wanted in ((ops, True), (hidden, False), (Parts().train_ops, False)):
        norm = each.differentiable(None).norm_linear.keywords.get("norm")
        assert (norm is not None) == wanted


def test_a_norm_takes_the_gradients_that_there_are(launched, monkeypatch):  # noqa: F811
    seen = []
    library = native.loaded("train_norm")
    inner = library.eet_norm_backward
    monkeypatch.setattr(library, "eet_norm_backward", lambda **a: (seen.append(a), inner(**a)), raising=False)
    w = Norm(torch.ones(64, requires_grad=True), torch.zeros(64, requires_grad=True), 1e-5)
    x, dy, don = (torch.ones(6, 64, requires_grad=True) for _ in range(3))
    normed, on = train_norm.norm_passing_on(x, w, empty=autograd)
    assert on is not x and on.data_ptr() == x.data_ptr()
    keep = partial(torch.autograd.grad, inputs=x, retain_graph=True)
    keep((normed, on), grad_outputs=(dy, don))
    keep((normed,), grad_outputs=(dy,))
    keep((train_norm.norm(x, w, empty=autograd),), grad_outputs=(dy,))
    keep((normed, on), grad_outputs=(dy, don.new_ones(64, 6).t()))  # not as it lies in memory
    first, *without, transposed = seen
    assert (first["dy"], first["dresidual"]) == (dy.data_ptr(), don.data_ptr())
    assert [each["dresidual"] for each in without] == [None, None] and transposed["dresidual"] is not None
    (found,) = keep((on,), grad_outputs=(don,))
    assert torch.equal(found, don) and len(seen) == 4, "nobody read what was normed"
    with torch.no_grad():
        assert not any(each.requires_grad for each in train_norm.norm_passing_on(x, w, empty=autograd))
