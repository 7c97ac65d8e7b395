"""Attention of short rows on a GPU beside plain calls in fp32: values, gradients, captures, and models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from test_varlen import PACKED, drawn

from eet_lab.models import load
from eet_lab.models.config import ENCODER_PRESETS, PRESETS
from eet_lab.models.decoder import mapped
from eet_lab.ops.cuda.train_attention import LONGEST, attend_heads
from eet_lab.ops.noise import Dropout, token_keys
from eet_lab.ops.reference import attend_heads as plainly
from eet_lab.ops.types import Spec, autograd
from eet_lab.ops.varlen import attend_packed, with_cu_seqlens
from eet_lab.technique import Recipe
from eet_lab.training import Example, Trainer
from gpu.launches import captured, launches_of
from gpu.test_train_attention import HALVES, on_gpu

pytestmark = pytest.mark.gpu

SPECS = {
    "causal": Spec(4, 4, 64),
    "encoder": Spec(12, 12, 64, causal=False),
    "scaled": Spec(3, 3, 64, scale=0.5),
    "wide window": Spec(1, 1, 64, window=LONGEST),
}
LENGTHS = {
    "of 64": (64, 1, 33, 16, 48, 17),
    "images": (50,) * 9,
    "of one": (1,),
    "of 128": (128, 1, 65, 112, 127, 3),
    "sentences": (5, 101, 53, 40, 60, 16, 32),
}


def told(attend, dtype, spec, lengths, half) -> list[torch.Tensor]:
    """What an attention makes of numbers of 16 bits, and the gradient of what queries, keys and values come from."""
    qkv = drawn(spec, lengths)[0].detach().flatten(1).to(half).to("cuda", dtype).requires_grad_()
    out = attend(qkv, on_gpu(lengths), spec, empty=autograd)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, qkv, torch.randn(out.shape).to(half).to(out))]


def assert_within_the_budget(exact, plain, ours) -> None:
    eps = torch.finfo(ours[0].dtype).eps
    for wanted, near, found in zip(exact, plain, ours, strict=True):
        off, budget = (float((each.float() - wanted).abs().max()) for each in (found, near))
        assert off <= 2 * budget + 4 * eps * float(wanted.abs().max())


@HALVES
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_it_is_as_near_as_plain_calls(spec, lengths, dtype):
    ways = ((plainly, torch.float32), (plainly, dtype), (attend_heads, dtype), (attend_heads, dtype))
    *found, again = (told(attend, kind, spec, lengths, dtype) for attend, kind in ways)
    assert_within_the_budget(*found)
    assert all(map(torch.equal, found[-1], again)), "the same bits each time"


@pytest.mark.parametrize("lengths", [LENGTHS["images"], LENGTHS["sentences"]])
def test_a_launch_forward_and_one_backward(lengths):
    spec, read = SPECS["encoder"], with_cu_seqlens(on_gpu(lengths))._replace(spans=None)
    qkv = drawn(spec, lengths)[0].detach().flatten(1).to("cuda", torch.bfloat16).requires_grad_()
    up = torch.ones(sum(lengths), 12 * 64, device="cuda", dtype=torch.bfloat16)
    names = launches_of(lambda: torch.autograd.grad(attend_heads(qkv, read, spec, empty=autograd), qkv, up))
    assert len(names) == 2 and all("short_attention" in name for name in names), names


@HALVES
@pytest.mark.parametrize("lengths", [LENGTHS["of 64"], LENGTHS["of 128"]])
@pytest.mark.parametrize("spec", [SPECS["causal"], SPECS["encoder"]])
def test_it_drops_what_plain_ops_drop(spec, lengths, dtype):
    """Of its second call."""
    read = on_gpu(lengths)
    keys = token_keys(7, read.rows, read.positions)

    def second(attend, kind):
        drop = Dropout(0.0, 0.3, keys, read.positions)
        drop.of_attention()
        return told(partial(attend, drop=drop), kind, spec, lengths, dtype)

    assert_within_the_budget(second(plainly, torch.float32), second(plainly, dtype), second(attend_heads, dtype))


@pytest.mark.parametrize("count", [50, 53, 101, 127])
def test_weights_that_are_alike_are_not_all_rounded_up_or_all_down(count):
    """Queries of zeros see all keys alike. Rounded to bfloat16, 1/53 is 0.2 % off."""
    spec, lengths = SPECS["encoder"], (count,)
    qkv = torch.ones(count, 3 * 12 * 64, device="cuda", dtype=torch.bfloat16)
    qkv[:, : 2 * 12 * 64] = 0
    qkv.requires_grad_()
    out = attend_heads(qkv, on_gpu(lengths), spec, empty=autograd)
    assert torch.equal(out, torch.ones_like(out))
    (grad,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert (grad[:, 2 * 12 * 64 :] - 1).abs().max() <= 2**-8


@pytest.mark.parametrize("what", ["longer", "window"])
def test_what_it_does_not_take_is_left_to_packed_attention(what):
    lengths = (LONGEST + 1, 3) if what == "longer" else (60, 3)
    spec = Spec(4, 4, 64, window=20) if what == "window" else Spec(4, 4, 64)
    qkv = drawn(spec, lengths)[0].detach().flatten(1).to("cuda", torch.bfloat16)
    attend = partial(attend_heads, qkv, with_cu_seqlens(on_gpu(lengths)), spec, empty=autograd)
    names = launches_of(lambda: attend(attend_rows=attend_packed))
    assert not any("short_attention" in name for name in names) and any("flash" in name.lower() for name in names)


def test_a_captured_pass_serves_other_rows_of_which_the_last_are_empty():
    spec, first = Spec(4, 4, 64, causal=False), (100, 30, 60, 10, 0, 0)
    qkv = drawn(spec, first)[0].detach().flatten(1).to("cuda", torch.bfloat16).requires_grad_()
    up = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16)
    read = on_gpu(first)._replace(max_q=128, spans=None)

    def work():
        out = attend_heads(qkv, with_cu_seqlens(read), spec, empty=autograd)
        return out.detach(), torch.autograd.grad(out, qkv, up)[0]

    graph, kept = captured(work)
    for lengths in (first, (1, 128, 64, 7, 0, 0), (50, 50, 50, 50, 0, 0), (40, 30, 30, 30, 30, 40)):
        read.count.copy_(torch.tensor(lengths))
        graph.replay()
        wanted, there = [], on_gpu([length for length in lengths if length])
        for dtype in (torch.float32, torch.bfloat16):
            leaf = qkv.detach().to(dtype).requires_grad_()
            out = plainly(leaf, there, spec, empty=autograd)
            wanted.append((out.detach(), torch.autograd.grad(out, leaf, up.to(dtype))[0]))
        assert_within_the_budget(*wanted, kept)


def test_nan_is_not_hidden():
    spec, lengths = SPECS["encoder"], (50, 20, 64)
    qkv = drawn(spec, lengths)[0].detach().flatten(1).to("cuda", torch.float16)
    qkv[60, 64] = torch.nan  # of the second row, and the second head's query
    out = attend_heads(qkv, on_gpu(lengths), spec, empty=autograd).view(-1, 12, 64)
    where = out.isnan().any(-1).nonzero()
    assert where.tolist() == [[60, 1]]


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "vit-b-32"])
def test_a_models_gradients_are_as_near_to_fp32_as_with_plain_calls(name, monkeypatch):
    """Of two layers at true width; of each parameter, by the length of what is off."""
    presets = PRESETS if name in PRESETS else ENCODER_PRESETS
    heads = {"heads": ("mlm",)} if name == "bert-base" else {}
    monkeypatch.setitem(presets, "two-layers", replace(presets[name], num_layers=2, **heads))
    network = load("two-layers", device="cuda", dtype="bfloat16").network
    plain = "pre_padding,mask_removal,packed_prefill"
    given = examples(name)
    exact, near, ours = (
        Trainer(each, Recipe.parse(words, "cuda").parts).gradients(given)[1]
        for each, words in (
            (mapped(network, torch.Tensor.float), plain), (network, plain), (network, f"{PACKED},short_attention")
        )
    )  # fmt: skip
    for path, wanted in exact.items():
        off, budget = (float((each[path] - wanted).norm()) for each in (ours, near))
        assert off <= 2 * budget + 4 * torch.finfo(torch.bfloat16).eps * float(wanted.norm()), path


def examples(name: str) -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    if name == "vit-b-32":
        images = torch.randn(5, 3, 224, 224, generator=generator)
        return [Example(pixels=image, labels=number % 3) for number, image in enumerate(images)]
    rows = [torch.randint(1000, 2000, (length,), generator=generator).tolist() for length in (9, 70, 33, 128)]
    return [Example(row) if name == "gpt2" else Example(row, row) for row in rows]
