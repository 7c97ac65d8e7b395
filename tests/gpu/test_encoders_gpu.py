"""Encoders over our kernels: hidden states, and what tasks make of them."""

from __future__ import annotations

import pytest
import torch
import transformers
from encoders import V, texts, theirs

from eet_lab.engine import tasks
from eet_lab.engine.encode import EncoderEngine
from eet_lab.models import load
from eet_lab.models.decoder import mapped
from eet_lab.ops import cuda
from eet_lab.ops.types import Linear, fresh
from eet_lab.parts.passes import Batching
from eet_lab.technique import Recipe

pytestmark = pytest.mark.gpu
PACKED = "pre_padding,mask_removal,memory_reuse,packed_prefill"
RECIPES = (
    "fused_kernels",
    "pre_padding,fused_kernels",
    "pre_padding,mask_removal,fused_kernels",
    f"{PACKED},fused_kernels",
)
MODELS = {"bert": tasks.CLS, "bert-mlm": tasks.MLM, "roberta-classes": tasks.CLASSES, "wide": tasks.MEAN}
"""Each with one of the tasks that it has a head for."""


def model(name: str):
    if name != "wide":
        return theirs(name)
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2, vocab_size=V)
    return transformers.BertModel(transformers.BertConfig(**sizes)).eval()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_they_are_as_near_to_fp64_as_plain_ops(name, recipe, dtype):
    """Twice the error of plain ops, and 4 eps of the largest number: the house's budget."""
    for task in (tasks.HIDDEN, MODELS[name]):
        exact = read(name, "baseline", torch.float64, task, device="cpu")
        ours, plain = (
            max(float((got.double() - want.double()).abs().max()) for got, want in zip(run, exact, strict=True))
            for run in (read(name, each, dtype, task) for each in (recipe, "baseline"))
        )
        largest = max(float(value.abs().max()) for value in exact)
        assert ours <= 2 * plain + 4 * torch.finfo(dtype).eps * largest


def read(name, recipe, dtype, task, device="cuda"):
    of_file = torch.float32 if dtype == torch.float64 else dtype
    encoder = load(model(name), device=device, dtype=of_file).encoder
    if dtype == torch.float64:
        encoder = mapped(encoder, torch.Tensor.double)
    return EncoderEngine(encoder, Recipe.parse(recipe, device).parts).read(texts(), task, Batching(64)).values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gelu_of_every_number_of_16_bits(dtype):
    """Rounded once, after an error of 3e-7; and of what is no number."""
    number = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    x, weight = torch.zeros(len(number), 8, dtype=dtype, device="cuda"), torch.zeros(8, 8, dtype=dtype, device="cuda")
    x[:, 0], weight[:, 0] = number, 1
    got = cuda.norm_linear(x, None, Linear(weight, None), "gelu", empty=fresh)
    exact = torch.nn.functional.gelu(number.double())
    finite, eps, least = number.isfinite(), torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    off = (got[:, 0].double() - exact).abs()[finite]
    assert (off <= eps / 2 * (exact[finite].abs() + least) + 3e-7).all()
    assert got[number.isnan()].isnan().all() and (got[number == torch.inf] == torch.inf).all()


def test_passes_in_flight_come_in_order():
    encoder = load(model("wide"), device="cuda", dtype=torch.float16).encoder
    engine = EncoderEngine(encoder, Recipe.parse(f"{PACKED},fused_kernels", "cuda").parts)
    one_by_one, told = engine.read(texts(), tasks.HIDDEN, Batching(1)), []
    for batching in (Batching(1), Batching(30), Batching()):
        run = engine.read(texts(), tasks.HIDDEN, batching, progress=lambda done, *others: told.append(done))
        for got, want in zip(run.values, one_by_one.values, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0.02)
    assert told[: len(texts())] == list(range(1, len(texts()) + 1))
