"""Requests that join and leave on a GPU: each gets the tokens that it would get alone, from captured steps too."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest
import torch

from eet_lab.bench.parity import parity
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.parts.paged_kv import PagedKV
from eet_lab.technique import Recipe
from gpu.test_generation_gpu import batch, decoder

pytestmark = pytest.mark.gpu

RECIPES = [
    "{kv},packed_prefill,pre_padding,mask_removal",
    "{kv},packed_prefill,pre_padding,mask_removal,fused_kernels,fused_sampling,cuda_graphs",
    "all,{kv}",
]
POLICIES = ["continuous_batching:rows=5:chunk=16:budget=32", "continuous_batching:rows=20"]


def parts_of(recipe: str, kv: str, policy: str):
    return Recipe.parse(f"{recipe.format(kv=f'memory_reuse:kv={kv}')},{policy}", "cuda").check("cuda").parts


def joined(engine: Engine, rows: list[list[int]], settings: Settings, seed: int = 0) -> list[tuple[int, ...]]:
    """Every prompt is added at a random time, as row 0 of its own batch."""
    draw, waiting, added = random.Random(seed), list(rows), []
    while waiting or any(not request.done for request in added):
        while waiting and draw.random() < 0.4:
            added.append(engine.add(waiting.pop(0), settings))
        engine.step()
    engine.step()
    return [tuple(request.generated) for request in added]


@pytest.fixture(scope="module")
def fp32():
    return decoder(torch.float32)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv", ["static", "paged"])
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_in_fp32_each_gets_the_tokens_that_it_would_get_alone(fp32, recipe, kv, policy):
    rows, plain = batch(24, 1, 70), Engine(fp32)
    for settings in (Settings(24), Settings(24, temperature=0.9, top_k=50, seed=7)):
        want = [plain.generate([row], settings).tokens[0] for row in rows]
        engine = Engine(fp32, parts_of(recipe, kv, policy))
        engine.reserve(engine.parts.schedule.max_rows, 100, Settings(24))
        for seed in range(2):
            assert joined(engine, rows, settings, seed) == want


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv", ["static", "paged"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("layers_of_any_size")
def test_teacher_forced_logits_stay_within_the_budget(dtype, recipe, kv, policy):
    model = decoder(dtype, 64)
    found = parity(model, parts_of(recipe, kv, policy), batch(13, 1, 70), Settings(16))
    assert found.verdict != "different", found.explanation


@pytest.mark.parametrize("kv", ["static", "paged"])
def test_one_capture_serves_whoever_comes(fp32, kv):
    engine = Engine(fp32, parts_of(RECIPES[1], kv, POLICIES[0]))
    engine.reserve(engine.parts.schedule.max_rows, 100, Settings(24))
    joined(engine, batch(12, 1, 70), Settings(24))
    captures = engine.captures
    joined(engine, batch(12, 1, 70, seed=1), Settings(24))
    assert engine.captures == captures > 0


def test_preempted_requests_get_the_same_tokens(fp32):
    rows, plain = batch(12, 30, 70), Engine(fp32)
    want = [plain.generate([row], Settings(48)).tokens[0] for row in rows]
    parts = replace(parts_of(RECIPES[1], "paged", POLICIES[0]), kv_cache=PagedKV(16, num_pages=14))
    engine = Engine(fp32, parts)
    engine.reserve(engine.parts.schedule.max_rows, 100, Settings(48))
    assert joined(engine, rows, Settings(48)) == want
    assert engine._slots.scheduler.num_preempted > 0 and engine.cache.ledger.free == 13


def test_a_soak_leaves_the_allocator_where_it_was(fp32):
    engine, draw = Engine(fp32, parts_of(RECIPES[1], "paged", POLICIES[0])), random.Random(0)
    engine.reserve(engine.parts.schedule.max_rows, 60, Settings(12))
    joined(engine, batch(20, 1, 40), Settings(12))
    gc.collect()  # engines of other tests
    torch.cuda.synchronize()
    before, running = torch.cuda.memory_allocated(), []
    for _ in range(400):
        running.append(engine.add([draw.randrange(1000)] * draw.randint(1, 40), Settings(draw.randint(1, 12))))
        if draw.random() < 0.2 and running[0].status != "finished":
            engine.cancel(running[0])
        running = [request for request in running if not request.done]
        engine.step()
    while any(not request.done for request in running):
        engine.step()
    engine.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
