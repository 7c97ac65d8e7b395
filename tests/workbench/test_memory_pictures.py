"""Pictures of plans: what is drawn is what the plan says, and it stays light."""

from __future__ import annotations

import colorsys
import random
import sys
from collections.abc import Callable, Sequence

import pytest

from eet_lab.figures.plans import (
    FAMILIES,
    OP_COLORS,
    MiB,
    color_of,
    film,
    footprints,
    lines,
    packing,
    packings,
)
from eet_lab.memory import PLANNERS, POOLS, Chunk, DriverCalls, Lifetime, Plan
from eet_lab.memory.replays import replay, side_by_side
from eet_lab.memory.workloads import turbo_artifact

LIVES = (
    Lifetime("a", 2 * MiB, 0, 1, "norm_linear"),
    Lifetime("b", 1 * MiB, 1, 2, "attention"),
    Lifetime("c", 2 * MiB, 2, 3, "norm_linear"),
)
MOST_BYTES = 500_000


def a_deep_models_pass(num_layers: int = 48) -> list[Lifetime]:
    """About five tensors a layer, as with fused kernels."""
    lives = []
    for at in range(0, 5 * num_layers, 5):
        lives += [Lifetime(f"tensor {i}", (i + 1) * MiB, at + i, at + i + 2, f"op {i}") for i in range(5)]
    return lives


def test_each_rectangle_is_where_its_tensor_lies() -> None:
    plan = Plan(LIVES, (0, 2 * MiB, 0))
    fig = packing(plan)
    bars = {trace.name: trace for trace in fig.data if trace.type == "bar"}
    assert list(bars) == ["norm_linear", "attention"]
    first = bars["norm_linear"]
    assert (list(first.x), list(first.base), list(first.y)) == ([0, 2], [0, 0], [2, 2])
    assert all(1.9 < width <= 2 for width in first.width)
    assert list(bars["attention"].customdata[0]) == ["b", "1 MiB", 2, "2 MiB"]
    assert "5 MiB in total, placed in 3 MiB (the lower bound)" in fig.layout.title.text.replace("<br>", " ")


def test_an_op_has_one_colour_in_every_picture() -> None:
    plan = Plan(LIVES, (0, 2 * MiB, 0))
    turned = Plan(LIVES[1:] + LIVES[:1], (2 * MiB, 0, 0))
    for fig in (packing(plan), packing(turned), packings({"a": turned, "b": plan})):
        for bar in fig.data:
            if bar.type == "bar":
                assert bar.marker.color == color_of(bar.name)
    assert color_of("a kernel of one's own") == color_of("a kernel of one's own")


def test_known_ops_differ_and_none_looks_like_new_or_given_back() -> None:
    for family in FAMILIES:
        assert len(set(map(color_of, family))) == len(family)
    for color in OP_COLORS:
        hue, *_ = colorsys.rgb_to_hls(*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)))
        assert 20 < hue * 360 < 60 or 190 < hue * 360 < 310, f"{color} is red or green"


def test_the_film_has_the_pictures_colours_and_tells_address_and_life() -> None:
    requests = turbo_artifact()[:2]
    fig = film(replay(POOLS["chunked"](), requests), "chunks")
    tensors = next(trace for trace in fig.data if trace.type == "bar" and trace.customdata is not None)
    assert list(tensors.marker.color) == [color_of(life.name) for life in requests[0].lifetimes]
    assert list(tensors.customdata[0])[:2] == ["qkv", "1.942 MiB"] and "address" in tensors.hovertemplate
    [slider], [menu] = fig.layout.sliders, fig.layout.updatemenus
    assert menu.pad.t >= slider.pad.t + 50, "the buttons lie below the slider"


def test_what_is_alive_is_drawn_below_with_its_bound() -> None:
    fig = packing(Plan(LIVES, (0, 2 * MiB, 3 * MiB)))
    curves = {trace.name.partition(":")[0]: list(trace.y) for trace in fig.data if trace.type == "scatter"}
    assert curves == {"alive": [2, 3, 3, 2, 0], "lower bound": [3, 3], "held": [5, 5]}


def test_chunks_have_borders_and_a_full_arena_has_none() -> None:
    chunks = (Chunk(0, 0, 2 * MiB), Chunk(3, 4 * MiB, 2 * MiB))
    fig = packing(Plan(LIVES, (0, 4 * MiB, 0), chunks))
    assert [(shape.y0, shape.y1) for shape in fig.layout.shapes] == [(0, 2), (4, 6)]
    assert [note.text for note in fig.layout.annotations] == ["chunk 0: 2 MiB", "chunk 3: 2 MiB"]
    assert not packing(Plan(LIVES, (0, 2 * MiB, 0))).layout.shapes


def test_a_small_request_in_a_large_arena_is_still_seen() -> None:
    plan = Plan(LIVES, (0, 2 * MiB, 0), (Chunk(0, 0, 512 * MiB),))
    fig = packing(plan)
    assert fig.layout.yaxis.range[1] < 6 and fig.layout.yaxis2.range[1] < 6
    assert "placed in 3 MiB (the lower bound); 512 MiB are held" in fig.layout.title.text.replace("<br>", " ")


def test_a_plan_of_nothing_can_be_drawn() -> None:
    assert packing(Plan((), ())).layout.title.text.startswith("0 tensors")


def test_a_deep_models_pictures_stay_light_and_legible() -> None:
    lives = a_deep_models_pass()
    placed = side_by_side(lives, ["greedy_by_size", "first_fit", "no_reuse"])
    plans = {each.name: each.plan for each in placed if each.plan}
    assert len(lives) == 240 and len(plans) == 3
    fig = packings(plans)
    assert all(len(each.to_json()) < MOST_BYTES for each in (packing(plans["greedy_by_size"]), fig))
    titles = [note.text for note in fig.layout.annotations]
    assert any("no_reuse" in title and "(cut off)" in title for title in titles)
    bound = plans["no_reuse"].lower_bound_bytes / MiB
    assert fig.layout.yaxis.range[1] < 3.2 * bound, "no reuse does not dwarf the others"


def test_what_only_the_first_call_of_a_process_takes_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, pass_time: Callable[[float], None]
) -> None:
    """A solver is imported by the first request that it gets."""
    made: list[int] = []

    class Slow:
        calls = DriverCalls()

        def place(self, lifetimes: Sequence[Lifetime]) -> Plan:
            if not made:
                pass_time(1e4)
            made.append(len(lifetimes))
            return PLANNERS["greedy_by_size"](lifetimes)

    monkeypatch.setitem(POOLS, "slow", Slow)
    [placed] = side_by_side(LIVES, ["slow"])
    assert made == [2, len(LIVES)] and placed.planning_ms < 1e7


def test_side_by_side_tells_what_each_holds_and_what_it_took() -> None:
    placed = side_by_side(LIVES, ["greedy_by_size", "no_reuse"])
    good, none = lines(placed)
    assert good[:5] == ["greedy_by_size", "3 MiB", "1.000", "1", "3 MiB"] and good[5].endswith(" ms")
    assert none[:3] == ["no_reuse", "5 MiB", "1.667"]
    [bars] = footprints(placed).data
    assert list(bars.x) == [3, 5] and bars.marker.color[0] != bars.marker.color[1]


def test_a_planner_that_cannot_says_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimal one needs a solver; EET's ends at its 101st buffer."""
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    many = [Lifetime(f"t{i}", 256 * (i + 1), 0, 200) for i in range(101)]
    for lives, name, word in ((many, "eet", "100"), (an_awkward_trace(), "optimal", "ortools")):
        broken, fine = side_by_side(lives, [name, "greedy_by_size"])
        assert broken.plan is None and word in broken.why and fine.plan is not None
        assert lines([broken, fine])[0][:2] == [name, broken.why]
        assert len(footprints([broken, fine]).data[0].y) == 1


def an_awkward_trace() -> list[Lifetime]:
    """One on which greedy by size misses the lower bound, so that the solver is asked."""
    draw = random.Random(0)
    while True:
        lives = [
            Lifetime(f"t{i}", 256 * draw.randint(1, 9), first := draw.randint(0, 8), first + draw.randint(0, 4))
            for i in range(9)
        ]
        plan = PLANNERS["greedy_by_size"](lives)
        if plan.footprint_bytes > plan.lower_bound_bytes:
            return lives
