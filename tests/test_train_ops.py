"""Fused pieces of training, as far as a CPU sees them: how they combine, what is launched, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import permutations

import encoders
import families
import pytest
import seq2seqs
import torch
from test_launch_arguments import launched  # noqa: F401  a fixture
from test_seq2seq_training import examples
from test_training import language, masked

from eet_lab.errors import KernelError, RecipeError
from eet_lab.models.config import Config
from eet_lab.models.decoder import mapped
from eet_lab.ops import native, reference
from eet_lab.ops.cuda import train_epilogue, train_norm
from eet_lab.ops.noise import Dropout, Noise, all_kept, token_keys
from eet_lab.ops.types import Norm, autograd, fresh
from eet_lab.parts import Parts, replaced
from eet_lab.technique import Recipe, known
from eet_lab.training import Trainer

PIECES = {
    "fused_norms": {f"train_ops.{op}.norm" for op in ("norm_linear", "linear_residual_norm", "embed_norm")},
    "fused_activations": {"train_ops.norm_linear.linear_act"},
    "fused_residuals": {"train_ops.linear_residual", "train_ops.linear_residual_norm.linear_residual"},
    "fused_embeddings": {"train_ops.embed.embedded", "train_ops.embed_norm.embedded", "train_ops.embed_norm.dropped"},
}
KERNELS = {"norm", "train_norm", "train_epilogue", "train_embedding"}


def test_techniques_bind_their_pieces_in_any_order_over_whatever_op_is_there():
    for order in permutations(PIECES):
        parts, slots = Parts(), set[str]()
        for name in order:
            after = known(name)().apply(parts)
            assert {*replaced(parts, after)} == PIECES[name]
            parts, slots = after, slots | PIECES[name]
        assert {*replaced(Parts(), parts)} == slots and {*parts.train_ops.kernels} == KERNELS
    assert Recipe.parse(",".join(PIECES)).parts.ops == Parts().ops
    for name in PIECES:
        assert "CUDA kernels need an NVIDIA GPU" in (known(name)().unavailable("cpu") or "")


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, {}),
        ({"hidden_size": 36}, dict.fromkeys(PIECES, "multiple of 8 channels.* model has 36")),
        ({"hidden_size": 8200}, {"fused_norms": "at most 8,192, and the model has 8,200"}),
        ({"ffn_size": 52}, {"fused_activations": "multiple of 8 channels.* have 52 inside"}),
        ({"act": "mish"}, {"fused_activations": "know the activations .*, not mish"}),
    ],
)
def test_models_that_do_not_fit_are_told_before_any_work(changes, wrong):
    config = replace(Config(2, 64, 4, 96, 97, 64), **changes).in_training
    for name in PIECES:
        reason = known(name)().unfit(config)
        assert (reason is None) == (name not in wrong)
        if reason:
            assert re.search(wrong[name], reason)


@pytest.mark.parametrize("name", PIECES)
def test_weights_of_another_type_are_told_before_any_work(name):
    network = mapped(families.ours("gpt2").network, torch.Tensor.double)
    with pytest.raises(RecipeError, match="float16, bfloat16 and float32, not float64. Load the model"):
        Trainer(network, known(name)().apply(Parts()))


@pytest.mark.parametrize(
    ("model", "data", "counts"),
    [
        (lambda: families.ours("gpt2"), language, {"norm": 7, "linear_act": 7, "embedded": 1}),
        (lambda: encoders.ours("bert-mlm"), masked, {"norm": 8, "linear_residual": 6, "embedded": 1, "dropped": 1}),
    ],
    ids=["gpt2", "bert"],
)
def test_a_piece_takes_the_place_of_the_plain_one_in_every_op(model, data, counts):
    calls = Counter[str]()

    def counted(name, piece):
        return lambda *arguments, **keywords: calls.update([name]) or piece(*arguments, **keywords)

    pieces = {name: counted(name, getattr(reference, name)) for name in ("norm", "linear_act", "linear_residual")}
    pieces |= {name: counted(name, getattr(reference, name)) for name in ("embedded", "dropped")}
    takes = {
        "norm_linear": ("norm", "linear_act"),
        "linear_residual_norm": ("norm", "linear_residual"),
        "embed": ("embedded",),
        "embed_norm": ("embedded", "norm", "dropped"),
    }
    plain = Recipe.parse("pre_padding").parts
    bound = {op: partial(getattr(reference, op), **{n: pieces[n] for n in names}) for op, names in takes.items()}
    given = replace(plain, train_ops=replace(plain.train_ops, **bound))
    mine, its = (Trainer(model().network, parts, dropout=0.1, batch_tokens=9999) for parts in (given, plain))
    (value, grads), (wanted, theirs) = mine.gradients(data()), its.gradients(data())
    assert value == wanted and all(torch.equal(grads[path], theirs[path]) for path in theirs)
    assert {name: calls[name] for name in counts} == counts


@pytest.mark.parametrize(
    ("model", "data", "norms", "epilogues", "embeds"),
    [
        (lambda: families.ours("gpt2"), language, 7, 9, 1),
        (lambda: families.ours("llama"), language, 7, 9, 1),
        (lambda: encoders.ours("bert-mlm"), masked, 8, 10, 1),
        (lambda: seq2seqs.ours("bart"), examples, 12, 14, 2),
    ],
    ids=["gpt2", "llama", "bert", "bart"],
)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_what_a_pass_launches(model, data, norms, epilogues, embeds, p, launched):  # noqa: F811
    """Forward and backward of a whole model, over launchers that look at their arguments."""
    parts = Recipe.parse(",".join(("pre_padding", *PIECES))).parts
    Trainer(model().network, parts, dropout=p, batch_tokens=9999).gradients(data())
    found, drops_normed = Counter(launched), p > 0 and norms > 7  # embeddings that are normed are dropped behind that
    assert found["eet_norm"] == found["eet_norm_backward"] == norms
    assert found["eet_train_epilogue"] == epilogues + drops_normed * embeds
    assert found["eet_train_embed"] == embeds


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_shapes_of_launches(dtype, launched, monkeypatch):  # noqa: F811
    """Teams that hold a row, blocks that share the rows, and nothing where there is nothing to do."""
    seen = []
    inner = native.loaded("train_norm").eet_norm_backward
    monkeypatch.setattr(native.loaded("train_norm"), "eet_norm_backward", lambda **a: (seen.append(a), inner(**a)))
    many = 250 if dtype == torch.float32 else 334  # two blocks on a multiprocessor, or three: 4 rows a team, or 3
    for T, C, team, blocks in ((1, 64, 0, 1), (0, 64, 0, 1), (40, 520, 1, 10), (7, 8192, 4, 7), (8000, 64, 0, many)):
        x = torch.ones(T, C, dtype=dtype)
        train_norm.norm_backward(x, x, torch.ones(C, dtype=dtype), None, torch.ones(T))
        assert (seen[-1]["log_team"], seen[-1]["num_blocks"]) == (team, blocks)
    launched.clear()
    x = torch.ones(7, 64, dtype=dtype)
    assert train_epilogue.epilogue_backward(x, None, None, None, None, wants_bias=False) == (x, None)
    assert train_epilogue.dropped(x, all_kept) is x and not launched
    same, dbias = train_epilogue.epilogue_backward(x, None, None, None, None, wants_bias=True)
    assert same is x and dbias is not None and launched == ["eet_train_epilogue_backward"]


def test_what_a_piece_cannot_take(launched):  # noqa: F811
    x, keys = torch.ones(3, 64), torch.arange(4)
    with pytest.raises(KernelError, match=r"bias is \(64,\) torch.float16.*needs \(64,\) torch.float32"):
        train_epilogue.epilogue(x, torch.ones(64).half(), None, None, None)
    with pytest.raises(KernelError, match=r"residual is \(3, 32\)"):
        train_epilogue.epilogue(x, None, torch.ones(3, 32), None, None)
    with pytest.raises(KernelError, match=r"keys of what is dropped is \(4,\).*needs \(3,\) torch.int64"):
        train_epilogue.epilogue(x, None, None, None, Noise(keys, 1, 0.1))
    with pytest.raises(KernelError, match="norm's weight is .*float16"):
        train_norm.norm(x, Norm(torch.ones(64).half(), None, 1e-5), empty=autograd)
    assert not launched


def test_noise_is_that_of_a_call():
    """A kernel that draws from it and the reference drop the same, and count calls alike."""
    numbers = torch.arange(9)
    one, other = (Dropout(0.3, 0.1, token_keys(12, numbers, numbers), numbers) for _ in range(2))
    for _ in range(3):
        noise = one.noise()
        assert torch.equal(Dropout(0.3, 0.0, noise.tokens, numbers)(torch.ones(9, 5)) == 0, noise_of(noise, 1))
        assert torch.equal(other(torch.ones(9, 5)) == 0, noise_of(noise, noise.call))
    assert Dropout(0.0, 0.1, numbers, numbers).noise() is None and all_kept.noise() is None
    assert all_kept(numbers) is numbers


def noise_of(noise: Noise, call: int) -> torch.Tensor:
    """What is dropped, as csrc/eet/drop.cuh says it."""

    def mix(x: int) -> int:
        x &= 0x7FFFFFFF
        for multiplier in (0x2C1B3C6D, 0x297A2D39):
            x = ((x ^ x >> 15) * multiplier) & 0x7FFFFFFF
        return x ^ x >> 15

    below = int(noise.p * 2**31)
    return torch.tensor([[mix(mix(key + call) + c) < below for c in range(5)] for key in noise.tokens.tolist()])


def test_the_slope_of_relu_at_0_is_0_as_in_transformers():
    x = torch.zeros(3, requires_grad=True)
    reference.activate(x, "relu", empty=autograd).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3)) and not reference.activate(x.detach(), "relu", empty=fresh).any()
