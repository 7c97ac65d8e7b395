"""A model serves traffic for real: who is served, what is noted, Stop, and what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from cost_tables import encoder_cost
from encoders import ours as encoder
from encoders import passes_that_are_late
from test_continuous import Lagging

from eet_lab.engine import slots
from eet_lab.engine.encode import EncoderEngine
from eet_lab.errors import Cancelled, CostError, ScheduleError
from eet_lab.models import Model, load
from eet_lab.scheduling.agreement import Compared, agreement
from eet_lab.scheduling.cost import DecoderCost, EncoderCost
from eet_lab.scheduling.policies import ContinuousBatching, NaivePadding, TokenBudget
from eet_lab.scheduling.policy import Plan
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.traffic import Gamma, Traffic, Uniform, make_traffic
from eet_lab.serving import live, profile_passes
from eet_lab.serving.live import Look, serve_traffic, served_recipe
from eet_lab.serving.profile import profile

AXES = (0, 1, 30), (1, 4), (16, 64)
POLICY = ContinuousBatching(max_rows=4, budget=32, chunk=16)


@pytest.fixture(scope="module")
def demo() -> Model:
    return load("demo", device="cpu")


@pytest.fixture(scope="module")
def table(demo: Model) -> DecoderCost:
    recipe = "all,continuous_batching:rows=4:budget=64"
    found = profile(demo, recipe, axes=AXES, repeats=1, fresh=True)
    assert isinstance(found, DecoderCost)
    return found


def test_a_decoder_serves_everybody_and_notes_what_each_pass_reads(
    demo: Model, table: DecoderCost, heaps: list[str]
) -> None:
    traffic = make_traffic(12, Gamma(200.0), Uniform(4, 24), Uniform(1, 6), seed=3)
    looks: list[Look] = []
    served = serve_traffic(demo, traffic, POLICY, table, on_look=looks.append)
    assert [told for told, _ in groupby(heaps)] == ["frozen", "served", "thawed"]
    assert np.isfinite(served.last_ms).all() and (served.last_ms >= served.first_ms).all()
    assert (served.wait_ms >= 0).all() and (served.ttft_ms > 0).all()
    passes = served.passes
    assert passes.prompt_tokens.sum() == traffic.lengths.sum(), "each token of a prompt is read once"
    assert passes.decoded.sum() == (traffic.new_tokens - 1).sum()
    assert passes.rows.max() <= POLICY.max_rows and (passes.prompt_tokens + passes.decoded).max() <= POLICY.budget
    assert (np.diff(passes.begin_ms) > 0).all() and (passes.end_ms > passes.begin_ms).all()
    alone = traffic.new_tokens == 1
    np.testing.assert_array_equal(served.first_ms[alone], served.last_ms[alone])
    assert all(look.total == 12 and look.done <= 12 for look in looks)
    compared = agreement(simulate_traffic(traffic, POLICY, table), served)
    assert [each.name for each in compared] == [
        "throughput", "TTFT p50", "TTFT p99", "time per token p50", "time per token p99",
    ]  # fmt: skip
    assert Compared("x", "ms", 12.0, 10.0).error == pytest.approx(0.2)


def test_who_waits_for_a_slot_is_seen_to_wait(demo: Model, table: DecoderCost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy hands over everybody at once, and the engine has four slots."""
    monkeypatch.setattr(live, "LOOK_S", 0.0)
    looks: list[Look] = []
    together = Traffic(np.zeros(12), np.full(12, 8), np.full(12, 4))
    serve_traffic(demo, together, POLICY, table, on_look=looks.append)
    assert max(look.waiting for look in looks if look.running == 4) == 8 and looks[-1].waiting == 0
    assert all(look.waiting + look.running + look.done <= 12 and look.running <= 4 for look in looks)


@pytest.mark.parametrize("chunk", [8, 64])
def test_warming_up_ends_with_its_requests(
    demo: Model, table: DecoderCost, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that tells nothing is no end: it read a part of a prompt, or its tokens are on their way."""
    if chunk == 64:
        monkeypatch.setattr(slots, "open_stream", Lagging)
    traffic = make_traffic(3, Gamma(500.0), Uniform(20, 24), Uniform(3, 6), seed=3)
    served = serve_traffic(demo, traffic, ContinuousBatching(max_rows=4, budget=64, chunk=chunk), table)
    assert np.isfinite(served.last_ms).all()
    assert served.passes.prompt_tokens.sum() == traffic.lengths.sum()
    assert served.passes.decoded.sum() == (traffic.new_tokens - 1).sum()


@pytest.fixture
def heaps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """When the collector skips what is there: it would take 100 ms and more, for which nobody is served."""
    told, admit = list[str](), live._Clock.admit

    @contextmanager
    def frozen() -> Iterator[None]:
        told.append("frozen")
        yield
        told.append("thawed")

    def admitted(*args: Any, **kwargs: Any) -> None:
        told.append("served")
        admit(*args, **kwargs)

    monkeypatch.setattr(live, "frozen_heap", frozen)
    monkeypatch.setattr(live._Clock, "admit", admitted)
    return told


def test_the_recipe_served_is_the_measured_one_under_the_policys_limits(demo: Model, table: DecoderCost) -> None:
    schedule = served_recipe(demo, table, POLICY).parts.schedule
    assert (schedule.max_rows, schedule.budget, schedule.chunk, schedule.joins) == (4, 32, 16, True)


def test_stop_ends_it_within_a_pass(demo: Model, table: DecoderCost) -> None:
    traffic = make_traffic(4, Gamma(0.05), Uniform(4, 8), Uniform(2, 3))  # somebody comes every twenty seconds

    def seconds_to_stop() -> float:
        cancel, stopped_at = threading.Event(), list[float]()
        with pytest.raises(Cancelled):
            serve_traffic(
                demo,
                traffic,
                POLICY,
                table,
                on_look=lambda look: (stopped_at.append(time.monotonic()), cancel.set()),
                cancel=cancel,
            )
        return time.monotonic() - stopped_at[0]

    assert any(seconds_to_stop() < 0.5 for _ in range(3)), "the best of three: another test may have the cores"


def test_what_cannot_be_served_is_refused_before_anything_runs(demo: Model, table: DecoderCost) -> None:
    short = make_traffic(4, Gamma(50.0), Uniform(4, 8), Uniform(2, 3))
    with pytest.raises(ScheduleError, match="Choose continuous_batching"):
        serve_traffic(demo, short, TokenBudget(), table)
    with pytest.raises(ScheduleError, match="served by an engine of its own"):
        serve_traffic(demo, short, POLICY, table, engine=EncoderEngine(encoder("bert").encoder))
    with pytest.raises(CostError, match="was measured up to"):
        serve_traffic(demo, make_traffic(2, Gamma(9.0), Uniform(80, 90), Uniform(1, 2)), POLICY, table)


@pytest.mark.parametrize("policy", [NaivePadding(max_rows=3), TokenBudget(max_rows=3, budget=60)])
def test_an_encoder_serves_groups(policy: Any, heaps: list[str]) -> None:
    encoder_model = encoder("bert")
    table = profile(encoder_model, axes=((8, 32), (1, 3)), repeats=1, fresh=True)
    assert isinstance(table, EncoderCost)
    traffic = make_traffic(9, Gamma(500.0), Uniform(3, 30), Uniform(2, 6))  # as the trace of a decoder has it
    served = serve_traffic(encoder_model, traffic, policy, table)
    assert [told for told, _ in groupby(heaps)] == ["frozen", "served", "thawed"]
    compared = agreement(simulate_traffic(traffic, policy, table), served)
    assert [each.name for each in compared] == ["throughput", "TTFT p50", "TTFT p99"]
    assert all(np.isfinite(each.error) for each in compared)
    assert np.isfinite(served.last_ms).all() and served.passes.rows.sum() == 9
    assert served.passes.prompt_tokens.sum() == traffic.lengths.sum()
    assert bool(served.passes.pads.sum()) != policy.is_packed
    recipe = served_recipe(encoder_model, table, policy)
    engine = EncoderEngine(encoder_model.encoder, recipe.parts)
    assert np.isfinite(serve_traffic(encoder_model, traffic, policy, table, engine=engine).last_ms).all()
    assert engine.activation_bytes > 0, "it is the one that has served"
    for other, why in (
        (EncoderEngine(encoder_model.encoder), "other parts than"),
        (EncoderEngine(encoder("roberta").encoder, recipe.parts), "other weights than"),
    ):
        with pytest.raises(ScheduleError, match=why):
            serve_traffic(encoder_model, traffic, policy, table, engine=other)
    names = [technique.name for technique in recipe]
    assert ("packed_prefill" in names) == policy.is_packed


def test_the_groups_of_a_plan_are_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is launched before the one in front of it has come, and the policy is asked when all have."""
    plans = list[list[int]]()

    class TwoByTwo(NaivePadding):
        def next(self, waiting: Any, now_ms: float, costs: Any) -> Any:
            taken = [*waiting]
            plans.append([each.number for each in taken])
            seen.append(("planned", len(plans)))
            return Plan([taken[at : at + 2] for at in range(0, len(taken), 2)])

    model = encoder("bert")
    table = encoder_cost(lambda length, batch: 1.0, (1, 32), (1, 4))
    table = replace(table, source=replace(table.source, recipe="pre_padding"))
    traffic = Traffic(np.array([0.0] * 5 + [30.0]), np.array([3, 9, 4, 4, 7, 5]), np.ones(6, int))
    seen = passes_that_are_late(monkeypatch)
    served = serve_traffic(model, traffic, TwoByTwo(), table)
    del seen[: seen.index(("planned", 1))]  # the warm-up
    assert [what for what, _ in seen[:5]] == ["planned", "launched", "launched", "launched", "come"]
    assert [len(plan) for plan in plans] == [5, 1]
    last = [at for at, what in enumerate(seen) if what[0] == "planned"][1]
    assert [what for what, _ in seen[:last]].count("come") == 3, "all of the first plan have come"
    passes = served.passes
    assert passes.rows.tolist() == [2, 2, 1, 1] and passes.pads.tolist() == [6, 0, 0, 0]
    assert passes.prompt_tokens.tolist() == [12, 8, 7, 5]
    assert (passes.begin_ms[1:] >= passes.end_ms[:-1]).all() and (passes.end_ms > passes.begin_ms).all()
    np.testing.assert_array_equal(served.last_ms, passes.end_ms[[0, 0, 1, 1, 2, 3]])
    assert (served.wait_ms >= 0).all()


def test_a_full_group_is_launched_while_those_before_it_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that others may still join is not, until nothing else is computed."""
    model, rows = encoder("bert"), 2
    table = encoder_cost(lambda length, batch: 1.0, (1, 32), (1, 4))
    table = replace(table, source=replace(table.source, recipe="pre_padding"))
    traffic = Traffic(np.zeros(7), np.array([3, 9, 4, 4, 7, 5, 2]), np.ones(7, int))
    seen = passes_that_are_late(monkeypatch)
    monkeypatch.setattr("eet_lab.serving.live.warm_up_encoder", lambda *args: None)
    served = serve_traffic(model, traffic, NaivePadding(max_rows=rows), table)
    come = ("come", 0), ("come", 1), ("come", 2)
    assert seen == [*(("launched", at) for at in range(3)), *come, ("launched", 3), ("come", 3)]
    assert served.passes.rows.tolist() == [2, 2, 2, 1] and np.isfinite(served.last_ms).all()


def test_a_full_plan_of_nobody_waits_until_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneByOne(NaivePadding):
        def next(self, waiting: Any, now_ms: float, costs: Any) -> Any:
            asked.append(len(seen))
            busy = [what for what, _ in seen].count("launched") > [what for what, _ in seen].count("come")
            return Plan([] if busy else [[next(iter(waiting))]], is_full=True)

    model, asked = encoder("bert"), list[int]()
    table = encoder_cost(lambda length, batch: 1.0, (1, 32), (1, 4))
    table = replace(table, source=replace(table.source, recipe="pre_padding"))
    seen = passes_that_are_late(monkeypatch)
    monkeypatch.setattr("eet_lab.serving.live.warm_up_encoder", lambda *args: None)
    served = serve_traffic(model, Traffic(np.zeros(3), np.array([3, 9, 4]), np.ones(3, int)), OneByOne(), table)
    assert served.passes.rows.tolist() == [1, 1, 1] and len(asked) < 9


def test_rows_that_are_measured_see_different_columns(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    add = profile_passes.Engine.add

    def noted(engine: Any, prompt: Any, settings: Any = None, **more: Any) -> Any:
        if settings.max_new_tokens > 1:
            seen.append(len(prompt))
        return add(engine, prompt, settings, **more)

    monkeypatch.setattr(profile_passes.Engine, "add", noted)
    profile(demo, "all,continuous_batching:rows=4:budget=64", axes=((0, 1), (4,), (64,)), repeats=1, fresh=True)
    assert len(set(seen[:4])) == 4 and len(set(seen[4:])) == 3, (
        "attention takes rows of as many columns together, which no server has"
    )
