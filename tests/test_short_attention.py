"""Attention of short rows, as far as a CPU sees it: what is launched, what is left to others, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import families
import pytest
import torch
from test_launch_arguments import launched  # noqa: F401  a fixture
from test_train_ops import Config
from test_varlen import batch, drawn

from eet_lab.errors import KernelError
from eet_lab.ops.cuda import train_attention
from eet_lab.ops.cuda.launching import HOPPER
from eet_lab.ops.cuda.train_attention import LONGEST, attend_heads
from eet_lab.ops.noise import Dropout, token_keys
from eet_lab.ops.types import NO_EXTRAS, Extras, Norm, Spec, autograd
from eet_lab.parts.batches import left_padded
from eet_lab.technique import known

SMALLER = HOPPER._replace(shared_bytes=99 * 1024)
"""GPUs of compute capability 8.6 and 8.9."""


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_short_rows_take_a_launch_forward_and_one_backward(p, launched):  # noqa: F811
    spec, lengths = Spec(2, 2, 64), (5, LONGEST, 1)
    read = batch(lengths)
    drop = Dropout(0.0, p, token_keys(3, read.rows, read.positions), read.positions)
    qkv = drawn(spec, lengths)[0].detach().flatten(1).half().requires_grad_()
    out = attend_heads(qkv, read, spec, empty=autograd, drop=drop, attend_rows=None)
    assert out.shape == (sum(lengths), 128) and launched == ["eet_short_attention"]
    (grad,) = torch.autograd.grad(out.sum(), qkv)  # whose numbers are one in memory
    assert grad.shape == qkv.shape and len(launched) == 2


@pytest.mark.parametrize(
    ("spec", "lengths", "gpu"),
    [
        (Spec(2, 2, 64), (5, LONGEST + 1), HOPPER),
        (Spec(2, 2, 64, window=4), (5, 3), HOPPER),
        (Spec(2, 2, 64), (5, 65), SMALLER),
    ],
    ids=["long", "window", "no room"],
)
def test_what_it_does_not_take_goes_to_those_who_attend_to_rows(spec, lengths, gpu, launched, monkeypatch):  # noqa: F811
    monkeypatch.setattr(train_attention, "gpu", lambda: gpu)
    qkv, read = drawn(spec, lengths)[0].detach().flatten(1).half(), batch(lengths)
    given = []

    def attend_rows(q, k, v, *rest, **how):
        given.append([part.shape for part in (q, k, v)])
        return q.flatten(1)

    attend_heads(qkv, read, spec, empty=autograd, attend_rows=attend_rows)
    assert given == [[(sum(lengths), 2, 64)] * 3] and not launched


def test_a_smaller_gpu_has_room_for_rows_of_half_as_many_tokens(launched, monkeypatch):  # noqa: F811
    monkeypatch.setattr(train_attention, "gpu", lambda: SMALLER)
    spec, lengths = Spec(2, 2, 64), (5, LONGEST // 2)
    attend_heads(drawn(spec, lengths)[0].detach().flatten(1).half(), batch(lengths), spec, empty=autograd)
    assert launched == ["eet_short_attention"]


def test_what_the_kernel_would_read_wrongly_is_refused(launched):  # noqa: F811
    spec, lengths = Spec(2, 2, 64), (3, 2)
    read, norm = batch(lengths), Norm(torch.ones(64), None, 1e-6)
    qkv = drawn(spec, lengths)[0].detach().flatten(1).half()
    for given, rows, extras, wrong in (
        (qkv, read, Extras(q_norm=norm, k_norm=norm), "without norms, rotation or a bias of scores. Leave short_att"),
        (qkv, read, Extras(inv_freq=torch.ones(32)), "without norms, rotation or a bias of scores"),
        (qkv, left_padded([range(3), range(2)]), NO_EXTRAS, "this pass has pads. Turn packed_prefill on"),
        (qkv, read._replace(num_dummy=4), NO_EXTRAS, "this pass has 4 tokens of no row"),
        (qkv.float(), read, NO_EXTRAS, "float16 and bfloat16, not torch.float32. Load the model in bfloat16"),
        (qkv[:, 64:], read, NO_EXTRAS, r"qkv is \(5, 320\) .*; the kernel needs \(5, 384\)"),
        (qkv.t().contiguous().t(), read, NO_EXTRAS, "qkv is .* not contiguous"),
    ):
        with pytest.raises(KernelError, match=wrong):
            attend_heads(given, rows, spec, extras, empty=autograd)
    assert not launched


def test_no_tokens_are_no_launch(launched):  # noqa: F811
    qkv, ends = torch.empty(0, 384, dtype=torch.half, requires_grad=True), torch.zeros(3, dtype=torch.int32)
    out = train_attention.ShortAttention.apply(qkv, ends, 2, 1, 0.125, True, None)
    assert out.shape == (0, 128) and torch.autograd.grad(out.sum(), qkv)[0].shape == qkv.shape and not launched


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, None),
        ({"head_dim": 32}, "heads of 64 channels, and this model's have 32"),
        ({"num_kv_heads": 1}, "one KV head a head, and this model has 1"),
        ({"rope": True}, "this model rotates queries and keys"),
    ],
    ids=str,
)
def test_models_that_it_does_not_take_are_greyed_with_the_reason(changes, wrong):
    config = Config(2, 128, 2, 96, 97, 64)
    if changes.pop("rope", False):
        config = families.ours("llama").config
        config = replace(config, hidden_size=128, num_heads=2, num_kv_heads=2, head_dim=64)
    reason = known("short_attention")().unfit(replace(config, **changes).in_training)
    assert reason is None if wrong is None else wrong in (reason or "")
