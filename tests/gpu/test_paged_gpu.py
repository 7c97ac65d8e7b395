"""Pages under the kernels: the same tokens as in one slab, whoever launches them."""

from __future__ import annotations

import pytest
import torch

from eet_lab.bench.parity import parity
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.technique import Recipe
from gpu.test_generation_gpu import batch, decoder

pytestmark = pytest.mark.gpu

UNPACKED = "pre_padding,mask_removal,{memory},fused_kernels"
ALL = "pre_padding,mask_removal,{memory},packed_prefill,fused_kernels,fused_sampling"
RECIPES = (
    "{memory},fused_kernels",
    "pre_padding,{memory},fused_kernels",
    UNPACKED,
    ALL,
    ALL + ",cuda_graphs",
    ALL + ",cuda_graphs,dependent_launch",
)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tokens_do_not_depend_on_where_columns_lie(recipe, page, dtype):
    model, settings = decoder(dtype, head_dim=64), Settings(max_new_tokens=40)
    parts = [
        Recipe.parse(recipe.format(memory=words)).parts
        for words in ("memory_reuse", f"memory_reuse:kv=paged:page={page}")
    ]
    engines = [Engine(model, each) for each in parts]
    for seed, rows in ((1, 1), (2, 5), (3, 2)):
        prompts = batch(rows, 1, 90, seed)
        slab, pages = (engine.generate(prompts, settings).tokens for engine in engines)
        if dtype == torch.float16 and recipe == UNPACKED:  # another kernel reads its prompts in pages: near ties part
            found = parity(model, parts[1], prompts, settings)
            assert found.verdict != "different", found.explanation
        else:
            assert slab == pages
    for engine in engines:
        engine.close()
