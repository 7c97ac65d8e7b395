"""Noise and drift are no effect, and an effect is found: the statistics, on numbers, without timing anything."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from random import Random
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.bench import timing
from eet_lab.bench.measured import TIMES
from eet_lab.bench.paired import CUT_PAIRS, DETAILS, LEAST_PAIRS, LEVEL, Change, left_off, median_interval, memory_words
from eet_lab.bench.timing import MOST_ROUNDS, Rounds, Series, Tally, in_turn, ready

times = st.floats(0.01, 1e5)
pairs = st.lists(st.tuples(times, times), min_size=1, max_size=40)


def drifted(num_pairs: int, effect: float, pace: Callable[[int], float]) -> Change:
    """`effect` times as long for B, in the order of a comparison, on a machine whose `pace` changes from run to run."""
    taken: dict[str, list[float]] = {"a": [], "b": []}
    run = 0
    for number in range(num_pairs):
        for name in "ab"[:: -1 if number % 2 else 1]:
            taken[name].append(100 * (effect if name == "b" else 1) * pace(run))
            run += 1
    change = Change.of(taken["a"], taken["b"])
    assert change is not None
    return change


DRIFTS = {
    "steady": lambda run: 1,
    "linear": lambda run: 1 + 0.01 * run,
    "faster and faster": lambda run: 2 - 0.01 * run,
    "a step between rounds": lambda run: 1 if run < 6 else 1.5,
    "a step within a round": lambda run: 1 if run < 7 else 1.5,
    "one slow run": lambda run: 5 if run == 4 else 1,
    "whoever is second finds warm caches": lambda run: 0.985 if run % 2 else 1,
    "two slow runs": lambda run: 5 if run in (3, 8) else 1,
}


@pytest.mark.parametrize("num_pairs", [6, 8, 9, 12, 20])
@pytest.mark.parametrize("drift", DRIFTS)
def test_a_drifting_clock_is_no_effect(drift, num_pairs):
    noise = Random(num_pairs)
    change = drifted(num_pairs, 1, lambda run: DRIFTS[drift](run) * math.exp(noise.gauss(0, 0.005)))
    assert change.verdict == "cannot tell apart" and not change.is_told
    assert change.kind == "dim"
    assert "cannot tell apart" in change.words("total_ms")


def test_who_fails_is_left_out_without_importing_a_compiler(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setitem(vars(torch), "_dynamo", None)
    made, remarks = ready({"a": lambda: 1, "b": lambda: 1 // 0, "c": lambda: 3}, (), 1, Tally(6, None), None)
    assert made == {"a": 1, "c": 3} and remarks[0].startswith("b failed: ZeroDivisionError: ")


def test_in_blocks_the_same_drift_would_be_one():
    """What interleaving is for: the runs of B after those of A, on a machine that slows down."""
    runs = [100 * (1 + 0.01 * run) for run in range(16)]
    blocks = Change.of(runs[:8], runs[8:])
    assert blocks is not None and blocks.verdict == "worse"


@pytest.mark.parametrize("drift", ["steady", "linear", "faster and faster", "a step between rounds"])
def test_five_percent_are_found_in_a_drift(drift):
    noise = Random(1)
    for effect, verdict in ((1.05, "worse"), (1 / 1.05, "better")):
        change = drifted(10, effect, lambda run: DRIFTS[drift](run) * math.exp(noise.gauss(0, 0.003)))
        assert change.verdict == verdict
        assert change.ratio == pytest.approx(effect, rel=0.01)


def test_five_percent_are_found_beside_slow_runs_once_there_are_pairs_enough():
    """Of 16 pairs the two at either end do not count; of six all do."""
    for name in ("one slow run", "two slow runs"):
        assert drifted(16, 1.05, DRIFTS[name]).verdict == "worse"
        assert drifted(6, 1.05, DRIFTS[name]).verdict == "cannot tell apart"


def test_what_is_too_small_to_be_a_techniques_effect_is_none():
    for effect, verdict in ((1.017, "cannot tell apart"), (1.029, "cannot tell apart"), (1.031, "worse")):
        assert drifted(20, effect, lambda run: 1).verdict == verdict


@given(pairs)
def test_swapping_the_two_turns_everything_round(found):
    a, b = (list(series) for series in zip(*found, strict=True))
    there, back = Change.of(a, b), Change.of(b, a)
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.low == pytest.approx(1 / back.high)
    opposite = {"better": "worse", "worse": "better", "cannot tell apart": "cannot tell apart"}
    assert there.verdict == opposite[back.verdict]


@given(pairs, st.booleans())
def test_ms_and_ratio_never_disagree(found, more_is_better):
    a, b = (list(series) for series in zip(*found, strict=True))
    change = Change.of(a, b, more_is_better)
    low, middle, high = change.delta
    assert low <= middle <= high
    assert middle == change.after - change.before == median(b) - median(a)
    assert change.low <= change.ratio <= change.high
    if change.verdict == "cannot tell apart":
        assert len(found) < LEAST_PAIRS or low <= 0 <= high or change.is_doubtful
    else:
        is_more = low > 0
        assert is_more or high < 0
        assert is_more == (change.ratio > 1) == (change.verdict == ("better" if more_is_better else "worse"))


@given(pairs, st.sampled_from([metric.key for metric in TIMES]))
def test_the_words_say_what_the_verdict_says(found, key):
    a, b = (list(series) for series in zip(*found, strict=True))
    change = Change.of(a, b, key == "tokens_per_s")
    words = change.words(key)
    gain, loss = {"ttft_ms": ("sooner", "later"), "tokens_per_s": ("more", "less")}.get(key, ("faster", "slower"))
    if len(found) < LEAST_PAIRS:
        assert words.endswith("too few to tell") and change.kind == "dim"
    else:
        said, _, interval = words.partition(" (")
        assert (gain in said, loss in said, said == "cannot tell apart") == tuple(
            change.verdict == verdict for verdict in ("better", "worse", "cannot tell apart")
        )
        assert said != "cannot tell apart" or f" × {change.word(key)}" in interval
    assert "e+" not in words and "e-" not in words and " 0 ×" not in words


def test_one_notation():
    def change(low, middle, high, more_is_better=False, num_pairs=8):
        return Change(100, 100 * middle, low, high, num_pairs, more_is_better, middle)

    assert change(0.0400, 0.0415, 0.0431).words("ttft_ms") == "24.1 × sooner (23.2 to 25)"
    assert change(1.02, 1.04, 1.06).words("tpot_ms") == "1.04 × slower (1.02 to 1.06)"
    assert change(0.98, 1.01, 1.03).words("total_ms") == "cannot tell apart (0.98 to 1.03 × slower)"
    assert change(1.7, 1.85, 2, True).words("tokens_per_s") == "1.85 × more (1.70 to 2.00)"
    assert change(1.003, 1.006, 1.02).words("total_ms") == "1.006 × slower (1.003 to 1.020)", "1.00 would read as none"
    assert change(0.4, 0.5, 0.6, num_pairs=3).words("total_ms") == "2.00 × faster in 3 pairs, too few to tell"
    assert change(0.4, 0.86, 1.003, num_pairs=3).words("total_ms") == "1.16 × faster in 3 pairs, too few to tell"
    assert change(0.4, 0.5, 0.6, num_pairs=1).words("total_ms") == "2.00 × faster in 1 pair, too few to tell"
    assert change(1750, 1800, 1900).words("total_ms") == "1,800 × slower (1,750 to 1,900)"


def test_an_interval_holds_the_quotient_that_its_word_names():
    """12.5 ms from 22.4 is 1.79 × faster, whether or not that can be told."""
    for metric, more, words in (("total_ms", False, "faster"), ("tokens_per_s", True, "less")):
        change = Change(22.4, 12.5, 0.33, 1.55, 6, more)
        assert change.words(metric) == f"cannot tell apart (0.65 to 3.03 × {words})"


@pytest.mark.parametrize(
    ("num_pairs", "after", "high", "needs"),
    [
        (6, 55, 1.5, True),
        (11, 140, 1.5, True),
        (12, 55, 1.5, False),
        (5, 55, 1.5, False),
        (6, 55, 0.6, False),
        (6, 98, 1.5, False),
    ],
)
def test_few_pairs_that_differ_by_an_effect_need_more(num_pairs, after, high, needs):
    assert Change(100, after, 0.5, high, num_pairs).needs_pairs is needs


def test_twelve_pairs_are_the_fewest_that_leave_one_off():
    assert (left_off(CUT_PAIRS - 1), left_off(CUT_PAIRS)) == (0, 1)


@pytest.mark.parametrize(
    ("num_pairs", "high", "told"), [(5, 0.5, False), (6, 0.8, False), (6, 0.5, True), (8, 0.8, False), (9, 0.8, True)]
)
def test_a_detail_takes_more_pairs_or_a_clearer_effect(num_pairs, high, told):
    assert Change(100, 45, 0.4, high, num_pairs).is_told is told


def test_without_pairs_there_is_no_interval():
    change = Change.unpaired(100, 50)
    assert (change.words("tpot_ms"), change.kind, change.verdict) == ("2.00 × faster", "dim", "better")
    assert Change.unpaired(100, 101).words("tpot_ms") == "about the same (1.01 × slower)"
    assert Change.unpaired(100, 100).words("tpot_ms") == "about the same (1.00 ×)"
    assert Change.unpaired(None, 3) is Change.unpaired(3, None) is Change.unpaired(0, 3) is None
    assert Change.of([1.0, None], [1.0, 2.0]) is Change.of([], []) is None


@pytest.mark.parametrize("wrong", [{"low": 0.0}, {"high": math.inf}, {"before": 0.0}, {"low": 3.0}, {"num_pairs": -1}])
def test_what_no_run_gives_is_refused(wrong):
    fine = {"before": 1.0, "after": 1.0, "low": 0.9, "high": 1.1, "num_pairs": 6}
    Change(**fine)
    with pytest.raises(ValueError, match="a change"):
        Change(**fine | wrong)


def test_memory_is_counted_and_has_no_interval():
    mib = 2**20
    assert memory_words(500 * mib, 357 * mib) == "143 MiB less"
    assert memory_words(int(3.74 * mib), int(3.76 * mib)) == "0.02 MiB more"
    assert memory_words(5, 5) == "the same"
    assert memory_words(0, 3) == "3 bytes more"
    assert memory_words(38 * 1024, 20 * 1024) == "18 KiB less", "as both are told beside it"
    assert memory_words(76 * 1024, 38 * 1024) == "0.04 MiB less"
    assert memory_words(mib, mib + 8) == "8 bytes more"


def test_the_interval_is_the_sign_tests():
    """The textbook's: of 8 values the whole range (99.2 %), of 12 the second from either end (99.4 %), and so on."""
    assert [left_off(num) for num in (1, 5, 6, 8, 11, 12, 15, 20, 25)] == [0, 0, 0, 0, 0, 1, 2, 3, 5]
    assert median_interval(range(1, 13)) == (2, 11)
    for num in range(8, 65):
        missed = 2 * sum(math.comb(num, k) for k in range(left_off(num) + 1)) / 2**num
        assert missed <= LEVEL
        assert missed + 2 * math.comb(num, left_off(num) + 1) / 2**num > LEVEL, "one more could be left off"


NOISE = {
    "normal": lambda r: r.gauss(0, 0.1),
    "heavy tails": lambda r: r.gauss(0, 0.02) / max(abs(r.gauss(0, 1)), 1e-3),
    "skewed": lambda r: r.expovariate(10) - math.log(2) / 10,
    "two levels": lambda r: r.gauss(0, 0.01) + r.choice((-0.2, 0.2)),
}


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("num", [8, 13, 24])
def test_the_interval_holds_the_median_whatever_the_noise(noise, num):
    random, tries = Random(num), 1500
    missed = 0
    for _ in range(tries):
        low, high = median_interval([NOISE[noise](random) for _ in range(num)])
        missed += not low <= 0 <= high
    assert missed / tries < LEVEL + 3 * math.sqrt(LEVEL / tries)


class Machine:
    """A clock of its own, two runs that move it, and rounds over both."""

    def __init__(self, monkeypatch, seconds, noise, effect=1.0, repeats=None, budget_s=4.0, seed=0):
        self.now, self._random, self._seconds, self._noise, self._effect = 0.0, Random(seed), seconds, noise, effect
        monkeypatch.setattr("eet_lab.bench.timing.time.perf_counter", lambda: self.now)
        self.order: list[int] = []
        self.told: list[tuple[int, int]] = []
        self._series = [Series(str(which), lambda which=which: self._run(which)) for which in (0, 1)]
        self.rounds = Rounds(repeats, budget_s, lambda: [self._change()])

    def change(self):
        tally = Tally(2 * self.rounds.expected, lambda done, total, message: self.told.append((done, total)))
        in_turn(self._series, self.rounds, tally)
        tally.say("done")
        return self._change()

    def _run(self, which):
        took = self._seconds * math.exp(self._random.gauss(0, self._noise)) * (self._effect if which else 1)
        self.now += took
        self.order.append(which)
        return took

    def _change(self):
        return Change.of(*(each.runs for each in self._series))

    def detail(self):
        return Change.of(*(each.runs for each in self._series), level=LEVEL / len(DETAILS))


LITTLE = [100.0, 110, 120, 100, 110, 120, 100, 110]


@pytest.mark.parametrize("num_pairs", [6, 7, 8])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_what_few_pairs_tell_by_a_little_is_not_told(num_pairs, factor):
    """However often it is repeated by order: only as many pairs as the level needs tell a little."""
    change = Change.of([95.0] * num_pairs, [factor * ms for ms in LITTLE[:num_pairs]])
    doubtful = factor == 1 and num_pairs < 8
    assert change.low > 1 and change.is_doubtful == doubtful
    assert (change.verdict, change.kind) == (("cannot tell apart", "dim") if doubtful else ("worse", "bad"))
    words = f"(1.02 to 1.30 × slower in {change.num_pairs} pairs: wider than its gap to 1 ×)"
    assert change.words("total_ms").endswith(words) == doubtful


def test_what_is_not_told_anyway_is_not_doubtful():
    assert not Change.of([95.0] * 6, [90.0, *LITTLE[1:6]]).is_doubtful
    assert not Change.of([95.0] * 5, LITTLE[:5]).is_doubtful


def test_what_few_pairs_tell_by_a_little_is_looked_at_again():
    done, told = [0.0], list[tuple[int, int, str]]()
    rounds = Rounds(None, 0.0, lambda: [Change.of([95.0] * len(done[1:]), LITTLE[: len(done) - 1])])
    in_turn([Series("it", lambda: done.append(0.0))], rounds, Tally(6, lambda *each: told.append(each)))
    assert len(done) == 9 and told[5:] == [
        (5, 6, "timing it, 6 of 6"), (6, 8, "timing it, 7 of 8"), (7, 8, "timing it, 8 of 8")
    ], "it never says more than it expects"  # fmt: skip


def test_runs_are_timed_in_turn_and_in_both_orders(monkeypatch):
    machine = Machine(monkeypatch, 1.0, 0.1, repeats=4)
    machine.change()
    assert machine.order == [0, 1, 1, 0, 0, 1, 1, 0]
    assert machine.rounds.expected == 4


@pytest.mark.parametrize(
    ("seconds", "noise", "least", "most"),
    [
        (2.0, 0.05, LEAST_PAIRS, LEAST_PAIRS),  # long runs: the budget is gone with the fewest pairs
        (0.1, 0.1, 16, 22),  # noisy ones: as many as the budget holds
        (0.1, 0.001, LEAST_PAIRS, LEAST_PAIRS),  # steady ones: known at once
        (0.0001, 0.2, MOST_ROUNDS, MOST_ROUNDS),
    ],
)
def test_pairs_end_when_enough_is_known_or_time_is_up(monkeypatch, seconds, noise, least, most):
    machine = Machine(monkeypatch, seconds, noise)
    change = machine.change()
    assert least <= change.num_pairs <= most
    assert machine.told[0] == (0, 2 * LEAST_PAIRS) and machine.told[-1] == (2 * change.num_pairs,) * 2
    assert change.num_pairs % 2 == 0, "both orders as often"


@pytest.mark.parametrize("noise", [0.003, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("seconds", [0.1, 2.0])
def test_looking_again_and_again_finds_no_effect_in_noise(monkeypatch, noise, seconds):
    """Series end by their width or by the clock, and what few pairs tell by a little is looked at again."""
    machines = [Machine(monkeypatch, seconds, noise, seed=seed) for seed in range(400)]
    told = [machine.change().verdict for machine in machines]
    assert sum(verdict != "cannot tell apart" for verdict in told) <= 0.01 * len(told)
    details = [machine.detail().is_told for machine in machines]
    assert sum(details) <= 0.005 * len(details), "two share the chance of one"


def test_a_true_effect_is_found_and_not_a_larger_one(monkeypatch):
    for effect, verdict in ((1.08, "worse"), (0.92, "better")):
        told = [Machine(monkeypatch, 0.1, 0.015, effect, seed=seed).change() for seed in range(50)]
        assert [change.verdict for change in told].count(verdict) >= 45
        assert sum(change.low <= effect <= change.high for change in told) >= 49


@given(pairs)
def test_who_divides_the_two_medians_finds_the_ratio_or_nearly_that_of_the_pairs(found):
    a, b = (list(series) for series in zip(*found, strict=True))
    change = Change.of(a, b)
    middle = math.exp(median(math.log(y / x) for x, y in found))
    assert change.ratio in (median(b) / median(a), pytest.approx(middle))
    assert abs(math.log(change.ratio / middle)) <= 0.1 * abs(math.log(middle)) + 1e-9
    assert change.low <= change.ratio * (1 + 1e-9) and change.ratio <= change.high * (1 + 1e-9)


def test_a_machine_with_two_paces_does_not_double_an_effect():
    """Each round is at one of two paces; in one of ten it changes within the round. The true ratio is 1.09."""
    before = [10, 20, 10, 20, 10, 20, 10, 20, 10, 10]
    after = [10.9, 21.8, 10.9, 21.8, 10.9, 21.8, 10.9, 21.8, 21.8, 21.8]
    change = Change.of(before, after)
    assert median(after) / median(before) > 2 and change.is_of_pairs and change.ratio == pytest.approx(1.09)


def test_medians_that_a_drift_has_moved_apart_give_way_to_the_pairs():
    assert Change(324, 16.2, 1 / 25, 1 / 18, 8, middle=1 / 22.3).words("tpot_ms") == "20 × faster (18 to 25)"
    moved = Change(324, 16.2, 1 / 25, 1 / 22, 8, middle=1 / 22.3)
    assert moved.is_of_pairs and moved.words("tpot_ms") == "22.3 × faster (22 to 25)"


def test_without_a_budget_each_recipe_has_two_seconds(pass_time, monkeypatch):
    monkeypatch.setattr(timing, "RECIPE_BUDGET_S", 2.0)
    wide = Change.of([90.0, 100.0, 130.0] * 2, [100.0, 70.0, 100.0] * 2)
    assert wide.width > timing.NARROW and not wide.is_doubtful
    rounds = Rounds(None, changes=lambda: [wide], num_recipes=10)
    for _ in rounds:
        pass_time(0.99)
    assert rounds.done == 20
