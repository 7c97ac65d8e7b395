"""Lesson 7: what is drawn and said is what the simulator found, the paper's example is exact, exercises explain."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from eet_lab.figures.serving import in_words
from eet_lab.lessons import batching_exercises as exercises
from eet_lab.lessons import recorded
from eet_lab.lessons import serving_recorded as runs
from eet_lab.lessons import variable_length_serving as lesson
from eet_lab.lessons.prediction import Prediction
from eet_lab.scheduling.dynamic_program import FIGURE_8_LENGTHS
from eet_lab.scheduling.policies import TokenBudget
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.traffic import Traffic
from eet_lab.words import brief, percent


def guessed() -> Prediction:
    guess = lesson.predict()
    guess.value = "later"
    return guess


WAITING = (lesson.naive, lesson.policies, lesson.loads, lesson.continuous, lesson.ignored)


@pytest.mark.parametrize("show", WAITING)
def test_nothing_is_shown_before_the_prediction(show: Any) -> None:
    [place] = show(lesson.predict()).things
    assert "Predict first" in str(place.outputs) and "ms" not in str(place.outputs)
    assert len(show(guessed()).things) > 1


def test_naive_batching_loses_to_none() -> None:
    alone, naive = (lesson.served(name, lesson.LOAD) for name in (lesson.NONE, lesson.NAIVE))
    assert naive.percentiles["e2e_ms"]["p50"] > 10 * alone.percentiles["e2e_ms"]["p50"]
    assert naive.busy > 0.98 > alone.busy, "the texts say that one of them is always busy"
    guess = lesson.predict()
    halves = [f"{brief(run.percentiles['e2e_ms']['p50'])} ms" for run in (alone, naive)]
    assert guess._reveal.startswith("Later: ") and all(half in guess._reveal for half in halves)
    fig, words = lesson.naive(guessed()).things
    assert (
        fig.layout.annotations[1].text == f"Naive padding: {in_words(naive)}"
        and f"{percent(naive.waste)} of all" in words
    )


def test_figure_8_is_exact() -> None:
    fig, words = lesson.figure_8().things
    assert "take 20.62 ms" in words and "15.24 ms" in words
    assert "242 and 328 requests a second" in words and "48.5 and 65.6 a second" in words
    [alone, program] = [trace for trace in fig.data if trace.name == "prompts"]
    assert list(alone.text) == [str(length) for length in FIGURE_8_LENGTHS]
    assert list(program.text) == ["52 + 63", "17 + 18", "77"]
    assert program.x[-1] + program.width[-1] / 2 == pytest.approx(15.24, abs=1e-4)
    assert alone.x[-1] + alone.width[-1] / 2 == pytest.approx(20.62, abs=1e-4)


def test_what_is_said_of_policies_is_so() -> None:
    shown, fig, words = lesson.policies(guessed()).things
    assert shown.data.count("<tr>") == 1 + 2 * len(lesson.POLICIES)
    program, packed = (lesson.served(name, lesson.HEAVY) for name in (lesson.PROGRAM, lesson.PACKED))
    assert (
        packed.waste == 0 < program.waste and packed.percentiles["e2e_ms"]["p99"] < program.percentiles["e2e_ms"]["p99"]
    )
    assert f"{brief(program.percentiles['e2e_ms']['p50'])} ms by the dynamic program" in words
    assert len({axis.range for axis in fig.select_xaxes()}) == 1


def test_what_a_batch_saves_is_told_by_the_table() -> None:
    cost = lesson.example()
    *_, words = lesson.costs().things
    for length in (cost.lengths[0], cost.lengths[-1]):
        saved = 1 - cost.at(length, cost.batches[-1]) / cost.batches[-1] / cost.at(length, 1)
        assert f"batch saves {percent(saved)}" in words


def test_latency_turns_up_in_the_order_that_is_told() -> None:
    last = {
        name: sum(point.times["e2e_ms"]["p99"] <= lesson.LIMIT_MS for point in points)
        for name, points in lesson.swept().items()
    }
    assert last[lesson.NAIVE] < last[lesson.NONE] <= last[lesson.PROGRAM] < last[lesson.PACKED]
    assert (
        f"Packed {brief(lesson.swept()[lesson.PACKED][last[lesson.PACKED] - 1].rate)}."
        in lesson.loads(guessed()).things[1]
    )
    lowest = [points[0].times["e2e_ms"]["p50"] for points in lesson.swept().values()]
    assert max(lowest) < 1.1 * min(lowest), "with little to do, all are the same"


def test_the_gpus_rows_are_of_one_run_in_the_order_that_is_told() -> None:
    where, shown, _ = lesson.on_the_h200().things
    assert "NVIDIA H200" in where.data
    places = [shown.data.index(each) for each in ("transformers, padded", "transformers, sorted", "packed prefill")]
    assert places == sorted(places)


def test_answers_come_sooner_where_requests_join() -> None:
    groups, joining = map(lesson.answered, lesson.ANSWERING)
    for key in ("ttft_ms", "e2e_ms"):
        assert joining.percentiles[key]["p50"] < groups.percentiles[key]["p50"]
    where, fig, _, words = lesson.continuous(guessed()).things
    assert "Not this machine" in where.data and {trace.name for trace in fig.data} >= {"prompts", "decode"}
    assert re.search(r"The median time per token is \d[\d.]* % longer", words), "which the words give a reason for"


def test_only_the_policy_that_is_not_in_the_lab_starves() -> None:
    starved = lesson.shortest_first()
    packed = lesson.served(lesson.PACKED, lesson.OVER)
    others = [lesson.served(name, lesson.OVER) for name in lesson.POLICIES if name != lesson.NAIVE]
    assert lesson.in_time(starved) > max(map(lesson.in_time, others)), "more than all others"
    assert lesson.by_length(starved)[1] > 5 * lesson.by_length(packed)[1]
    assert f"{packed.e2e_ms.max() / 1e3:.1f}" in lesson.ignored(guessed()).things[1]
    for name in lesson.POLICIES:
        calm, bursts = (lesson.served(name, lesson.LOAD, cv) for cv in (1.0, lesson.BURSTS))
        assert lesson.in_time(bursts) < lesson.in_time(calm)


def test_the_kernels_are_told_by_their_rows() -> None:
    found = lesson.row_kernels()
    assert all({*lesson.ROWS_AT_ONCE} <= of.keys() and len(of) == 4 for of in found.values())
    where, shown, words = lesson.kernels().things
    assert "NVIDIA H200" in where.data and shown.data.count("<tr>") == 1 + len(found)
    wins = 0
    for op, of in found.items():
        one, two, four = (of[name].total_ms.p50 for name in lesson.ROWS_AT_ONCE)  # type: ignore[union-attr]
        wins += min(two, four) < one
        torch = of[f"torch-{op.partition('/')[0]}"].total_ms
        assert torch and torch.p50 > one
    assert f"in {wins} of {len(found)} sizes" in words
    assert all(row in recorded.rows() for of in found.values() for row in of.values())


# --- exercises


def brute_force(lengths: tuple[int, ...], cost: exercises.Cost, most: int) -> float:
    """The least over all partitions into sets, neighbours in length or not."""
    if not lengths:
        return 0.0
    first, rest = lengths[0], lengths[1:]
    best = float("inf")
    for size in range(min(most, len(lengths))):
        for others in combinations(range(len(rest)), size):
            group = [first, *(rest[at] for at in others)]
            left = tuple(length for at, length in enumerate(rest) if at not in others)
            best = min(best, cost(max(group), len(group)) + brute_force(left, cost, most))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_first_solution_is_the_best_of_all_partitions(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = tuple(map(int, draw.integers(1, 300, int(draw.integers(1, 8)))))
    for cost in (exercises.flat_cost, exercises.steep_cost, exercises.fitted_cost):
        for most in (1, 3, 8):
            assert exercises.cheapest(lengths, cost, most) == pytest.approx(brute_force(lengths, cost, most))


@pytest.mark.parametrize("budget", [64, 100, 256])
def test_the_second_solution_packs_as_the_policy_does(budget: int) -> None:
    lengths = np.random.default_rng(budget).integers(1, 64, 30)
    traffic = Traffic(np.zeros(30), lengths, np.ones(30, int))
    policy = TokenBudget(budget=budget, max_rows=64)
    served = simulate_traffic(traffic, policy, lesson.example())
    assert exercises.pads_and_passes(lengths.tolist(), 8, budget)[1] == len(served.passes)


def test_policies_on_gpus_are_those_that_were_recorded() -> None:
    found = recorded.kept("h100-policies-bert-base")["found"]
    where, fig, shown, said = runs.policies_on_gpus().things
    assert "H100" in where.data and "H200" in where.data and "2026-11-2" in where.data
    bars = {(bar.name, len(bar.x)): list(bar.y) for bar in fig.data if bar.xaxis == "x2"}
    rates = found["U[2,100]"]
    assert bars["measured", 4] == pytest.approx([each["measured_per_s"] for each in rates.values()], rel=1e-3)
    program, padded = (rates[name]["measured_per_s"] for name in ("dynamic_program", "naive_padding"))
    assert f" {program / padded:.1f} times naive padding" in said.replace("and ", " ") and program > padded
    assert "not in time at 2,056" in shown.data and "not run" in shown.data
    assert brief(rates["token_budget"]["measured_per_s"]) in shown.data


def test_the_simulation_of_a_decoder_is_told_with_its_worst_error() -> None:
    agreed = [each["agreement"] for each in recorded.kept("h100-simulated-llama-1b")["found"].values()]
    worst = max(abs(number["error"]) for numbers in agreed for number in numbers.values())
    where, shown, said, *_ = runs.simulated_on_gpus().things
    assert "H100" in where.data and "chunk 256" in shown.data and f"at most {100 * worst:.0f} % off" in said


def test_what_chunks_bring_beside_documents_is_told_as_it_was_measured() -> None:
    found = recorded.kept("h100-simulated-documents-llama-1b")["found"]
    whole, chunked = (each["measured"]["ttft_ms"] for each in found.values())
    *_, where, shown, said, _ = runs.simulated_on_gpus().things
    assert "one of 200 of 8,000 tokens" in where.data and "chunk 512" in shown.data
    assert f"within {brief(whole['p95'])} ms, or {brief(chunked['p95'])}" in said and chunked["p95"] < whole["p95"]
    assert f"after {brief(chunked['p99'])} ms with chunks instead of {brief(whole['p99'])}" in said
    assert chunked["p99"] < whole["p99"]


def test_how_far_the_simulator_is_off_beside_documents_is_told() -> None:
    """The worst errors of all that is shown are in the table and in the words."""
    found = recorded.kept("h100-simulated-documents-llama-1b")["found"]
    *_, shown, _, said = runs.simulated_on_gpus().things
    for each in found.values():
        for name in ("TTFT p99", "time per token p99"):
            off = f"{-100 * each['agreement'][name]['error']:.0f} %"
            assert f"−{off}" in shown.data and f" {off}" in said
