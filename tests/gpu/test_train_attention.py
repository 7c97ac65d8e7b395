"""Packed attention on a GPU beside plain calls in fp32: values and gradients, of rows of many lengths and of models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import encoders
import families
import pytest
import seq2seqs
import test_seq2seq_training
import test_vision
import torch
from test_training import RECIPES, language, masked
from test_varlen import PACKED, batch, drawn

from eet_lab.models import load
from eet_lab.models.decoder import mapped
from eet_lab.ops.noise import Dropout, library_noise
from eet_lab.ops.rows import attend_rows
from eet_lab.ops.types import Batch, Spec, autograd
from eet_lab.ops.varlen import attend_packed, with_cu_seqlens
from eet_lab.parts.staging import Staging, sent
from eet_lab.technique import Recipe
from eet_lab.training import Example, Trainer
from gpu.launches import captured, launches_of

pytestmark = pytest.mark.gpu

CAUSAL, CROSS = Spec(4, 4, 64), Spec(4, 2, 64, causal=False)
SPECS = {
    "causal": CAUSAL,
    "grouped": Spec(8, 2, 128),
    "encoder": Spec(12, 12, 64, causal=False),
    "scaled": Spec(4, 1, 8, scale=0.5),
    "window": Spec(4, 2, 64, window=37),
    "window-both-ways": Spec(4, 4, 32, causal=False, window=5),
    "widest": Spec(2, 1, 256),
    "odd": Spec(3, 3, 40),
}
LENGTHS = {"ragged": (130, 1, 77, 300, 2), "one": (201,), "short": (1,), "shorts": (1, 1, 1), "even": (65, 65, 65, 65)}
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def on_gpu(lengths) -> Batch:
    return sent(batch(lengths), Staging(torch.device("cuda")))


def told(attend, dtype, spec, lengths, sources=None, half=torch.bfloat16) -> list[torch.Tensor]:
    """What an attention makes of numbers of 16 bits, and the gradient of what queries, keys and values are views of."""
    together, q, *_ = drawn(spec, lengths, sources)
    leaves = [together] if sources is None else [together, q]
    leaves = [leaf.detach().to(half).to("cuda", dtype).requires_grad_() for leaf in leaves]
    H, G = spec.heads, spec.kv_heads
    parts = leaves[0].split((H, G, G), 1) if sources is None else (leaves[1], *leaves[0].chunk(2, 1))
    read = on_gpu(lengths)
    out = attend(*parts, read, read if sources is None else on_gpu(sources), spec, empty=autograd)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.randn(out.shape).to(half).to(out))]


def assert_within_the_budget(dtype, spec, lengths, sources=None) -> None:
    exact, plain, ours = (
        told(attend, kind, spec, lengths, sources, dtype)
        for attend, kind in ((attend_rows, torch.float32), (attend_rows, dtype), (attend_packed, dtype))
    )
    for wanted, near, found in zip(exact, plain, ours, strict=True):
        off, budget = (float((each.float() - wanted).abs().max()) for each in (found, near))
        assert off <= 2 * budget + 4 * torch.finfo(dtype).eps * float(wanted.abs().max())


@HALVES
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_it_is_as_near_as_plain_calls(spec, lengths, dtype):
    assert_within_the_budget(dtype, spec, lengths)


@HALVES
@pytest.mark.parametrize(
    ("lengths", "sources"),
    [
        ((9, 1, 40, 3), (70, 5, 1, 129)),
        ((9, 9, 9), (70, 5, 33)),
        ((9, 1, 40), (50, 50, 50)),
        ((9, 9), (130, 130)),
        ((1,), (7,)),
    ],
)
def test_cross_attention_is_as_near_as_plain_calls(lengths, sources, dtype):
    for spec in (CROSS, CROSS._replace(kv_heads=4, head_dim=32)):
        assert_within_the_budget(dtype, spec, lengths, sources)


@pytest.mark.parametrize("lengths", [LENGTHS["ragged"], LENGTHS["even"]])
def test_one_launch_serves_all_rows_and_nothing_waits_for_the_host(lengths):
    read = with_cu_seqlens(on_gpu(lengths))._replace(spans=None)
    _, *parts = (t.detach().to("cuda", torch.bfloat16) for t in drawn(CAUSAL, lengths))

    def call():
        return attend_packed(*parts, read, read, CAUSAL, empty=autograd)

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [name for name in launches_of(call) if "Memset" not in name]  # cuDNN clears a workspace of its own
    assert len(names) == 1, names
    on_hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert ("cudnn" if lengths == LENGTHS["even"] and on_hopper else "flash") in names[0].lower(), names


def test_a_captured_pass_serves_other_rows_of_which_the_last_are_empty():
    """Its ends are read where they lie; the gradient is of what was replayed."""
    spec, first = Spec(4, 2, 64), (100, 30, 60, 10, 0, 0)
    _, *parts = drawn(spec, first)
    qkv = torch.cat([t.detach() for t in parts], 1).to("cuda", torch.bfloat16).requires_grad_()
    up = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16)
    read = on_gpu(first)._replace(max_q=128, spans=None)
    count = read.count

    def work():
        ends = with_cu_seqlens(read)
        out = attend_packed(*qkv.split((4, 2, 2), 1), ends, ends, spec, empty=autograd)
        return out.detach(), torch.autograd.grad(out, qkv, up)[0]

    graph, kept = captured(work)
    for lengths in (first, (1, 128, 64, 7, 0, 0), (50, 50, 50, 50, 0, 0), (40, 30, 30, 30, 30, 40)):
        count.copy_(torch.tensor(lengths))
        graph.replay()
        wanted, there = [], on_gpu([length for length in lengths if length])
        for dtype in (torch.float32, torch.bfloat16):
            leaf = qkv.detach().to(dtype).requires_grad_()
            out = attend_rows(*leaf.split((4, 2, 2), 1), there, there, spec, empty=autograd)
            wanted.append((out.detach(), torch.autograd.grad(out, leaf, up.to(dtype))[0]))
        for exact, near, found in zip(*wanted, kept, strict=True):
            off, budget = (float((each.float() - exact).abs().max()) for each in (found, near))
            assert off <= 2 * budget + 4 * torch.finfo(torch.bfloat16).eps * float(exact.abs().max()), lengths


@pytest.fixture
def repeatable() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("lengths", [LENGTHS["ragged"], LENGTHS["even"]])
def test_a_second_run_gives_the_same_bits(lengths, repeatable):
    runs = [told(attend_packed, torch.bfloat16, Spec(8, 2, 64), lengths) for _ in range(3)]
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[0], runs[2]))


@pytest.mark.parametrize("lengths", [LENGTHS["ragged"], LENGTHS["even"]])
def test_the_librarys_noise_is_repeated_and_the_backward_pass_has_the_same(lengths):
    """An output is linear in the values, so the gradient of these tells what was dropped."""
    read, parts = on_gpu(lengths), drawn(CAUSAL, lengths)[1:]
    q, k, v = (t.detach().to("cuda", torch.bfloat16).requires_grad_() for t in parts)
    before = torch.cuda.get_rng_state()

    def call(p=0.2, key=3, num=1):
        drop = Dropout(0.0, p, read.rows, read.positions)
        with library_noise(key, q.device):
            return [attend_packed(q, k, v, read, read, CAUSAL, empty=autograd, drop=drop) for _ in range(num)][-1]

    outs = call(), call(), call(key=4), call(num=2), call(p=0.0)
    assert torch.equal(outs[0], outs[1]) and all(not torch.allclose(outs[0], each, atol=0.1) for each in outs[2:])
    assert torch.equal(torch.cuda.get_rng_state(), before)
    up = torch.randn_like(outs[0])
    (grad,) = torch.autograd.grad(outs[0], v, up)
    sums = [(a.double() * b.double()).sum() for a, b in ((grad, v), (up, outs[0]))]
    assert abs(float(sums[0] - sums[1])) < 1e-4 * float((up.double() * outs[0].double()).abs().sum())
    many = torch.stack([call(key=key).float() for key in range(200)]).mean(0)
    assert float((many - outs[4].float()).square().mean().sqrt()) < 0.15 * float(outs[4].float().square().mean().sqrt())


MODELS = {
    "gpt2": (partial(families.theirs, "gpt2"), language),
    "llama": (partial(families.theirs, "llama"), language),
    "mistral": (partial(families.theirs, "mistral"), language),
    "bert": (partial(encoders.theirs, "bert-mlm"), masked),
    "bart": (partial(seq2seqs.theirs, "bart"), test_seq2seq_training.examples),
    "vit": (partial(test_vision.theirs, "classes"), None),
}


def images() -> list[Example]:
    return [Example(pixels=image, labels=number % 3) for number, image in enumerate(test_vision.images())]


@pytest.mark.parametrize("name", MODELS)
def test_a_models_gradients_are_as_near_to_fp32_as_with_plain_calls(name):
    """Of each parameter, by the length of what is off: twice that of plain calls, and 4 eps."""
    theirs, examples = MODELS[name]
    network = load(theirs(), device="cuda", dtype="bfloat16").network
    recipe = f"{PACKED},batched_cross_attention" if name == "bart" else PACKED
    given = images() if examples is None else examples()
    exact, plain, ours = (
        Trainer(each, Recipe.parse(words, "cuda").parts).gradients(given)[1]
        for each, words in (
            (mapped(network, torch.Tensor.float), RECIPES[3]), (network, RECIPES[3]), (network, recipe)
        )
    )  # fmt: skip
    for path, wanted in exact.items():
        off, budget = (float((each[path] - wanted).norm()) for each in (ours, plain))
        assert off <= 2 * budget + 4 * torch.finfo(torch.bfloat16).eps * float(wanted.norm()), path


def test_attention_dropout_is_repeated_by_seed_and_step():
    network = load(families.theirs("llama"), device="cuda", dtype="bfloat16").network
    made = partial(Trainer, network, Recipe.parse(PACKED, "cuda").parts, attention_dropout=0.2)
    found = [trainer.step(language()).loss for trainer in (made(), made(), made(seed=1))]
    assert found[0] == found[1] != found[2]
