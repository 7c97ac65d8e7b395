"""Int8 weights on a GPU: the kernels against the reference, and whole runs against plain PyTorch."""

from __future__ import annotations

import random

import pytest
import torch
from every_shape import every_shape

from eet_lab.bench.parity import parity
from eet_lab.engine.settings import Settings
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.ops import cuda
from eet_lab.ops.cuda.linear import largest_outputs
from eet_lab.ops.cuda.tokens import choose_best
from eet_lab.ops.int8 import dequantized
from eet_lab.ops.int8_cases import INT8_CASES, Int8Shape
from eet_lab.ops.shapes import copied
from eet_lab.ops.types import fresh
from eet_lab.technique import Recipe
from gpu.launches import replayed

pytestmark = pytest.mark.gpu


@every_shape(INT8_CASES)
def test_within_the_budget(case, shape, dtype):
    case.check(getattr(cuda, case.op), shape, "cuda", dtype)


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("case", INT8_CASES, ids=lambda case: case.name)
def test_a_replay_gives_the_same_bits(case, group):
    shape = Int8Shape(3, 4800, 1600, residual=case.op == "linear_residual", group=group)
    inputs = shape.inputs("cuda", torch.float16, 2)
    eager = case.call(getattr(cuda, case.op), copied(inputs), fresh)
    mine = copied(inputs)
    assert torch.equal(replayed(lambda: case.call(getattr(cuda, case.op), mine, fresh)), eager)


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("T", [1, 3, 8, 9, 16])
def test_the_largest_output_is_where_the_outputs_have_it(T, group):
    x, norm_w, w, _ = Int8Shape(T, 50257, 768, bias=False, group=group).inputs("cuda", torch.float16, 3)
    outputs = cuda.norm_linear(x, norm_w, w, empty=fresh)
    best = largest_outputs(x, torch.arange(T, device="cuda"), norm_w, w, empty=fresh)
    token = choose_best(best, empty=fresh)
    assert torch.equal(token, outputs.argmax(-1))


def test_a_wide_matrix_is_expanded_to_the_bit(dtype):
    _, _, w, _ = Int8Shape(1, 515, 1608, group=64).inputs("cuda", dtype, 4)
    made = cuda.int8.expanded(w, torch.empty(20, 1608, device="cuda", dtype=dtype), empty=fresh)
    assert torch.equal(made, dequantized(w.weight, w.scale, out=torch.empty_like(made)))


def test_chained_launches_wait_for_each_other():
    x, w, residual = Int8Shape(1, 1600, 1600, residual=True).inputs("cuda", torch.float16, 5)

    def chain(residuals: torch.Tensor, dependent: bool) -> torch.Tensor:
        """Each reads what the one before wrote; nothing of PyTorch's stands between them."""
        h = x
        for each in residuals:
            h = cuda.linear_residual(h, w, each, empty=fresh, dependent=dependent)
        return h

    plainly, early = (residual.repeat(50, 1, 1) for _ in range(2))
    chain(plainly, dependent=False)
    replayed(lambda: chain(early, dependent=True))
    assert plainly.isfinite().all()
    assert torch.equal(plainly, early)


@pytest.mark.parametrize("words", ["int8_weights", "all,int8_weights", "all,int8_weights:group=64:head=False"])
def test_a_run_is_what_plain_pytorch_computes_with_the_same_weights(words, dtype):
    config = Config(3, 256, 4, 1024, 1003, 512)
    model = weights.random_decoder(config, 0, torch.device("cuda"), dtype)
    draw = random.Random(0)
    prompts = [[draw.randrange(1, 1000) for _ in range(draw.randint(1, 70))] for _ in range(5)]
    recipe = Recipe.parse(words, "cuda")
    found = parity(model, recipe.parts, prompts, Settings(16), tolerance=recipe.tolerance)
    assert found.verdict == "lossy", found.explanation
