"""Batching policies: what each gives to a pass, TurboTransformers' figure, and properties of all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import pytest
from cost_tables import TOY_DECODER, TURBO_2060, encoder_cost
from hypothesis import given
from hypothesis import strategies as st

from eet_lab import scheduling
from eet_lab.errors import ScheduleError
from eet_lab.paths import notebooks_dir
from eet_lab.scheduling.choices import fitting_policies
from eet_lab.scheduling.dynamic_program import FIGURE_8, FIGURE_8_LENGTHS, cheapest, figure_8_costs
from eet_lab.scheduling.policies import (
    POLICIES,
    DynamicProgram,
    LengthBuckets,
    NaivePadding,
    NoBatching,
    TokenBudget,
    parse_policy,
)
from eet_lab.scheduling.policy import Plan
from eet_lab.scheduling.traffic import Gamma, Uniform, make_traffic

FREE = encoder_cost(lambda length, batch: 1.0)


class Item(NamedTuple):
    length: int
    arrival_ms: float = 0.0


def planned(policy, lengths: Sequence[int], costs=FREE, now_ms: float = 0.0) -> list[list[int]]:
    return [[each.length for each in group] for group in policy.next([*map(Item, lengths)], now_ms, costs).groups]


def test_figure_8_to_the_digit():
    """TurboTransformers' own costs: 20.62 ms one by one, 15.24 ms as the figure groups them."""
    lengths = sorted(FIGURE_8_LENGTHS)
    groups = cheapest_groups(lengths, figure_8_costs, 5)
    assert groups == [[17, 18], [52, 63], [77]]
    assert round(cost_of(groups, lambda length, rows: FIGURE_8[length, rows]), 9) == 15.24
    assert round(sum(FIGURE_8[length, 1] for length in FIGURE_8_LENGTHS), 9) == 20.62


def test_figure_8_by_the_policy_that_a_server_runs():
    class Figure8:
        padded_up_to = staticmethod(figure_8_costs)

    assert planned(DynamicProgram(), FIGURE_8_LENGTHS, Figure8()) == [[52, 63], [17, 18], [77]]


COSTS = st.tuples(st.floats(0.1, 10), st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 3)).map(
    lambda c: lambda length, rows: c[0] + c[1] * length * rows + c[2] * rows * length**2 + c[3] * rows**0.5
)
LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=8)


def every_partition(items: list[int]):
    """All ways to put them into groups, contiguous or not."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in every_partition(rest):
        yield [[first], *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], [first, *group], *groups[at + 1 :]]


def by_rows(cost):
    """A cost as the dynamic program asks for it."""
    return lambda length, rows: [cost(length, each) for each in range(1, rows + 1)]


def cheapest_groups(lengths: list[int], costs, most: int) -> list[list[int]]:
    return [lengths[begin:end] for begin, end in cheapest(lengths, costs, most)]


def cost_of(groups, cost) -> float:
    return sum(cost(max(group), len(group)) for group in groups)


@given(LENGTHS.map(lambda lengths: lengths[:7]), COSTS, st.integers(1, 8))
def test_the_dynamic_program_equals_brute_force(lengths, cost, most):
    lengths = sorted(lengths)
    found = cheapest_groups(lengths, by_rows(cost), most)
    allowed = (groups for groups in every_partition(lengths) if max(map(len, groups)) <= most)
    assert cost_of(found, cost) == pytest.approx(min(cost_of(groups, cost) for groups in allowed))
    assert [*chain(*found)] == lengths and max(map(len, found)) <= most


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), COSTS, st.integers(1, 20))
def test_the_dynamic_program_is_never_worse_than_arrival_order(lengths, cost, most):
    best = cost_of(cheapest_groups(sorted(lengths), by_rows(cost), most), cost)
    in_order = [lengths[at : at + most] for at in range(0, len(lengths), most)]
    assert best <= cost_of(in_order, cost) * (1 + 1e-9)
    assert best <= cost_of([[length] for length in lengths], cost) * (1 + 1e-9)


def test_a_plan_reads_the_table_once_for_each_length(monkeypatch):
    """A server plans between two passes: a thousand requests may not cost it as many milliseconds."""
    table, points = encoder_cost(lambda length, batch: 1.0 + length * batch), []
    at = type(table.grid).at
    monkeypatch.setattr(type(table.grid), "at", lambda self, *point: points.append(point) or at(self, *point))
    for _ in range(2):
        planned(DynamicProgram(), [10 + number % 50 for number in range(1000)], table)
    assert len(points) <= 50 * len(table.batches)


def test_what_each_policy_gives_to_a_pass():
    lengths = (30, 200, 10, 31, 90, 200)
    assert planned(NoBatching(), lengths) == [[30]]
    assert planned(NaivePadding(max_rows=4), lengths) == [[30, 200, 10, 31]]
    assert planned(LengthBuckets(width=32, max_rows=3), lengths) == [[30, 10, 31]]
    assert planned(LengthBuckets(width=32, max_rows=3, window=3), lengths) == [[30, 10]]
    assert planned(TokenBudget(budget=250), lengths) == [[30, 200, 10]]
    assert planned(TokenBudget(budget=20), lengths) == [[30]], "one beyond the budget runs alone, and not never"
    assert planned(DynamicProgram(), lengths) == [list(lengths)], "where a pass costs the same for all"
    assert planned(DynamicProgram(max_rows=2), lengths, TURBO_2060) == [[30, 10], [200, 200], [31, 90]]


def test_lazy_waits_for_company_and_no_longer_than_it_says():
    lazy = DynamicProgram(trigger="lazy", wait_ms=5.0, max_rows=3)
    waiting = [Item(30, 100.0), Item(10, 103.0)]
    assert lazy.next(waiting, 103.0, FREE) == Plan([], wake_ms=105.0)
    assert lazy.next(waiting, 105.0, FREE).groups == [waiting]
    assert lazy.next([*waiting, Item(5, 103.5)], 103.5, FREE).groups == [[*waiting, Item(5, 103.5)]]
    assert DynamicProgram().next(waiting, 103.0, FREE).groups == [waiting]


ITEMS = st.lists(st.tuples(st.integers(1, 512), st.floats(0, 50)), min_size=1, max_size=80).map(
    lambda pairs: [Item(length, at) for (length, _), at in zip(pairs, accumulate(gap for _, gap in pairs), strict=True)]
)
EVERY = st.sampled_from(
    [
        *(kind() for kind in POLICIES.values()),
        DynamicProgram(trigger="lazy", wait_ms=7.0, max_rows=3),
        DynamicProgram(max_rows=2, window=5),
        LengthBuckets(width=3, window=4),
        TokenBudget(budget=7),
    ]
)


@given(EVERY, ITEMS, st.floats(0, 100))
def test_nobody_starves(policy, waiting, later):
    """The oldest is in every plan that serves somebody, and a policy that serves nobody wakes up within its wait.

    So whoever has n before it is served after n + 1 plans at the latest.
    """
    now = waiting[-1].arrival_ms + later
    plan = policy.next(waiting, now, TURBO_2060)
    if not plan.groups:
        assert now < plan.wake_ms <= waiting[0].arrival_ms + policy.knobs["wait_ms"]
        plan = policy.next(waiting, plan.wake_ms, TURBO_2060)
    given_out = [id(each) for group in plan.groups for each in group]
    assert id(waiting[0]) in given_out
    assert len(set(given_out)) == len(given_out) and set(given_out) <= set(map(id, waiting))
    assert all(plan.groups)


@given(EVERY, ITEMS, ITEMS)
def test_nobody_who_comes_changes_a_full_plan(policy, waiting, newcomers):
    plan = policy.next(waiting, waiting[-1].arrival_ms, TURBO_2060)
    if plan.is_full:
        assert policy.next([*waiting, *newcomers], waiting[-1].arrival_ms, TURBO_2060) == plan


@pytest.mark.parametrize(
    "policy", [NoBatching(), NaivePadding(max_rows=2), LengthBuckets(width=8, max_rows=2), TokenBudget(budget=9)]
)
def test_a_plan_is_full_once_nobody_else_fits(policy):
    def is_full(*lengths):
        return policy.next([*map(Item, lengths)], 0.0, FREE).is_full

    assert is_full(5, 6) and is_full(4, 5, 1)
    assert is_full(5) == isinstance(policy, NoBatching)
    assert TokenBudget(budget=99, max_rows=2).next([*map(Item, (1, 1))], 0.0, FREE).is_full
    assert not DynamicProgram(max_rows=1).next([Item(5)], 0.0, FREE).is_full, "others would change its partition"


@given(EVERY, ITEMS)
def test_limits_hold(policy, waiting):
    plan = policy.next(waiting, waiting[-1].arrival_ms + 1e6, TURBO_2060)
    for group in plan.groups:
        assert policy.joins or len(group) <= policy.knobs.get("max_rows", 1)
        if isinstance(policy, TokenBudget):
            assert len(group) == 1 or sum(each.length for each in group) <= policy.budget


@pytest.mark.parametrize("kind", POLICIES.values(), ids=lambda kind: kind.name)
def test_every_policy_has_a_card_that_says_what_it_ignores(kind):
    policy = kind()
    assert all(word in policy.card for word in ("optimizes", "ignore", "eadlines", "starves"))
    assert hash(policy) == hash(kind()) and policy == kind()
    assert parse_policy(str(policy)) == policy
    turned = kind(**{name: 3 for name in policy.knobs if name in ("max_rows", "width", "budget")})
    assert parse_policy(str(turned)) == turned


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("dynamic", "no policy 'dynamic'; there are no_batching.*Did you mean 'dynamic_program'"),
        ("naive_padding:max_rows=0", "naive_padding:max_rows is 0"),
        ("naive_padding:max_rows=x", "naive_padding:max_rows is 'x'"),
        ("dynamic_program:trigger=eager", "trigger is 'eager', but it must be one of hungry, lazy"),
        ("dynamic_program:wait_ms=-1", "wait_ms is -1"),
        ("dynamic_program:wait_ms=nan", "wait_ms is nan"),
        ("no_batching:rows=2", "has no knob 'rows'"),
        ("continuous_batching:budget=8", "budget is 8, but it must be at least max_rows, which is 16"),
    ],
)
def test_words_that_are_no_policy(words, says):
    with pytest.raises(ScheduleError, match=says):
        parse_policy(words)


def test_what_a_policy_leaves_open_is_within_its_knobs_however_far_a_table_reaches():
    table, traffic = (
        encoder_cost(lambda length, batch: 1.0, (1, 8192), (1, 256)),
        make_traffic(9, Gamma(1), Uniform(1, 9)),
    )
    budgets = [each.knobs["budget"] for each in fitting_policies(None, traffic, table) if "budget" in each.knobs]
    assert budgets == [2**20]
    [joining] = fitting_policies(["continuous_batching:budget=8"], traffic, TOY_DECODER)
    assert (joining.max_rows, joining.budget) == (min(8, TOY_DECODER.most_rows), 8), "it was the table's own limit"


def test_policies_need_neither_torch_nor_numpy():
    code = "import sys, eet_lab.scheduling.policies; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_package_has_all_that_the_lesson_promises():
    lesson = json.loads((notebooks_dir() / "07_variable_length_serving.ipynb").read_text())
    [text] = [words for cell in lesson["cells"] if "has it all" in (words := "".join(cell["source"]))]
    promised = re.findall(r"`(\w+)`", text.partition("has it all")[2].partition("`eet_lab")[0])
    kinds = [kind.__name__ for kind in POLICIES.values()]
    assert {"make_traffic", "read_trace", "load_cost", "simulate_traffic", "cheapest"} <= {*promised}
    for name in [*promised, *kinds, "POLICIES", "parse_policy"]:
        assert name in scheduling.__all__ and hasattr(scheduling, name), name
