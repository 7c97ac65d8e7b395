"""The simulator: whom it serves when, by every policy, and what the results say."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from cost_tables import TOY_DECODER, TURBO_2060, decoder_cost, encoder_cost
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eet_lab.errors import Cancelled, CostError, PromptError, ScheduleError
from eet_lab.scheduling import PageLedger, Schedule, Scheduler, SharedPageLedger
from eet_lab.scheduling.generating import Generating
from eet_lab.scheduling.policies import (
    POLICIES,
    ContinuousBatching,
    NaivePadding,
    NoBatching,
    TokenBudget,
    parse_policy,
)
from eet_lab.scheduling.policy import BasePolicy, Plan
from eet_lab.scheduling.served import Served, percentiles
from eet_lab.scheduling.simulate import simulate
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.traffic import Gamma, Traffic, Uniform, make_traffic

ENCODE = [name for name, kind in POLICIES.items() if "encode" in kind.stages]
FLAT = encoder_cost(lambda length, batch: 10.0)
STEP = decoder_cost(lambda extra, rows, kv: 1.0)


def traffic_of(*requests: tuple[float, int, int]) -> Traffic:
    at, lengths, new = (np.array(column) for column in zip(*requests, strict=True))
    return Traffic(at.astype(float), lengths, new)


def test_one_by_one_is_a_queue_with_one_server():
    """Against Lindley's recursion, for every wait."""
    traffic = make_traffic(3000, Gamma(250, 2.0), Uniform(2, 100))
    served = simulate_traffic(traffic, NoBatching(), TURBO_2060)
    wait, waits, took = 0.0, [], [TURBO_2060.at(length, 1) for length in traffic.lengths.tolist()]
    for gap, before in zip(np.diff(traffic.arrival_ms, prepend=0), [0.0, *took[:-1]], strict=True):
        wait = max(wait + before - gap, 0.0)
        waits.append(wait)
    assert served.wait_ms == pytest.approx(np.array(waits), abs=1e-6)
    assert served.e2e_ms == pytest.approx(np.array(waits) + took, abs=1e-6)
    assert served.busy == pytest.approx(sum(took) / 1e3 / served.span_s)


def test_those_who_come_meanwhile_share_the_next_pass():
    traffic = traffic_of((0, 30, 1), (1, 8, 1), (9, 20, 1), (10, 64, 1), (35, 5, 1))
    served = simulate_traffic(traffic, NaivePadding(), FLAT)
    assert served.start_ms.tolist() == [0, 10, 10, 10, 35]
    assert served.last_ms.tolist() == [10, 20, 20, 20, 45]
    passes = served.passes
    assert passes.rows.tolist() == [1, 3, 1] and passes.prompt_tokens.tolist() == [30, 92, 5]
    assert passes.pads.tolist() == [0, 3 * 64 - 92, 0] and served.waste == 100 / (127 + 100)
    assert served.queued(np.array([0, 5, 9.5, 10, 40])).tolist() == [0, 1, 2, 0, 0]
    assert simulate_traffic(traffic, TokenBudget(), FLAT).passes.pads.tolist() == [0, 0, 0]


def test_lazy_begins_at_its_deadline_or_when_enough_have_come():
    policy = parse_policy("dynamic_program:trigger=lazy:wait_ms=7:max_rows=3")
    served = simulate_traffic(traffic_of((0, 8, 1), (2, 8, 1), (50, 8, 1), (51, 8, 1), (52, 8, 1)), policy, FLAT)
    assert served.start_ms.tolist() == [7, 7, 52, 52, 52]


def test_a_decoder_s_group_runs_until_its_last_answer_is_complete():
    """A pass takes 1 ms: prompts are read in one, and tell the first token."""
    served = simulate_traffic(traffic_of((0, 8, 2), (0, 20, 5), (1, 9, 1)), NaivePadding(), STEP)
    assert served.first_ms.tolist() == [1, 1, 6] and served.last_ms.tolist() == [2, 5, 6]
    assert served.passes.rows.tolist() == [2, 2, 1, 1, 1, 1] and served.passes.pads.tolist() == [12, 0, 0, 0, 0, 0]
    assert served.passes.decoded.tolist() == [0, 2, 1, 1, 1, 0]
    assert served.tpot_ms.tolist()[:2] == [1, 1] and np.isnan(served.tpot_ms[2])
    assert set(served.percentiles) == {"ttft_ms", "tpot_ms", "e2e_ms"}


@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize("name", [name for name, kind in POLICIES.items() if "generate" in kind.stages])
@given(requests=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=25))
@settings(max_examples=50)
def test_steps_that_are_not_planned_are_those_of_the_scheduler(name, ahead, requests):
    """To the bit, and of a long answer's steps only the first and the last are planned."""
    cost = decoder_cost(lambda extra, rows, kv: 1 + 0.1 * extra + 0.3 * rows + 0.01 * kv)
    if ahead:
        cost = replace(cost, ahead=ahead, host=decoder_cost(lambda extra, rows, kv: 0.4 + 0.1 * rows).times)
    policy, traffic = parse_policy(name, {"max_rows": 3, "budget": 6, "chunk": 4}), traffic_of(*sorted(requests))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generating, "_look_ahead", lambda self: None)
        planned = simulate_traffic(traffic, policy, cost)
    served = simulate_traffic(traffic, policy, cost)
    for name in ("start_ms", "first_ms", "last_ms"):
        np.testing.assert_array_equal(getattr(served, name), getattr(planned, name))
    for name, column in vars(planned.passes).items():
        np.testing.assert_array_equal(getattr(served.passes, name), column)


def test_a_long_answer_is_planned_at_its_ends(monkeypatch):
    planned, next_rows = [], Scheduler.next
    monkeypatch.setattr(Scheduler, "next", lambda self: planned.append(1) or next_rows(self))
    for policy in (NoBatching(), ContinuousBatching()):
        planned.clear()
        served = simulate_traffic(traffic_of((0, 5, 60)), policy, STEP)
        assert len(served.passes) == 60 and served.last_ms.tolist() == [60.0] and len(planned) == 2


def test_with_continuous_batching_requests_join_and_leave():
    served = simulate_traffic(traffic_of((0, 8, 2), (0, 20, 5), (1, 9, 1)), ContinuousBatching(), STEP)
    assert served.first_ms.tolist() == [1, 1, 2] and served.last_ms.tolist() == [2, 5, 2]
    assert served.passes.rows.tolist() == [2, 3, 1, 1, 1]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=25),
    st.tuples(st.integers(1, 5), st.integers(5, 40), st.integers(1, 30)),
)
@example([(19, 2, 0), (1, 1, 1), (1, 1, 0)], (3, 19, 19))
def test_warped_time_runs_the_very_passes_of_the_scheduler(requests, knobs):
    """With passes of 1 ms, the simulator's passes are those of `simulate`, which knows no time."""
    rows, budget, chunk = knobs
    arrivals = np.cumsum([gap for *_, gap in requests])
    plain = simulate(
        [(p, n) for p, n, _ in requests], Schedule(chunk, budget, rows, joins=True), arrivals=arrivals.tolist()
    )
    traffic = traffic_of(*((at, p, n) for (p, n, _), at in zip(requests, arrivals, strict=True)))
    served = simulate_traffic(traffic, ContinuousBatching(rows, budget, chunk), STEP)
    busy = [rows for rows in plain.passes if rows]
    assert served.passes.rows.tolist() == [len(rows) for rows in busy]
    assert (served.passes.prompt_tokens + served.passes.decoded).tolist() == [
        sum(r.count for r in rows) for rows in busy
    ]
    told = [plain.told(number) for number in range(len(requests))]
    assert served.first_ms.tolist() == [passes[0] + 1 for passes in told]
    assert served.last_ms.tolist() == [passes[-1] + 1 for passes in told]


REQUESTS = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20), st.floats(0, 30)), min_size=1, max_size=60).map(
    lambda rows: traffic_of(*zip(np.cumsum([gap for *_, gap in rows]), *list(zip(*rows, strict=True))[:2], strict=True))
)
WORDS = [
    *POLICIES,
    "dynamic_program:trigger=lazy:wait_ms=9:max_rows=4",
    "length_buckets:window=3",
    "token_budget:budget=9",
]


@settings(max_examples=60)
@given(REQUESTS, st.sampled_from(WORDS), st.booleans())
def test_every_request_is_served_once_and_in_order_of_time(traffic, words, decodes):
    policy = parse_policy(words)
    if not decodes and "encode" not in policy.stages:
        return
    served = simulate_traffic(traffic, policy, TOY_DECODER if decodes else TURBO_2060)
    times = np.array([traffic.arrival_ms, served.start_ms, served.first_ms, served.last_ms])
    assert np.isfinite(times).all() and (np.diff(times, axis=0) >= 0).all()
    assert (served.start_ms < served.first_ms).all()
    passes = served.passes
    assert passes.prompt_tokens.sum() == traffic.lengths.sum()
    assert passes.decoded.sum() == ((traffic.new_tokens - 1).sum() if decodes else 0)
    assert (passes.begin_ms[1:] >= passes.end_ms[:-1]).all() and (passes.end_ms > passes.begin_ms).all()
    again = simulate_traffic(traffic, policy, TOY_DECODER if decodes else TURBO_2060)
    assert (again.last_ms == served.last_ms).all(), "the same traffic, the same times"


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("decodes", [False, True], ids=["encoder", "decoder"])
def test_nobody_starves_under_a_load_below_one(words, decodes):
    """Four times the traffic makes no longer waits, neither at the end of it nor for the unluckiest."""
    policy = parse_policy(words)
    if not decodes and "encode" not in policy.stages:
        pytest.skip("for decoders alone")
    table, rate, lengths, answers = TURBO_2060, 60, Uniform(5, 500), Uniform(1, 1)
    if decodes:
        table, rate, lengths, answers = TOY_DECODER, 100, Uniform(5, 200), Uniform(1, 12)
    short, long = (
        simulate_traffic(make_traffic(num, Gamma(rate), lengths, answers), policy, table) for num in (800, 3200)
    )
    assert 0.2 < long.busy < 0.9 and long.wait_ms.max() < 3 * short.wait_ms.max() + 100
    half = len(long.traffic) // 2
    assert long.wait_ms[half:].mean() < 2 * long.wait_ms[:half].mean() + 10


def test_naive_batching_of_mixed_lengths_loses_to_none_and_packing_wins():
    """TurboTransformers' motivation, on a table like its own: BERT-base on an RTX 2060, U[5,500], 120 a second."""
    traffic = make_traffic(20_000, Gamma(120), Uniform(5, 500))
    served = {name: simulate_traffic(traffic, parse_policy(name, {"max_rows": 20}), TURBO_2060) for name in ENCODE}
    p99 = {name: each.percentiles["e2e_ms"]["p99"] for name, each in served.items()}
    assert served["naive_padding"].requests_per_s == pytest.approx(86, abs=3), "it cannot keep up"
    assert served["no_batching"].requests_per_s > 119
    assert p99["naive_padding"] > 10_000 > p99["no_batching"] > p99["dynamic_program"] > p99["token_budget"]
    assert p99["dynamic_program"] < p99["length_buckets"]
    assert served["token_budget"].waste == 0 and served["naive_padding"].waste > 0.4


def test_who_comes_waits_for_the_passes_that_the_device_was_given():
    """Which are none without passes ahead, one of long ones, and as many as take 4 ms of short ones."""
    policy = ContinuousBatching(max_rows=4, budget=64, chunk=64)
    for ahead, pass_ms, first in ((0, 10, 20), (8, 10, 30), (8, 4, 12), (8, 2, 6), (2, 1, 6), (8, 1, 8)):
        traffic = traffic_of((0, 4, 20), (2.5 if pass_ms == 1 else pass_ms / 2, 4, 2), (50 * pass_ms, 4, 1))
        table = replace(decoder_cost(lambda extra, rows, kv, pass_ms=pass_ms: float(pass_ms)), ahead=ahead)
        served = simulate_traffic(traffic, policy, table)
        assert served.first_ms.tolist() == [pass_ms, first, 51 * pass_ms], (ahead, pass_ms)
        assert served.last_ms.tolist() == [20 * pass_ms, first + pass_ms, 51 * pass_ms]
    with pytest.raises(CostError, match="ahead is -1"):
        replace(table, ahead=-1)


def test_the_host_launches_the_next_pass_while_the_device_computes():
    """The device does not wait for a quick host; a pass of a slow one ends no sooner than its launch."""
    traffic, policy = traffic_of((0, 4, 4)), ContinuousBatching(max_rows=4, budget=64, chunk=64)
    table = replace(decoder_cost(lambda extra, rows, kv: 10.0), ahead=2)
    for host, begin, first, last in ((4.0, [0, 10, 20, 30], 10, 40), (15.0, [0, 15, 30, 45], 15, 60)):
        of_host = decoder_cost(lambda extra, rows, kv, host=host: host).times
        served = simulate_traffic(traffic, policy, replace(table, host=of_host))
        assert served.passes.begin_ms.tolist() == begin
        assert served.first_ms.tolist() == [first] and served.last_ms.tolist() == [last]
    with pytest.raises(CostError, match="time along the axis"):
        replace(table, host=of_host[:1])


def test_pages_that_run_out_make_the_newest_give_way():
    traffic = traffic_of(*[(0, 30, 30)] * 4)
    ledger = PageLedger(num_pages=1 + 12, page=16, num_slots=4)
    served = simulate_traffic(traffic, ContinuousBatching(max_rows=4), STEP, ledger=ledger)
    assert served.preempted > 0 and np.isfinite(served.last_ms).all()
    assert simulate_traffic(traffic, ContinuousBatching(max_rows=4), STEP).preempted == 0
    with pytest.raises(PromptError, match="KV cache"):
        simulate_traffic(traffic, ContinuousBatching(max_rows=4), STEP, ledger=PageLedger(3, 16, 4))


def test_prompts_of_unrelated_requests_share_no_pages():
    traffic, policy, ledger = traffic_of(*[(0, 40, 5)] * 4), ContinuousBatching(max_rows=2), SharedPageLedger(99, 16, 2)
    served = simulate_traffic(traffic, policy, STEP, ledger=ledger)
    assert ledger.num_queries == 160 and ledger.num_hits == 0
    assert served.last_ms.tolist() == simulate_traffic(traffic, policy, STEP).last_ms.tolist()


class Deaf(BasePolicy):
    """Serves nobody."""

    name, title, stages = "deaf", "Deaf", ("encode", "generate")

    def next(self, waiting, now_ms, costs):
        return Plan([])


class Sleepy(Deaf):
    def next(self, waiting, now_ms, costs):
        return Plan([], now_ms)


class Twice(Deaf):
    def next(self, waiting, now_ms, costs):
        return Plan([[*waiting], [*waiting]])


class Nobody(Deaf):
    def next(self, waiting, now_ms, costs):
        return Plan([[]])


@pytest.mark.parametrize("table", [TURBO_2060, TOY_DECODER], ids=["encoder", "decoder"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [(Deaf, "they starve"), (Sleepy, "they starve"), (Twice, "does not wait"), (Nobody, "to nobody")],
)
def test_a_policy_of_one_s_own_that_is_wrong_is_told(kind, says, table):
    with pytest.raises(ScheduleError, match=says):
        simulate_traffic(traffic_of((0, 5, 1), (3, 5, 1)), kind(), table)


def test_what_the_table_does_not_hold_is_told_before_any_work():
    with pytest.raises(CostError, match="longest request has 600 tokens, but toy was measured up to 512"):
        simulate_traffic(traffic_of((0, 600, 1)), NoBatching(), TURBO_2060)
    with pytest.raises(CostError, match="longest request has 1,040 tokens"):
        simulate_traffic(traffic_of((0, 40, 1000)), NoBatching(), TOY_DECODER)
    with pytest.raises(CostError, match="30 texts"):
        simulate_traffic(traffic_of(*[(0, 5, 1)] * 30), NaivePadding(max_rows=30), TURBO_2060)
    with pytest.raises(ScheduleError, match="continuous_batching is not for an encoder"):
        simulate_traffic(traffic_of((0, 5, 1)), ContinuousBatching(), TURBO_2060)
    with pytest.raises(ScheduleError, match="only a policy that joins"):
        simulate_traffic(traffic_of((0, 5, 1)), NoBatching(), TOY_DECODER, ledger=PageLedger(9, 16, 4))


def test_goodput_counts_those_within_all_limits():
    served = simulate_traffic(traffic_of((0, 8, 2), (0, 20, 5), (1, 9, 1)), NaivePadding(), STEP)
    assert served.span_s == 0.006
    assert served.goodput() == pytest.approx(3 / 0.006) == pytest.approx(served.requests_per_s)
    assert served.goodput(e2e_ms=2) == pytest.approx(1 / 0.006)
    assert served.goodput(ttft_ms=1, tpot_ms=0.5) == 0 and served.goodput(tpot_ms=1) == served.goodput()


def test_percentiles_of_few():
    assert percentiles([]) == {} and percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert percentiles(range(101)) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def test_it_tells_of_its_progress_and_stops():
    traffic, told, stop = make_traffic(5000, Gamma(100), Uniform(1, 9)), [], threading.Event()
    simulate_traffic(traffic, NoBatching(), TURBO_2060, progress=lambda *step: told.append(step))
    assert told and told[-1][1:] == (5000, "requests") and [done for done, *_ in told] == sorted(d for d, *_ in told)
    stop.set()
    with pytest.raises(Cancelled):
        simulate_traffic(traffic, NoBatching(), TURBO_2060, cancel=stop)


@pytest.mark.slow
def test_a_million_requests_take_seconds():
    """4 to 17 s by policy on a core of 2026; here the quickest of them, which decides less often."""
    traffic = make_traffic(1_000_000, Gamma(500), Uniform(2, 100))
    start = time.thread_time()
    served: Served = simulate_traffic(traffic, NaivePadding(max_rows=20), TURBO_2060)
    assert time.thread_time() - start < 60 and served.requests_per_s > 490
