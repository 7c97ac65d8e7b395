"""The arena against its meta trace, and what engines hold and give back."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from conftest import make_gpt2
from counted import Counted
from valid_plans import validate

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.memory import POOLS, Lifetime, live_bytes
from eet_lab.memory.lifetimes import ALIGNMENT
from eet_lab.models import load
from eet_lab.models.decoder import mapped
from eet_lab.parts.arena import PlannedMemory
from eet_lab.parts.trace import Trace, TracedPass
from eet_lab.technique import Recipe

PLANNED = "pre_padding,memory_reuse"


def test_live_bytes_by_hand():
    assert live_bytes([Lifetime("a", 10, 0, 1), Lifetime("b", 5, 1, 3), Lifetime("c", 7, 3, 3)]) == [
        10,
        15,
        5,
        12,
    ]


def test_a_trace_sees_births_and_deaths():
    trace, like = Trace(), torch.empty(0, device="meta")
    a = trace.empty("a", (300,), like)
    b = trace.empty("b", (1,), like)
    del a
    c = trace.empty("c", (1,), like)
    view = b.view(1)
    del b
    trace.empty("d", (1,), like)
    del view, c
    assert trace.finish() == (
        Lifetime("a", 1280, 0, 1),
        Lifetime("b", 256, 1, 3),
        Lifetime("c", 256, 2, 3),
        Lifetime("d", 256, 3, 3),
    )


def test_an_arena_refuses_what_was_not_traced():
    arena, like = PlannedMemory()(), torch.zeros(1)
    arena.plan({"pass": TracedPass(("k",), lambda trace: trace.empty("a", (4,), like.to("meta")))}, like)
    arena.enter("pass")
    with pytest.raises(RuntimeError, match="'?b'? .*traced as a"):
        arena.empty("b", (4,), like)
    arena.enter("pass")
    with pytest.raises(RuntimeError, match="traced as a with 256"):
        arena.empty("a", (400,), like)
    arena.enter("pass")
    assert arena.empty("a", (2, 2), like).shape == (2, 2)
    with pytest.raises(RuntimeError, match="b is request 1 of this pass, which was traced with fewer"):
        arena.empty("b", (1,), like)


def test_layers_share_the_arena(tiny):
    """The same bytes serve all layers: three layers need what one needs."""
    engine = Engine(tiny.decoder, Recipe.parse("pre_padding,memory_reuse").parts)
    engine.generate([[1] * 60, [4] * 50], Settings(4))
    plan = engine.plans()["prefill"]
    assert plan.footprint_bytes < sum(life.num_bytes for life in plan.lifetimes) / 2.5
    assert plan.footprint_bytes <= 1.1 * plan.lower_bound_bytes


def test_the_arena_moves_only_when_it_must_grow(tiny):
    engine = Engine(tiny.decoder, Recipe.parse("pre_padding,memory_reuse").parts)
    engine.generate([[1] * 40] * 4, Settings(4))
    assert engine.memory.generation == 1
    engine.generate([[1] * 9] * 2, Settings(4))
    assert engine.memory.generation == 1
    engine.generate([[1] * 60] * 8, Settings(4))
    assert engine.memory.generation == 2


def test_closing_gives_everything_back(tiny):
    engine = Engine(tiny.decoder, Recipe.parse("memory_reuse").parts)
    engine.generate([[1, 2]], Settings(4))
    assert engine.kv_bytes > 0 and engine.activation_bytes > 0
    engine.close()
    assert engine.kv_bytes == 0 and engine.activation_bytes == 0


@pytest.mark.parametrize("recipe", ["", "pre_padding,memory_reuse"])
def test_a_closed_run_leaves_no_tensor_to_the_collector(tiny, recipe):
    engine = Engine(tiny.decoder, Recipe.parse(recipe).parts)
    engine.generate([[1, 2]], Settings(4))  # imports and caches of torch's own
    engine.close()
    gc.collect()
    gc.disable()
    try:
        before = _num_tensors()
        engine.generate([[1, 2, 3], [4]], Settings(6))
        engine.close()
        assert _num_tensors() == before
    finally:
        gc.enable()


def _num_tensors() -> int:
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def test_a_growing_cache_tells_its_copy(tiny):
    baseline, static = (Engine(tiny.decoder, Recipe.parse(r).parts) for r in ("", "memory_reuse"))
    for engine in (baseline, static):
        engine.generate([[1, 2, 3]], Settings(5))
    per_layer = 2 * 7 * 48 * 4  # keys and values, 3 + 5 - 1 columns
    assert baseline.kv_bytes == 3 * per_layer and baseline.kv_growth_bytes == per_layer // 2
    assert static.kv_growth_bytes == 0


def test_the_fused_recipe_is_traced_without_a_gpu(tiny):
    """Launchers return early on meta tensors after asking for what they would; a layer asks for at most five."""
    engine = Engine(tiny.decoder, Recipe.parse("pre_padding,mask_removal,memory_reuse,fused_kernels").parts)
    engine.memory.plan(engine.tracer.request([40, 30], Settings(8)).passes, tiny.decoder.token_embedding)
    plans = engine.plans()
    assert [life.name for life in plans["decode"].lifetimes].count("attended") == 3
    assert len(plans["decode"].lifetimes) <= 5 * 3 + 4
    assert plans["prefill"].lower_bound_bytes > plans["decode"].lower_bound_bytes


def test_who_watches_the_baseline_does_not_trace_it(tiny, monkeypatch):
    """A sampler reads the planned bytes many times a second: while a run goes on, that must be a look-up."""
    engine, seen = Engine(tiny.decoder), []

    def watch(event):
        if not seen:
            monkeypatch.setattr(Trace, "empty", lambda *args: pytest.fail("traced while running"))
        seen.append(engine.activation_bytes)

    engine.generate([[1, 2, 3], [4]], Settings(4), on_step=watch)
    assert len(set(seen)) == 1 and seen[0] > 0


def drawn(draw: random.Random, num_rows: int, longest: int) -> list[list[int]]:
    return [[draw.randrange(1, 499) for _ in range(draw.randint(1, longest))] for _ in range(num_rows)]


def test_the_same_shape_again_is_neither_traced_nor_placed(tiny, monkeypatch):
    engine = Engine(tiny.decoder, Recipe.parse(PLANNED).parts)
    want = engine.generate([[1, 2, 3], [4]], Settings(4)).tokens
    monkeypatch.setattr(Trace, "empty", lambda *args, **keywords: pytest.fail("traced"))
    monkeypatch.setattr(engine.memory._pool, "place", lambda lifetimes: pytest.fail("placed"))
    assert engine.generate([[1, 2, 3], [4]], Settings(4)).tokens == want


def test_a_decode_step_gets_the_same_tensors_as_the_one_before(tiny):
    """So a steady step makes no allocation, and no view either."""
    engine, seen = Engine(tiny.decoder, Recipe.parse("pre_padding,mask_removal,memory_reuse").parts), []
    empty = engine.memory.empty

    def watch(*args, **keywords):
        seen[-1].append(empty(*args, **keywords))
        return seen[-1][-1]

    engine.memory.empty = watch
    seen.append([])
    engine.generate([[5, 6], [7, 8]], Settings(6), on_step=lambda event: seen.append([]))
    steps = [list(map(id, step)) for step in seen[1:6]]
    assert len(steps[0]) > 20 and all(step == steps[0] for step in steps)


def test_what_is_handed_out_does_not_lie_in_the_arena(tiny):
    engine = Engine(tiny.decoder, Recipe.parse(PLANNED).parts)
    run = engine.generate([[1, 2, 3], [4]], Settings(4))
    spans = [(chunk.data_ptr(), chunk.data_ptr() + chunk.numel()) for chunk in engine.memory._chunks.values()]
    for part in engine._slots.passes.table.buffer:
        assert not any(begin <= part.data_ptr() < end for begin, end in spans)
    assert all(type(token) is int for row in run.tokens for token in row)
    for chunk in engine.memory._chunks.values():
        with torch.inference_mode():
            chunk.fill_(0xFF)  # all of it NaN, as if another request had used it
    assert engine.generate([[1, 2, 3], [4]], Settings(4)).tokens == run.tokens


def test_offsets_are_aligned_and_within_their_chunks(tiny):
    for planner in POOLS:
        engine = Engine(tiny.decoder, Recipe.parse(f"{PLANNED}:planner={planner}").parts)
        engine.generate([[1] * 30, [2] * 7], Settings(5))
        for plan in engine.plans().values():
            validate(plan)
        for slot in (slot for slots in engine.memory._slots.values() for slot in slots):
            chunk = engine.memory._chunks[slot.chunk_id]
            assert (slot.memory.data_ptr() - chunk.data_ptr()) % ALIGNMENT == 0
            assert slot.memory.numel() == slot.life.num_bytes


def test_engines_of_several_models_and_types_do_not_disturb_each_other(tiny, hf_model):
    """Step by step in turn: while one engine is in the middle of a run, all others run."""
    small = load(make_gpt2(n_embd=40, n_head=5, n_layer=2), device="cpu").decoder
    half = mapped(tiny.decoder, lambda tensor: tensor.bfloat16())
    recipes = [PLANNED, "memory_reuse:kv=paged", f"{PLANNED}:planner=chunked", "pre_padding,mask_removal,memory_reuse"]
    cases = [(model, recipe) for model in (tiny.decoder, small, half) for recipe in recipes]
    draw = random.Random(3)
    batches = [drawn(draw, 3, 20) for _ in cases]
    alone = [
        Engine(model, Recipe.parse(recipe).parts).generate(prompts, Settings(6)).tokens
        for (model, recipe), prompts in zip(cases, batches, strict=True)
    ]
    engines = [Engine(model, Recipe.parse(recipe).parts) for model, recipe in cases]
    found = {}

    def run(first: int) -> None:
        """Each engine's second step lets the next one run from beginning to end."""
        if first == len(engines):
            return

        def nested(event):
            if event.index == 1:
                run(first + 1)

        found[first] = engines[first].generate(batches[first], Settings(6), on_step=nested).tokens

    for _ in range(2):
        run(0)
        assert [found[i] for i in range(len(cases))] == alone


@pytest.mark.parametrize("recipe", ["", PLANNED, "memory_reuse:kv=paged", f"{PLANNED}:planner=chunked"])
def test_closing_frees_every_byte(tiny, recipe):
    counted = Counted()
    engine = Engine(tiny.decoder, Recipe.parse(recipe).parts)
    with counted:
        engine.reserve(3, 30, Settings(8))
        engine.generate([[1] * 30, [2] * 3], Settings(8))
        assert counted.num_bytes >= engine.kv_bytes + engine.memory.held_bytes > 0
        engine.close()
    assert counted.num_bytes == 0
