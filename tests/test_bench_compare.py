"""Compare and Ladder on a tiny model: what they hold, what they call, how they stop."""

from __future__ import annotations

import math
import sys
import threading
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle, repeat
from random import Random
from types import SimpleNamespace
from typing import ClassVar

import pytest

from eet_lab.bench import Comparison, compare, ladder, load_result, measure
from eet_lab.bench.cost import streaming_gb_per_s
from eet_lab.bench.launches import num_kernels
from eet_lab.bench.measure import Subject, _warnings
from eet_lab.bench.paired import LEAST_PAIRS, SURE_PAIRS
from eet_lab.bench.timing import MOST_ROUNDS, NARROW, SHARED, Rounds
from eet_lab.engine.settings import Settings
from eet_lab.errors import Cancelled, PromptError, RecipeError
from eet_lab.monitor import open_source
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, Technique
from eet_lab.techniques.pre_padding import PrePadding
from eet_lab.texts import generate

ROWS = [[5], [7, 8, 9, 10], [3, 1, 4, 1, 5, 9, 2]]


@pytest.fixture(scope="module")
def comparison(tiny):
    return compare(tiny, ROWS, "all", repeats=2, max_new_tokens=6)


@pytest.fixture(scope="module")
def climbed(tiny):
    return ladder(tiny, ROWS, "all", repeats=2, max_new_tokens=5)


def test_a_comparison_holds_both_runs(comparison, tmp_path):
    a, b = comparison.baseline, comparison.selection
    assert (a.recipe, b.recipe) == ("baseline", "pre_padding,mask_removal,memory_reuse,packed_prefill")
    assert comparison.workload.endswith("/b3/p1-7/n6")
    assert comparison.parity.verdict == "identical"
    assert a.tokens == b.tokens
    assert [len(row) for row in a.tokens] == [6, 6, 6]
    assert a.repeats == b.repeats == 2
    assert comparison.watched.repeats == 1
    assert comparison.watching_cost_percent is not None
    assert load_result(comparison.save(tmp_path / "c.json")) == comparison


def test_each_rung_knows_what_python_launches_for_a_token(tiny, climbed):
    """Without a mask each number of pads has a call of its own; three are fewer than what a mask takes."""
    lengths = [len(row) for row in ROWS]
    found = {rung.technique: rung.measurement.cost.launches_per_token for rung in climbed.rungs}
    assert 0 < found["mask_removal"] < found["pre_padding"] == num_kernels(Parts(), lengths, tiny.config) == found[""]


def test_what_a_users_own_technique_launches_is_counted_where_that_does_no_harm(tiny, monkeypatch):
    """A kernel that is given a pointer into the host's memory would end the session of a GPU."""

    @dataclass(frozen=True)
    class Own(Technique):
        """An embedding of a user's own."""

        name: ClassVar[str] = "own"
        title: ClassVar[str] = "Own"

        def apply(self, parts: Parts) -> Parts:
            return replace(parts, ops=replace(parts.ops, embed=lambda *args, **how: called.append(1)))

    called: list[int] = []
    with closing(open_source("cpu")) as source:
        for device, reason in (("cpu", "could not be counted"), ("cuda", "only our own techniques")):
            called.clear()
            monkeypatch.setattr(type(tiny), "device", device)
            subject = Subject(tiny, Recipe((Own(),)), ROWS, Settings(), source)
            count, why = subject.launches
            assert count is None and reason in why
            assert bool(called) == (device == "cpu")


def test_printing_shows_the_table(comparison, climbed):
    for result in (comparison, climbed):
        assert str(result) == result.to_text()
        assert repr(result).count("\n") == 0


def test_traces_tell_when_tokens_came(comparison):
    a, b = comparison.baseline, comparison.selection
    assert len(a.step_ms) == len(a.step_tokens) == 7 + 6 - 1  # token by token: the longest prompt, then the rest
    assert a.step_tokens[0] == 1  # only the prompt of one token has been read
    assert b.step_tokens == (3,) * 6
    assert sum(a.step_tokens) == sum(b.step_tokens) == 18


def test_memory_on_the_cpu_adds_up(comparison):
    for m in (comparison.baseline, comparison.selection):
        assert m.memory_source == "planned"
        assert m.memory["peak"] == sum(num_bytes for key, num_bytes in m.memory.items() if key != "peak")
    assert comparison.baseline.memory["kv_growth"] > 0 == comparison.selection.memory["kv_growth"]


def test_phases_and_steps_come_in_order(tiny):
    phases, steps, told = [], [], []
    compare(
        tiny,
        ROWS,
        "pre_padding",
        repeats=2,
        max_new_tokens=3,
        on_phase=lambda phase, recipe: phases.append((phase, recipe)),
        on_step=lambda event: steps.append((phases[-1], event.index)),
        progress=lambda done, total, message: told.append((done, total)),
    )
    pair = ["baseline", "pre_padding"]
    timed = [("measured", name) for name in (*pair, *reversed(pair))]
    expected = [("warm-up", n) for n in pair] + [("watched", n) for n in pair] + [("check", "pre_padding")] + timed
    assert phases == expected
    assert {phase for (phase, _), _ in steps} == {"watched"}
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize("when", ["check", "warm-up", "watched", "measured"])
def test_compare_can_be_stopped_in_every_phase(tiny, when):
    stop = threading.Event()
    with pytest.raises(Cancelled):
        compare(tiny, ROWS, cancel=stop, max_new_tokens=4, on_phase=lambda phase, _: phase == when and stop.set())


def test_bad_input_is_told_before_any_work(tiny):
    for timed in (compare, ladder, lambda *given, repeats: measure(*given, Settings(), repeats=repeats)):
        with pytest.raises(PromptError, match="repeats is 0"):
            timed(tiny, ROWS, repeats=0)
    with pytest.raises(PromptError, match="context"):
        compare(tiny, [[1] * 100], max_new_tokens=64)
    with pytest.raises(RecipeError, match="no technique"):
        compare(tiny, ROWS, "pre_paddin")
    with pytest.raises(RecipeError, match="cannot run"):
        ladder(tiny, ROWS, "memory_reuse,cuda_graphs")


@pytest.mark.parametrize("call", [compare, ladder, generate])
def test_what_the_wrong_type_gets_is_told(tiny, call):
    for recipe in (5, None, ["pre_padding", 5], PrePadding):
        with pytest.raises(RecipeError, match="must be words such as 'all'"):
            call(tiny, ROWS, recipe)
    for prompts in ([None], [5], 5):
        with pytest.raises(PromptError, match="must be a text"):
            call(tiny, prompts)
    with pytest.raises(PromptError, match="no setting 'max_tokens'.*max_new_tokens"):
        call(tiny, ROWS, max_tokens=3)


@pytest.mark.parametrize("timed", [compare, ladder])
@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, "4"])
def test_a_budget_is_a_number_of_seconds(tiny, timed, wrong):
    with pytest.raises(PromptError, match=r"budget_s is .*, but it must be a finite number of seconds, 0 or more"):
        timed(tiny, ROWS, budget_s=wrong)


@pytest.mark.parametrize("timed", [compare, ladder])
def test_a_budget_of_nothing_is_not_the_default(tiny, monkeypatch, timed):
    budgets, begin = [], Rounds.__init__

    def note(rounds, repeats, budget_s, *more):
        begin(rounds, 1, budget_s, *more)
        budgets.append(rounds._budget_s)

    monkeypatch.setattr(Rounds, "__init__", note)
    timed(tiny, ROWS, "pre_padding", budget_s=0, max_new_tokens=2)
    assert budgets == [0]


def test_a_recipe_may_be_a_list(tiny):
    for recipe in (["mask_removal", "pre_padding"], [PrePadding(), "mask_removal"]):
        assert str(generate(tiny, ROWS, recipe, max_new_tokens=1).recipe) == "pre_padding,mask_removal"
    assert str(generate(tiny, ROWS, PrePadding(), max_new_tokens=1).recipe) == "pre_padding"
    assert str(generate(tiny, ROWS, [], max_new_tokens=1).recipe) == "baseline"


def test_a_comparison_pairs_its_runs_and_tells_more_and_more(tiny):
    """Six pairs at least: each is told, and the last is the result."""
    told: list[Comparison] = []
    how = {"watch": False, "max_new_tokens": 3, "budget_s": 0.0}
    found = compare(tiny, ROWS, "pre_padding", on_partial=told.append, **how)
    pairs = [each.changes["total_ms"].num_pairs for each in told]
    assert pairs in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]), "two more for what six pairs tell by a little"
    assert {each.baseline.cost for each in told} == {None}, "the rate of memory is read once nothing is timed any more"
    assert list(found.changes) == ["ttft_ms", "tpot_ms", "total_ms", "tokens_per_s"]
    assert {change.num_pairs for change in found.changes.values()} == {pairs[-1] + 1} == {found.baseline.repeats}
    assert "in 5 pairs, too few to tell" in told[4].to_text() and "too few" not in found.to_text()
    assert found.baseline.cost is not None


def test_watched_or_not_a_comparison_counts_the_same_memory(tiny):
    """A watched run comes after two steps alone, in which no KV cache has grown to its end yet."""
    found = [compare(tiny, ROWS, repeats=1, watch=watch, max_new_tokens=5) for watch in (True, False)]
    for one, other in zip(*[(each.baseline, each.selection) for each in found], strict=True):
        assert one.memory == other.memory and one.tokens == other.tokens
    assert found[0].parity == found[1].parity


def test_an_engine_that_stays_beside_others_is_charged_for_itself_alone(tiny):
    """Memory is that of each recipe alone, whoever else is there in a ladder or a comparison."""
    climbed = ladder(tiny, ROWS, "pre_padding,memory_reuse", repeats=1, max_new_tokens=3)
    for rung in (*climbed.rungs, *climbed.left_out):
        alone = measure(tiny, ROWS, Settings(max_new_tokens=3), Recipe.parse(rung.measurement.recipe), repeats=1)
        assert rung.measurement.memory == alone.memory


def given_times(monkeypatch, timed, firsts, seconds):
    """Makes `timed` measure these times to the first token, of each recipe; the whole always takes as long.

    By the budget's clock each run takes so many seconds.
    """
    streaming_gb_per_s("cpu")  # measured once in a process: now, while the clock runs
    now = [0.0]
    monkeypatch.setattr(
        "eet_lab.bench.timing.time", SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[0])
    )

    class Timed(Subject):
        real = None

        def run(self, on_step=None):
            self.real = self.real or super().run(on_step)  # each has the same tokens
            run, first = self.real, next(firsts[self.recipe])
            now[0] += seconds
            times = {"first_ms": (first,) * len(ROWS), "last_ms": (1e4,) * len(ROWS), "total_ms": 1e4}
            return run._replace(generation=replace(run.generation, **times))

    monkeypatch.setattr(sys.modules[timed.__module__], "Subject", Timed)


def pairs_of(found):
    """Of a time to the first token, where the whole takes as long and would not ask for more pairs than the fewest."""
    changes = found.changes if isinstance(found, Comparison) else found.rungs[1].changes
    assert changes["total_ms"].verdict == "cannot tell apart" and changes["total_ms"].width < NARROW
    return changes["ttft_ms"].num_pairs


WITHOUT_WATCHING = {compare: {"watch": False}, ladder: {}}


@pytest.mark.parametrize("timed", [compare, ladder])
@pytest.mark.parametrize(("after", "num_pairs"), [((100, 110, 120), SURE_PAIRS), ((190, 220, 240), LEAST_PAIRS)])
def test_a_doubtful_first_token_asks_for_more_pairs(tiny, monkeypatch, timed, after, num_pairs):
    """Where six pairs tell it by a little, and not by far."""
    given_times(monkeypatch, timed, {"baseline": repeat(95.0), "pre_padding": cycle(after)}, seconds=1)
    found = timed(tiny, ROWS, "pre_padding", budget_s=0, max_new_tokens=3, **WITHOUT_WATCHING[timed])
    assert pairs_of(found) == num_pairs


@pytest.mark.parametrize("timed", [compare, ladder])
@pytest.mark.parametrize(
    ("noise", "seconds", "num_pairs"),
    [(0.1, 0.5, 30), (0.1, 5, LEAST_PAIRS), (0.001, 0.5, LEAST_PAIRS), (0.4, 0.05, MOST_ROUNDS)],
)
def test_a_noisy_first_token_is_timed_until_it_is_known_or_time_is_up(
    tiny, monkeypatch, timed, noise, seconds, num_pairs
):
    """In a ladder as in a comparison: out of time, out of time at once, known at once, and out of pairs."""

    def noisy(seed):
        random = Random(seed)
        while True:
            yield 100 * math.exp(random.gauss(0, noise))

    given_times(monkeypatch, timed, {"baseline": noisy(0), "pre_padding": noisy(1)}, seconds)
    found = timed(tiny, ROWS, "pre_padding", budget_s=30, max_new_tokens=3, **WITHOUT_WATCHING[timed])
    assert pairs_of(found) == num_pairs


def test_default_prompts_are_ragged(tiny):
    lengths = compare(tiny, recipe="pre_padding", repeats=1, watch=False, max_new_tokens=2).prompt_lengths
    assert len(lengths) == 8
    assert len(set(lengths)) > 4
    room = tiny.config.context - max(lengths) + 1
    shorter = compare(tiny, recipe="pre_padding", repeats=1, watch=False, max_new_tokens=room).prompt_lengths
    assert shorter == tuple(min(length, max(lengths) - 1) for length in lengths)


def test_changing_tokens_are_noticed(tiny):
    subject_runs = [measure(tiny, ROWS, Settings(max_new_tokens=2), repeats=1)]
    assert not [w for w in subject_runs[0].warnings if "other tokens" in w]
    subject = Subject(tiny, Recipe(), ROWS, Settings(max_new_tokens=2), open_source("cpu"))
    subject.prepare()
    run = subject.run()
    other = run._replace(generation=replace(run.generation, tokens=((1, 2),) * 3))
    assert any("other tokens" in warning for warning in subject.measurement([run, other]).warnings)


@pytest.mark.parametrize("watched", [False, True])
def test_a_processor_that_others_use_is_told(tiny, watched):
    with closing(open_source("cpu")) as source:
        subject = Subject(tiny, Recipe(), ROWS, Settings(max_new_tokens=2), source)
        subject.prepare()
        run = subject.run()
    slow = run._replace(generation=replace(run.generation, total_ms=95 * run.generation.total_ms))
    m = subject.measurement([run, run], [slow]) if watched else subject.measurement([run, slow])
    assert sum("the processor was shared" in warning for warning in m.warnings) == 1, "told once, beside the range"
    assert sum("runs of baseline took from" in warning for warning in m.warnings) == 1
    disturbed = subject.measurement([run._replace(conditions=(SHARED,)), slow])
    assert sum("the processor was shared" in warning for warning in disturbed.warnings) == 1
    assert m.repeats == 2
    assert not any("runs of" in warning for warning in subject.measurement([run, run]).warnings)


@pytest.mark.parametrize(("slower", "told"), [(1.1, False), (1.3, True)])
def test_so_is_the_host_of_a_gpu(tiny, slower, told):
    """It launches what the baseline does, call by call, and a GPU's own times hardly differ."""
    with closing(open_source("cpu")) as source:
        subject = Subject(tiny, Recipe(), ROWS, Settings(max_new_tokens=2), source)
        subject.prepare()
        run = subject.run()._replace(conditions=())  # what else this machine does is not asked here
    slow = run._replace(generation=replace(run.generation, total_ms=slower * run.generation.total_ms))
    assert any("the processor was shared" in each for each in _warnings("baseline", "cuda", [run, slow])) == told
    assert not _warnings("baseline", "cuda", [run, run], [slow]), "what watching costs is told elsewhere"


def test_compare_holds_the_watched_runs_against_the_others(tiny, pass_time):
    slow = compare(tiny, ROWS, "pre_padding", repeats=1, max_new_tokens=3, on_step=lambda event: pass_time(1e4))
    assert slow.watching_cost_percent > 100
    assert "the processor was shared" in slow.to_text()


def test_a_ladder_climbs_and_its_deltas_add_up(climbed, tmp_path):
    assert [rung.technique for rung in climbed.rungs] == [
        "",
        "pre_padding",
        "mask_removal",
        "memory_reuse",
        "packed_prefill",
    ]
    assert [rung.technique for rung in climbed.left_out] == [rung.technique for rung in climbed.rungs[1:]]
    total = climbed.rungs[0].measurement.total_ms.p50 + sum(rung.delta_ms.p50 for rung in climbed.rungs[1:])
    assert total == pytest.approx(climbed.rungs[-1].measurement.total_ms.p50, abs=1e-2)
    assert all(rung.parity.verdict == "identical" for rung in (*climbed.rungs, *climbed.left_out))
    assert not climbed.partial
    assert load_result(climbed.save(tmp_path / "l.json")) == climbed


def test_a_recipe_on_two_rungs_is_measured_once(climbed):
    assert climbed.left_out[-1].measurement is climbed.rungs[-2].measurement
