"""Packed attention: rectangles, and what flash attention, which needs a GPU, is told of other rows."""

from __future__ import annotations

from functools import partial

import encoders
import families
import pytest
import seq2seqs
import test_seq2seq_training
import torch
from test_training import RECIPES, language, masked

from eet_lab.errors import KernelError, RecipeError
from eet_lab.models import load
from eet_lab.ops import fits, reference, varlen
from eet_lab.ops.noise import Dropout, library_noise
from eet_lab.ops.rows import attend_rows
from eet_lab.ops.types import Extras, Spec, autograd
from eet_lab.ops.varlen import attend_packed
from eet_lab.parts.batches import end_to_end, left_padded
from eet_lab.technique import Recipe
from eet_lab.training import Example, Trainer

PACKED = f"{RECIPES[3]},varlen_attention"
SELF = [Spec(4, 4, 8), Spec(4, 2, 8, causal=False), Spec(6, 2, 16, scale=0.3), Spec(4, 1, 8, window=9)]
RAGGED = (5, 1, 7, 7, 3)


def batch(lengths):
    return end_to_end([range(length) for length in lengths])


def drawn(spec: Spec, lengths, sources=None) -> list[torch.Tensor]:
    """Queries, keys and values as views of one tensor, or of two."""
    torch.manual_seed(0)
    H, G, D = spec[:3]
    qkv = torch.randn(sum(lengths), H + 2 * G, D, requires_grad=True)
    if sources is None:
        return [qkv, *qkv.split((H, G, G), 1)]
    kv = torch.randn(sum(sources), 2 * G, D, requires_grad=True)
    return [kv, qkv[:, :H], *kv.chunk(2, 1)]


def by_ends(q, k, v, batch, source, spec):
    """What flash attention computes of what it is told: every score, row by row between the ends."""
    out, ends = torch.zeros_like(q), (batch.cu_seqlens.tolist(), source.cu_seqlens.tolist())
    group = spec.heads // spec.kv_heads
    for a, b, c, d in zip(*(each[i:] for each in ends for i in (0, 1)), strict=False):
        assert b - a <= batch.max_q and d - c <= source.max_q
        keys, values = (part[c:d].repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * (spec.scale or spec.head_dim**-0.5)
        ago = torch.arange(b - a)[:, None] - torch.arange(d - c)
        hidden = (ago < 0) & spec.causal
        if spec.window is not None:
            hidden = hidden | (ago >= spec.window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Flash attention's place is taken, in fp32 too; the batches that it was given."""
    told = []
    monkeypatch.setattr(varlen, "HALVES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(varlen, "_flash", lambda *given: told.append(given[3:5]) or by_ends(*given[:6]))
    return told


@pytest.mark.parametrize("spec", SELF)
def test_rows_of_equal_lengths_are_one_dense_call(spec, monkeypatch):
    """Captured too, when the host knows no row."""
    monkeypatch.setattr(varlen, "_flash", lambda *given: pytest.fail("rows of equal lengths are a rectangle"))
    read, (qkv, *parts) = batch((7, 7, 7)), drawn(spec, (7, 7, 7))
    wanted = attend_rows(*parts, read, read, spec, empty=autograd)
    read = read._replace(spans=None)
    found = attend_packed(*parts, read, read, spec, empty=autograd)
    assert torch.allclose(found, wanted, atol=1e-6)
    up = torch.randn_like(found)
    grads = [torch.autograd.grad(out, qkv, up)[0] for out in (found, wanted)]
    assert torch.allclose(*grads, atol=1e-5)


def test_rectangles_of_different_lengths_are_one_dense_call_too(monkeypatch):
    monkeypatch.setattr(varlen, "_flash", lambda *given: pytest.fail("rows of equal lengths are a rectangle"))
    spec, read, source = Spec(4, 2, 8, causal=False), batch((3, 3)), batch((5, 5))
    (kv, *parts), up = drawn(spec, (3, 3), (5, 5)), torch.randn(6, 32)
    found, wanted = (each(*parts, read, source, spec, empty=autograd) for each in (attend_packed, attend_rows))
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.allclose(*(torch.autograd.grad(out, kv, up)[0] for out in (found, wanted)), atol=1e-5)


@pytest.mark.parametrize("spec", [*SELF, Spec(4, 4, 8, window=4), Spec(4, 2, 8, causal=False, window=3)])
@pytest.mark.parametrize("lengths", [RAGGED, (1,), (6,), (6, 6)])
def test_the_ends_of_rows_say_all_that_is_read(lengths, spec, on_a_cpu):
    """One text, texts of one token, windows: what goes to flash attention gives what plain calls give."""
    read, (_, *parts) = batch(lengths), drawn(spec, lengths)
    wanted = attend_rows(*parts, read, read, spec, empty=autograd)
    read = varlen.with_cu_seqlens(read._replace(spans=None))
    assert torch.allclose(attend_packed(*parts, read, read, spec, empty=autograd), wanted, atol=1e-6)
    narrow = spec.window is not None and spec.window < max(lengths)
    assert len(on_a_cpu) == (lengths == RAGGED or narrow)


def test_rows_without_tokens_at_the_end_change_nothing(on_a_cpu):
    spec, read, (_, *parts) = Spec(4, 2, 8), batch(RAGGED), drawn(Spec(4, 2, 8), RAGGED)
    none = torch.zeros(3, dtype=torch.long)
    longer = varlen.with_cu_seqlens(read._replace(count=torch.cat((read.count, none))))
    assert longer.cu_seqlens.dtype == torch.int32 and longer.cu_seqlens.tolist() == [0, 5, 6, 13, 20, 23, 23, 23, 23]
    read = varlen.with_cu_seqlens(read)
    found, wanted = (attend_packed(*parts, each, each, spec, empty=autograd) for each in (longer, read))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "bert-mlm", "bart"])
def test_a_models_gradients_are_those_of_plain_calls(name, on_a_cpu, monkeypatch):
    """And the ends of rows are made once a pass, for all of its layers."""
    network, examples = families.ours("gpt2").network, language()
    if name == "bart":
        network, examples = seq2seqs.ours(name).network, test_seq2seq_training.examples()
    elif name == "bert-mlm":
        network, examples = encoders.ours(name).network, masked()
    elif name == "mistral":
        network = families.ours(name).network
    made, ends = [], varlen.cu_seqlens
    monkeypatch.setattr(varlen, "cu_seqlens", lambda read: made.append(len(read.ids)) or ends(read))
    (loss, grads), (wanted_loss, wanted) = (
        Trainer(network, Recipe.parse(recipe).parts, dropout=0.1).gradients(examples) for recipe in (PACKED, RECIPES[3])
    )
    assert loss == pytest.approx(wanted_loss, rel=1e-6) and grads.keys() == wanted.keys()
    for path, grad in grads.items():
        torch.testing.assert_close(grad, wanted[path], rtol=1e-4, atol=1e-5 * max(1.0, float(grad.abs().max())))
    assert len(made) == (3 if name == "bart" else 1)  # those of its encoder, of its decoder, and of what that looks at
    assert len(on_a_cpu) == (6 if name == "bart" else 3)
    assert len({id(ends.cu_seqlens) for given in on_a_cpu for ends in given}) == len(made)


@pytest.mark.parametrize(
    "spec", [Spec(4, 2, 16, scale=0.5), Spec(4, 2, 16, causal=False, window=3), Spec(4, 2, 16, window=3)]
)
def test_what_aten_is_told(spec):
    """Tensors without data go through its shapes, and its backward pass."""
    read = batch(RAGGED)
    there = read._replace(count=read.count.to("meta"))
    qkv = torch.randn(23, 8, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = attend_packed(*qkv.split((4, 2, 2), 1), there, there, spec, empty=autograd)
    node = out.grad_fn.next_functions[0][0]
    assert out.shape == (23, 64) and "FlashAttention" in node.name()
    assert (node._saved_max_q, node._saved_max_k, node._saved_dropout_p) == (7, 7, 0)
    assert (node._saved_is_causal, node._saved_scale) == (spec.causal, spec.scale)
    sides = None if spec.window is None else spec.window - 1, 0 if spec.causal else None
    assert (node._saved_window_size_left, node._saved_window_size_right) == sides
    assert node._saved_cum_seq_q.dtype == torch.int32 and node._saved_cum_seq_q.shape == (6,)
    out.sum().backward()
    assert qkv.grad.shape == qkv.shape


def test_what_it_does_not_take_is_told():
    spec, read, (_, *parts) = Spec(4, 2, 8), batch(RAGGED), drawn(Spec(4, 2, 8), RAGGED)
    call = partial(attend_packed, *parts, empty=autograd)
    with pytest.raises(KernelError, match="different lengths in float16 or bfloat16 on a GPU, not .* float32 on 'cpu'"):
        call(read, read, spec)
    padded = left_padded([range(3), range(2)])
    with pytest.raises(KernelError, match="this pass has pads. Turn packed_prefill on"):
        call(read, padded, spec)
    with pytest.raises(KernelError, match="would read from the host. Turn varlen_attention on"):
        attend_rows(*parts, read._replace(spans=None), read, spec, empty=autograd)
    with pytest.raises(KernelError, match="no bias of relative positions. Leave varlen_attention out"):
        call(read, read, spec, Extras(bias=torch.zeros(8, 4)))


@pytest.mark.parametrize("sources", [None, (5, 5, 5)])
def test_a_librarys_noise_is_repeated_by_key_and_call(sources):
    """And by the backward pass: an output is linear in the values. Whoever else draws, draws as if it had not."""
    spec, lengths = Spec(4, 2, 8, causal=sources is None), (7, 7, 7)
    read, (_, *parts) = batch(lengths), drawn(Spec(4, 2, 8), lengths, sources)
    source, before = read if sources is None else batch(sources), torch.get_rng_state()

    def call(p=0.25, key=3, num=1):
        drop = Dropout(0.0, p, read.rows, read.positions)
        with library_noise(key, torch.device("cpu")):
            return [attend_packed(*parts, read, source, spec, empty=autograd, drop=drop) for _ in range(num)][-1]

    plain = attend_rows(*parts, read, source, spec, empty=autograd)
    outs = call(), call(num=2), call(), call(key=4), call(p=0.0)
    assert torch.equal(outs[0], outs[2]) and torch.allclose(outs[4], plain, atol=1e-6)
    assert all(not torch.allclose(outs[0], outs[i], atol=0.1) for i in (1, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    up = torch.randn_like(outs[0])
    (grad,) = torch.autograd.grad(outs[0], parts[2], up)
    assert torch.allclose((grad * parts[2]).sum(), (up * outs[0]).sum(), rtol=1e-4)
    many = torch.stack([call(key=key) for key in range(400)]).mean(0)
    assert torch.allclose(many, plain, atol=0.3) and not torch.allclose(many, 0.75 * plain, atol=0.3)


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_what_follows_drops_the_same_behind_a_librarys_noise(p):
    """Hidden states, and attention whose noise is keyed."""
    spec, read = Spec(4, 2, 8), batch((7, 7))
    drops = [Dropout(0.1, p, read.rows, read.positions) for _ in range(2)]
    for attend, drop in zip((attend_rows, attend_packed), drops, strict=True):
        attend(*drawn(spec, (7, 7))[1:], read, read, spec, empty=autograd, drop=drop)
    x = torch.ones(14, 32)
    assert torch.equal(*(drop(x) for drop in drops))


def test_attention_dropout_is_repeated_by_seed_and_step(on_a_cpu):
    network = load(families.theirs("gpt2"), device="cpu").network
    examples = [Example(row[:5]) for row in families.prompts() if len(row) >= 5]
    made = partial(Trainer, network, Recipe.parse(PACKED).parts, attention_dropout=0.2)
    found = [[trainer.step(examples).loss for _ in range(2)] for trainer in (made(), made(), made(seed=1))]
    assert found[0] == found[1] and found[0] != found[2]
    trainer = made(lr=1e-12, attention_dropout=0.2)
    assert trainer.step(examples).loss != trainer.step(examples).loss, "each step has its own noise"


def test_what_cannot_be_trained_so_is_told_before_any_work():
    gpt2, recipe = families.ours("gpt2").network, Recipe.parse(PACKED)
    with pytest.raises(RecipeError, match="varlen_attention cannot run on cpu: .* needs an NVIDIA GPU; .* 'cpu'"):
        recipe.check("cpu")
    with pytest.raises(RecipeError, match="computes in float16 and bfloat16, not float32. Load the model in bfloat16"):
        Trainer(gpt2, recipe.parts)
    for network, why in (
        (seq2seqs.ours("t5").network, "takes no bias of relative positions"),
        (families.ours("qwen3").network, "takes head dims that are multiples of 8 up to 256, and this model's is 12"),
    ):
        with pytest.raises(RecipeError, match=f"cannot train this model: packed attention {why}"):
            Trainer(network, recipe.parts)
        assert why in recipe.techniques[-1].unfit(network.config.in_training)


def test_what_a_piece_declares_is_the_ops_own_however_it_is_bound():
    config = seq2seqs.ours("t5").config.in_training
    own = Recipe.parse(PACKED).parts.train_ops.attention
    assert fits.unfit(reference.attention, config) is None
    for op in (own, partial(own, drop=None), partial(reference.attention, attend_rows=attend_packed)):
        assert "bias of relative positions" in fits.unfit(op, config)
        assert "not float32" in fits.untrainable(op, torch.float32) and fits.untrainable(op, torch.float16) is None


def test_rectangles_are_trained_in_16_bits_on_a_cpu_too():
    network = load(families.theirs("llama"), device="cpu", dtype="bfloat16").network
    examples = [Example(row[:5]) for row in families.prompts() if len(row) >= 5]
    found = [Trainer(network, Recipe.parse(recipe).parts).gradients(examples) for recipe in (PACKED, RECIPES[3])]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    for path, grad in found[0][1].items():
        torch.testing.assert_close(grad, found[1][1][path], rtol=0.05, atol=0.02 * float(grad.abs().max()))
