"""Planners against their promise, and the arena against its rehearsal."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.engine.arena import PlannedMemory
from eet_lab.engine.engine import Engine
from eet_lab.engine.rehearse import rehearsals
from eet_lab.engine.settings import Settings
from eet_lab.engine.trace import Rehearsal, Trace
from eet_lab.memory import PLANNERS, Lifetime, live_bytes
from eet_lab.technique import Recipe

lifetimes = st.lists(
    st.tuples(st.integers(0, 4000), st.integers(0, 30), st.integers(0, 30)).map(
        lambda t: Lifetime("x", t[0], min(t[1:]), max(t[1:]))
    ),
    max_size=24,
)


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
@given(traced=lifetimes)
def test_no_two_live_tensors_share_a_byte(planner, traced):
    plan = planner(traced)
    assert plan.lifetimes == tuple(traced)
    placed = list(zip(plan.offsets, traced, strict=True))
    for i, (a, first) in enumerate(placed):
        for b, second in placed[:i]:
            if first.overlaps(second) and first.num_bytes and second.num_bytes:
                assert a + first.num_bytes <= b or b + second.num_bytes <= a
    assert plan.footprint_bytes >= plan.lower_bound_bytes == max(live_bytes(traced), default=0)


@given(traced=lifetimes)
def test_reuse_is_never_worse_than_none(traced):
    assert PLANNERS["greedy_by_size"](traced).footprint_bytes <= PLANNERS["no_reuse"](traced).footprint_bytes


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


def test_an_arena_refuses_what_was_not_rehearsed():
    arena, like = PlannedMemory()(), torch.zeros(1)
    arena.plan({"pass": Rehearsal(("k",), lambda trace: trace.empty("a", (4,), like.to("meta")))}, like)
    arena.enter("pass")
    with pytest.raises(RuntimeError, match="'?b'? .*rehearsed as a"):
        arena.empty("b", (4,), like)
    arena.enter("pass")
    with pytest.raises(RuntimeError, match="rehearsed as a with 256"):
        arena.empty("a", (400,), like)
    arena.enter("pass")
    assert arena.empty("a", (2, 2), like).shape == (2, 2)
    with pytest.raises(RuntimeError, match="b is request 1 of this pass, which was rehearsed with fewer"):
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


def test_the_fused_recipe_is_rehearsed_without_a_gpu(tiny):
    """Launchers return early on meta tensors after asking for what they would; a layer asks for at most five."""
    engine = Engine(tiny.decoder, Recipe.parse("pre_padding,mask_removal,memory_reuse,fused_kernels").parts)
    state, first = engine.parts.prompts([[1] * 40, [2] * 30], 8)
    engine.memory.plan(rehearsals(engine, state, first, Settings().sampling(torch.device("cpu"))), tiny.decoder.words)
    plans = engine.plans()
    assert [life.name for life in plans["decode"].lifetimes].count("attended") == 3
    assert len(plans["decode"].lifetimes) <= 5 * 3 + 4
    assert plans["prefill"].lower_bound_bytes > plans["decode"].lower_bound_bytes


def test_who_watches_the_baseline_does_not_rehearse_it(tiny, monkeypatch):
    """A sampler reads the planned bytes many times a second: while a run goes on, that must be a look-up."""
    engine, seen = Engine(tiny.decoder), []

    def watch(event):
        if not seen:
            monkeypatch.setattr(Trace, "empty", lambda *args: pytest.fail("rehearsed while running"))
        seen.append(engine.activation_bytes)

    engine.generate([[1, 2, 3], [4]], Settings(4), on_step=watch)
    assert len(set(seen)) == 1 and seen[0] > 0
