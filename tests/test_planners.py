"""Planners against their promises, on random traces: ten thousand each, of a hundred to an example."""

from __future__ import annotations

import builtins
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from valid_plans import validate

from eet_lab.errors import PlanError, RecipeError, SetupError
from eet_lab.memory import (
    PLANNERS,
    POOLS,
    Chunk,
    Lifetime,
    Plan,
    optimal,
)
from eet_lab.memory.lifetimes import aligned
from eet_lab.memory.optimal import missing, solve
from eet_lab.technique import Recipe
from eet_lab.techniques.memory_reuse import MemoryReuse

UNIT = 256
A_HUNDRED = settings(max_examples=100, deadline=None)
seeds = st.integers(0, 2**32)


def trace(rng: random.Random, most: int = 12, unit: int = UNIT) -> tuple[Lifetime, ...]:
    """A pass of up to `most` tensors; mostly short-lived, of sizes that seldom divide each other, some empty."""
    num_requests = rng.randint(1, most)
    lifetimes = []
    for i in range(rng.randint(0, most)):
        first = rng.randrange(num_requests)
        last = min(first + int(rng.expovariate(0.5)), num_requests - 1)
        lifetimes.append(Lifetime(f"t{i}", unit * rng.randint(0, 30), first, last))
    return tuple(lifetimes)


def collide(plan: Plan) -> list[tuple[str, str]]:
    """Every pair that is alive together and shares bytes, found in the plainest way."""
    placed = [(life, o, o + life.num_bytes) for life, o in zip(plan.lifetimes, plan.offsets, strict=True)]
    return [
        (a.name, b.name)
        for i, (a, start, stop) in enumerate(placed)
        for b, begin, end in placed[:i]
        if a.first <= b.last and b.first <= a.last and max(start, begin) < min(stop, end)
    ]


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
@A_HUNDRED
@given(seed=seeds)
def test_planners_place_every_trace(planner, seed):
    rng = random.Random(seed)
    for _ in range(100):
        traced = trace(rng, unit=rng.choice((UNIT, 100)))  # torch's sizes, and any
        plan = planner(traced)
        assert plan.lifetimes == traced and not collide(plan)
        assert validate(plan).footprint_bytes == plan.end >= plan.lower_bound_bytes
        assert aligned(plan.end) <= aligned(PLANNERS["no_reuse"](traced).end)


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_the_optimal_planner_is_never_behind(seed):
    rng = random.Random(seed)
    for _ in range(10):
        traced = trace(rng, most=8, unit=rng.choice((UNIT, 100)))
        found, proven = solve(traced, time_limit_s=30)
        assert found.lifetimes == traced and not collide(found) and proven
        assert validate(found).end >= found.lower_bound_bytes
        assert all(aligned(found.end) <= aligned(planner(traced).end) for planner in PLANNERS.values())


def test_a_plan_without_chunks_is_one_arena():
    plan = Plan((Lifetime("a", 512, 0, 0), Lifetime("b", 256, 0, 0)), (0, 512))
    assert plan.chunks == (Chunk(0, 0, 768),) and plan.footprint_bytes == plan.end == 768
    assert Plan((), ()).chunks == () and Plan((Lifetime("none", 0, 0, 0),), (512,)).footprint_bytes == 0


A, B = Lifetime("a", 512, 0, 2), Lifetime("b", 256, 2, 3)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            Plan((A, B), (0, 256)),
            r"a \(requests 0 to 2, bytes 0 to 512\) and b .*bytes 256 to 512\) are alive together",
        ),
        (Plan((A, B), (0, 520)), "b is at 520; an offset is a multiple of 256"),
        (Plan((A, B), (0, -256)), "b is at -256"),
        (Plan((A, B), (0, 512.0)), "b is at 512.0"),
        (Plan((A, B), (0, 512), (Chunk(0, 0, 512),)), "b .* lies in no chunk"),
        (Plan((A, B), (256, 1024), (Chunk(0, 0, 512), Chunk(1, 512, 1024))), "a .* crosses a chunk's end"),
        (
            Plan((B,), (0,), (Chunk(4, 0, 512), Chunk(7, 256, 512))),
            r"chunk 4 \(bytes 0 to 512\) and chunk 7 .* overlap",
        ),
        (Plan((B,), (512,), (Chunk(0, 512, 512), Chunk(1, 0, 512))), "not in order of their start"),
    ],
)
def test_a_bad_plan_is_told_what_is_wrong(plan, message):
    with pytest.raises(PlanError, match=message):
        validate(plan)


def test_one_offset_for_each_tensor():
    plan = Plan((A,), (0,))
    object.__setattr__(plan, "offsets", (0, 0))
    with pytest.raises(PlanError, match="1 tensors, but 2 offsets"):
        validate(plan)


def test_what_touches_in_time_or_space_does_not_collide():
    assert validate(Plan((A, B), (0, 512))) and validate(Plan((A, Lifetime("c", 512, 3, 3)), (0, 0)))


def test_the_optimal_planner_proves_its_answer_or_says_that_it_did_not():
    rng = random.Random(3)
    traced = [
        Lifetime("x", UNIT * rng.randint(1, 999), first, first + rng.randrange(20))
        for first in (rng.randrange(60) for _ in range(150))
    ]
    hasty = solve(traced, time_limit_s=0.01)
    assert hasty.plan.end <= PLANNERS["greedy_by_size"](traced).end and not hasty.proven
    validate(hasty.plan)


def test_the_optimal_planner_names_its_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("ortools"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SetupError, match=r"pip install -c \S+ .*\[optimal\]'"):
        optimal([A, B])  # though greedy_by_size is enough here: whether it runs must not depend on the trace
    reason = MemoryReuse(planner="optimal").unavailable()
    assert reason is not None and "pip install" in reason and MemoryReuse().unavailable() is None
    with pytest.raises(RecipeError, match="memory_reuse cannot run on cpu.*ortools"):
        Recipe.parse("memory_reuse:planner=optimal").check("cpu")


def test_the_optimal_planner_is_available_where_its_extra_is():
    assert missing() is None
    assert Recipe.parse("memory_reuse:planner=optimal").check("cpu")


def test_plan_times_has_a_row_for_each_recipe_and_pool(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    import plan_times

    out = tmp_path / "plan_times.json"
    words = ["--model", "gpt2", "--batch", "2", "--prompt", "5", "--new-tokens", "3", "--runs", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["plan_times.py", *words])
    plan_times.main()
    told = json.loads(out.read_text())
    assert [(row["recipe"], row["pool"]) for row in told["rows"]] == [(r, p) for r in plan_times.RECIPES for p in POOLS]
    assert told["batch"] == 2 and len(capsys.readouterr().out.splitlines()) == 1 + len(told["rows"])
    assert all(row["footprint_bytes"] >= row["lower_bound_bytes"] > 0 < row["median_ms"] for row in told["rows"])
