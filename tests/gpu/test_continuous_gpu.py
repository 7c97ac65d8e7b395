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


def joined(engine: Engine, rows: list[list[int]], settings: Settings | list[Settings], seed: int = 0) -> list[tuple]:
    """Every prompt is added at a random time, as row 0 of its own batch, with its settings or those of all."""
    draw, waiting, added = random.Random(seed), list(rows), []
    each = iter([settings] * len(rows) if isinstance(settings, Settings) else settings)
    while waiting or any(not request.done for request in added):
        while waiting and draw.random() < 0.4:
            added.append(engine.add(waiting.pop(0), next(each)))
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


HOWS = [{}, {"temperature": 0.9}, {"temperature": 0.8, "top_k": 50}, {"temperature": 0.7, "top_p": 0.8}]
HOWS += [{"top_k": 5}, {"temperature": 1.2, "top_k": 10**6}, {"temperature": 1.1, "top_k": 300, "top_p": 0.9}]


def mixed(count: int, new_tokens: int) -> list[Settings]:
    return [Settings(new_tokens, **HOWS[row % len(HOWS)], seed=row % 3) for row in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv", ["static", "paged"])
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_in_fp32_each_has_settings_of_its_own(fp32, recipe, kv, policy):
    rows, each, plain = batch(28, 1, 70), mixed(28, 24), Engine(fp32)
    want = [plain.generate([row], settings).tokens[0] for row, settings in zip(rows, each, strict=True)]
    engine = Engine(fp32, parts_of(recipe, kv, policy))
    engine.reserve(engine.parts.schedule.max_rows, 100, Settings(24))
    for seed in range(2):
        assert joined(engine, rows, each, seed) == want


def test_in_fp32_each_prompt_of_a_batch_has_settings_of_its_own(fp32):
    rows, each, plain = batch(14, 1, 70), mixed(14, 16), Engine(fp32)
    each = [replace(settings, max_new_tokens=1 + row) for row, settings in enumerate(each)]
    alone = [plain.generate(rows, settings).tokens[row] for row, settings in enumerate(each)]
    for recipe in (
        "",
        "fused_kernels,fused_sampling",
        "pre_padding,mask_removal,memory_reuse,fused_kernels,cuda_graphs",
    ):
        engine = Engine(fp32, Recipe.parse(recipe, "cuda").check("cuda").parts)
        for _ in range(2):
            assert engine.generate(rows, each).tokens == tuple(alone), recipe


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
    joined(engine, batch(14, 1, 70), mixed(14, 24))
    joined(engine, batch(14, 1, 70, seed=1), mixed(14, 24)[::-1], seed=1)
    captures = engine.captures
    others = [replace(settings, temperature=settings.temperature * 0.9, seed=9) for settings in mixed(14, 24)]
    joined(engine, batch(14, 1, 70, seed=2), others, seed=2)
    assert engine.captures == captures, "values are read on the device"


def test_preempted_requests_get_the_same_tokens(fp32):
    rows, plain = batch(12, 30, 70), Engine(fp32)
    want = [plain.generate([row], Settings(48)).tokens[0] for row in rows]
    parts = replace(parts_of(RECIPES[1], "paged", POLICIES[0]), kv_cache=PagedKV(16, num_pages=14))
    engine = Engine(fp32, parts)
    engine.reserve(engine.parts.schedule.max_rows, 100, Settings(48))
    assert joined(engine, rows, Settings(48)) == want
    assert engine._slots.scheduler.num_preempted > 0 and engine.cache.ledger.free == 13


@pytest.mark.parametrize("pages", [None, 14])
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_requests_that_share_pages_get_the_same_tokens(fp32, recipe, pages):
    """Beginnings of one text, some with an end of their own; 48 and 64 tokens are whole pages, and one is copied."""
    [text], ends, plain = batch(1, 70, 70), batch(12, 5, 9, seed=2), Engine(fp32)
    rows = [text[: (64, 48, 40, 9)[row % 4]] + (ends[row] if row % 3 else []) for row in range(12)]
    each = mixed(12, 24)
    want = [plain.generate([row], settings).tokens[0] for row, settings in zip(rows, each, strict=True)]
    parts = replace(parts_of(recipe, "paged", f"{POLICIES[0]},prefix_caching"), kv_cache=PagedKV(16, pages, True))
    engine = Engine(fp32, parts)
    engine.reserve(engine.parts.schedule.max_rows, 100, Settings(24))
    for seed in range(2):
        assert joined(engine, rows, each, seed) == want
    ledger = engine.cache.ledger
    assert engine.prefix_cache_hit_rate > 0.5 and ledger.free == ledger.num_pages - 1


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


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_log_probabilities_leave_the_tokens_as_they_are_and_come_from_captured_steps(recipe):
    model, rows = decoder(torch.float16), batch(12, 1, 40)
    engine = Engine(model, parts_of(recipe, "paged", POLICIES[0]))
    engine.reserve(5, 64, Settings(20))
    for how in ({}, {"temperature": 0.9, "seed": 5}):
        settings = [Settings(20, **how, logprobs=(None, 0, 20)[number % 3]) for number in range(len(rows))]
        want = joined(engine, rows, Settings(20, **how))
        assert joined(engine, rows, settings) == want
    asked = [engine.add(row, each) for row, each in zip(rows, settings, strict=True)]
    while not all(request.done for request in asked):
        engine.step()
    plain = Engine(model).generate(
        rows, [replace(each, logprobs=20) for each in settings], forced=[request.generated for request in asked]
    )
    for request, each, told in zip(asked, settings, plain.logprobs, strict=True):
        assert len(request.logprobs) == (0 if each.logprobs is None else 20)
        for ours, theirs in zip(request.logprobs, told, strict=False):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=0.05) and len(ours.top) == each.logprobs
