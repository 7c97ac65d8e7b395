"""Results: files that come back as they were, clear errors for those that cannot, and tables."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.bench import Change, Comparison, Environment, Ladder, Measurement, Parity, Run, Rung, Spread, load_result
from eet_lab.bench.measured import Cost, machine_id
from eet_lab.bench.run_memory import MEMORY_KEYS
from eet_lab.errors import ResultError
from eet_lab.words import plain
from eet_lab.workbench.history import SHIPPED

HERE = Environment(
    "Test CPU", "cpu", None, "2.0", "5.0", "0.1", None, "2025-01-02T03:04:05", "float32", "tiny", "a <tiny> model",
    machine=machine_id("cpu"),
)  # fmt: skip
SAME = Parity(True, (None, None), (None, None), 1e-6, 1e-5, "identical", "Every token is the same.")


def measurement(recipe: str = "baseline", total: float = 100.0) -> Measurement:
    spread = Spread(total * 0.9, total, total * 1.1)
    return Measurement(
        recipe=recipe, title=recipe, ttft_ms=spread, tpot_ms=None, total_ms=spread, tokens_per_s=spread,
        step_ms=(total / 2, total / 2), step_tokens=(1, 2), memory=dict.fromkeys(MEMORY_KEYS, 3 * 2**20),
        memory_source="planned", prepare_s=0.5, captures=0, joules_per_token=None, tokens=((1, 2), (3,)),
        texts=("a b", "<c>"), repeats=3, cost=Cost(1000, 10, 50.0, 0.02, 40.0, None),
    )  # fmt: skip


def comparison(**changes: object) -> Comparison:
    result = Comparison(
        environment=HERE, workload="tiny/b2/p1-3/n2", prompts=("x", "y"), prompt_lengths=(1, 3),
        settings={"max_new_tokens": 2}, baseline=measurement(), selection=measurement("memory_reuse", 50.0),
        parity=SAME, watched=measurement("memory_reuse", 51.0), watching_cost_percent=2.0,
    )  # fmt: skip
    return replace(result, **changes)


def ladder() -> Ladder:
    first, second = measurement(), measurement("memory_reuse", 50.0)
    second = replace(second, memory=second.memory | {"peak": first.memory["peak"] - 5})
    delta = Spread(-65.0, -50.0, -35.0)
    rungs = (
        Rung("", "Baseline", (), first, SAME),
        Rung("memory_reuse", "Memory reuse", (), second, SAME, delta, delta, None, -5),
    )
    prompts, lengths = ("x", "y"), (1, 3)
    left_out = (replace(rungs[0], along=("b",), delta_bytes=5),)
    return Ladder(HERE, "tiny/b2/p1-3/n2", prompts, lengths, {}, "memory_reuse", rungs, left_out)


def run(**changes: object) -> Run:
    result = Run(HERE, "tiny/b2/p1-3/n2", ("x", "y"), (1, 3), {"max_new_tokens": 2, "stop": [7]}, measurement())
    return replace(result, **changes)


@pytest.mark.parametrize(
    "result", [comparison(), comparison(watched=None), ladder(), run()], ids=["compare", "plain", "ladder", "run"]
)
def test_a_saved_result_comes_back_equal(result, tmp_path):
    assert load_result(result.save(tmp_path / "r.json")) == result


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_a_spread_is_ordered_and_within_its_values(values):
    spread = Spread.of(values)
    assert min(values) - 1e-3 <= spread.p20 <= spread.p50 <= spread.p80 <= max(values) + 1e-3


def test_a_spread_of_unknowns_is_unknown():
    assert Spread.of([]) is None
    assert Spread.of([1.0, None]) is None


def paired(after: float, num_pairs: int = 8) -> dict[str, Change]:
    """From 100 to `after`, by as much in each round."""
    made = {key: Change.of([100.0] * num_pairs, [after] * num_pairs) for key in ("ttft_ms", "total_ms")}
    return {key: change for key, change in made.items() if change}


def test_changes_are_kept_and_told_in_one_notation(tmp_path):
    result = comparison(changes=paired(50))
    assert load_result(result.save(tmp_path / "r.json")) == result
    assert "2.00 × faster (1.94 to 2.06)" in result.to_text() and "2.00 × sooner (" in result._repr_html_()
    assert "8 pairs, timed in turn" in result.to_text() and "widened by 3 % at both ends" in result.to_text()
    assert "fewer than 8 pairs" not in result.to_text()
    few = comparison(changes=paired(50, 6)).to_text()
    assert "With fewer than 8 pairs we also say so if it is wider than its gap to 1 ×." in few
    untold = comparison(changes={"total_ms": Change(22.4, 12.5, 0.33, 1.55, 6)}).to_text()
    assert "cannot tell apart (0.65 to 3.03 × faster)" in untold
    assert "One slow run widens an interval of 6 pairs: more pairs of runs could tell (repeats=12; " in untold
    alike = comparison(changes=paired(99))
    assert "could tell" not in few + alike.to_text()
    assert alike.to_text().count("cannot tell apart (") == 2
    few = comparison(changes=paired(50, 3)).to_text()
    assert "too few to tell" in few and "own ratios" not in few
    drifted = {"total_ms": Change(100.0, 60.0, 0.4, 0.7, 3, middle=0.5)}
    assert "the median of the pairs' own ratios." in comparison(changes=drifted).to_text()


def test_energy_is_compared_in_the_one_notation_of_ratios():
    one, other = (replace(measurement(), joules_per_token=joules) for joules in (2.0, 1.96))
    assert "1.02 × less" in comparison(baseline=one, selection=other).to_text()
    assert "1.02 × more" in comparison(baseline=other, selection=one).to_text()


def test_a_file_of_before_runs_were_paired_is_told_without_an_interval(tmp_path):
    path = comparison().save(tmp_path / "r.json")
    damage(path, lambda c: c["result"].pop("changes"))
    old = load_result(path)
    assert old.changes == {} and {change.kind for change in old.all_changes.values()} == {"dim"}
    assert "2.00 × faster\n" in old.to_text() and "there are no intervals" in old.to_text()
    path = ladder().save(tmp_path / "l.json")
    damage(path, lambda c: [c["result"].pop("changes"), *(rung.pop("changes") for rung in c["result"]["rungs"])])
    old = load_result(path)
    assert old.rungs[1].change is None and old.all_changes["total_ms"].words("total_ms") == "2.00 × faster"
    assert "-50" in old.to_text()


def test_a_rung_that_cannot_be_told_apart_says_so(tmp_path):
    def told(after, num_pairs=8):
        result = ladder()
        first, second = result.rungs
        second = replace(
            second, changes=paired(after, num_pairs), delta_ms=Spread(after - 102, after - 100, after - 98)
        )
        return replace(result, rungs=(first, second))

    assert "cannot tell apart (-3 to +1)" in told(99).to_text() and "cannot tell apart" in told(99)._repr_html_()
    assert "-50 (-52 to -48)" in told(50).to_text() and "cannot tell apart (" not in told(50).to_text()
    assert "-50, too few rounds to tell" in told(50, 2).to_text()
    assert load_result(told(99).save(tmp_path / "l.json")) == told(99)


def test_a_rung_names_the_part_of_the_run_that_alone_can_be_told_apart():
    def told(ttft_high, total_high):
        first, second = ladder().rungs
        changes = {"ttft_ms": Change(90, 45, 0.4, ttft_high, 9), "tpot_ms": Change(5, 5, 0.9, 1.1, 9)}
        changes["total_ms"] = Change(100, 97, 0.9, total_high, 9)
        return replace(ladder(), rungs=(first, replace(second, changes=changes))).to_text()

    said = "+ Memory reuse: first token 2.00 × sooner (1.67 to 2.50), though not the whole run."
    assert said in told(0.6, 1.1) and "per token" not in told(0.6, 1.1) and "half of the level" in told(0.6, 1.1)
    assert "first token" not in told(1.1, 1.1), "its interval holds 1"
    assert "first token" not in told(0.6, 0.98), "the whole run says it"


def damage(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.pop("eet_lab_result"), "not a result of EET Lab"),
        (lambda c: c.update(eet_lab_result=99), "format 99"),
        (lambda c: c.update(kind="novel"), "'novel'"),
        (lambda c: c["result"].pop("baseline"), "no baseline"),
        (lambda c: c["result"]["baseline"].update(step_ms="fast"), "result.baseline.step_ms"),
        (lambda c: c["result"]["parity"].update(verdict="maybe"), "result.parity.verdict"),
        (lambda c: c["result"].update(mood="good"), "mood"),
        (
            lambda c: c["result"]["changes"]["total_ms"].update(low=-1.0),
            r"result\.changes\.total_ms: a change is made of",
        ),
        (lambda c: c["result"]["selection"]["memory"].pop("peak"), "result.selection.memory has no peak"),
        (lambda c: c["result"]["watched"]["step_ms"].pop(), "result.watched has 1 step_ms, but 2 step_tokens"),
        (lambda c: c["result"]["baseline"]["tokens"].pop(), "result.baseline.tokens has 1 rows"),
        (lambda c: c["result"].update(prompt_lengths=[1, 2, 3]), "there are 3 prompts"),
        (lambda c: c["result"]["selection"].update(prepare_s=float("nan")), "result.selection.prepare_s is NaN"),
        (lambda c: c["result"].update(prompt_lengths=[True]), r"prompt_lengths\[0\]"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(change, says, tmp_path):
    path = comparison(changes=paired(50)).save(tmp_path / "r.json")
    damage(path, change)
    with pytest.raises(ResultError, match=says):
        load_result(path)


def test_a_damaged_rung_is_named(tmp_path):
    path = ladder().save(tmp_path / "r.json")
    damage(path, lambda c: c["result"]["rungs"][1]["measurement"].update(memory={}))
    with pytest.raises(ResultError, match=r"result.rungs\[1\].memory has no weights"):
        load_result(path)


def test_files_that_are_no_results(tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "list").write_text("[1]")
    for name in ("text", "list", "absent"):
        with pytest.raises(ResultError, match=name):
            load_result(tmp_path / name)
    with pytest.raises(ResultError, match="cannot be written"):
        comparison().save(tmp_path / "no" / "where.json")


def test_a_link_and_a_device_stay_what_they_are(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    comparison().save(link)
    assert link.is_symlink()
    assert load_result(real) == comparison()
    controller, terminal = os.openpty()
    try:
        comparison(watched=None).save(os.ttyname(terminal))
        assert b"eet_lab_result" in os.read(controller, 100)
    finally:
        os.close(controller)
        os.close(terminal)


@pytest.mark.parametrize("result", [comparison(), ladder()])
def test_files_of_before_parity_was_called_so_still_open(result, tmp_path):
    result.save(path := tmp_path / "new.json")
    (tmp_path / "old.json").write_text(path.read_text().replace('"parity":', '"sameness":'))
    assert load_result(tmp_path / "old.json").to_text() == load_result(path).to_text()


def test_frames_hold_numbers():
    frame = comparison().to_frame()
    assert frame.loc["selection", "total_ms"] == 50.0
    assert frame.loc["watched", "total_ms_p80"] == pytest.approx(56.1)
    rungs = ladder().to_frame()
    assert rungs.loc[("added", "memory_reuse"), "delta_ms"].item() == -50.0


@pytest.mark.parametrize(("result", "word"), [(comparison(), "memory_reuse"), (ladder(), "+ Memory reuse")])
def test_tables_say_the_same_in_text_and_html(result, word):
    text, page = result.to_text(), result._repr_html_()
    assert word in text
    assert word in page
    assert "identical" in text
    assert "a <tiny> model" in text
    assert "<tiny>" not in page


@pytest.mark.parametrize("result", [comparison(), ladder()])
def test_a_table_says_with_what_it_was_taken(result):
    gpu = replace(HERE, device="NVIDIA H200", driver="580.1", torch="2.11", transformers="5.17", commit="3d6cd766d211")
    words = "NVIDIA H200, driver 580.1, torch 2.11, transformers 5.17, 2025-01-02, commit 3d6cd766d211"
    assert f"Measured on {words}." in replace(result, environment=gpu).to_text()
    taken = replace(result, environment=replace(gpu, recorded=True))
    assert f"Recorded on {words}." in taken.to_text() and f"Recorded on {words}." in taken._repr_html_()
    assert HERE.origin == "Test CPU, torch 2.0, transformers 5.0, 2025-01-02", "what is not known is left out"


@pytest.mark.parametrize(
    ("ms", "launches", "said"),
    [
        (24.0, (100, 90), None),
        (26.0, (100, 100), "100 launches a token, where that one has 100; more likely, the host slowed down"),
        (26.0, (100, 110), "110 launches a token, where that one has 100."),
        (40.0, (100, 110), "more likely, the host slowed down"),
        (26.0, (None, 110), "or the host slowed down"),
    ],
)
def test_a_ladder_says_why_a_rung_takes_longer_while_python_launches(ms, launches, said):
    """On a GPU, before CUDA graphs: the host's doing, or more to launch, if that is known."""

    def rung(of, ms, count):
        cost = replace(of.measurement.cost, launches_per_token=count)
        return replace(of, measurement=replace(of.measurement, tpot_ms=Spread(ms, ms, ms), cost=cost))

    assert "takes what the host takes" not in ladder().to_text()
    rungs = tuple(map(rung, ladder().rungs, (20.0, ms), launches))
    text = replace(ladder(), environment=replace(HERE, device_kind="cuda"), rungs=rungs).to_text()
    assert "takes what the host takes" in text
    assert (f"+ Memory reuse took {plain(ms)} ms a token" in text) == bool(said)
    assert (said or "") in text
    assert ("Warning: + Memory reuse" in text) == bool(said and "where that one has 100." not in said)


def test_the_recorded_ladders_of_xl_say_which_rungs_leave_a_step_as_it_is():
    """Persistent layers are for one row or two."""
    for name, alike in (
        ("", "Pre-padding, Packed prefill, Persistent layers"),
        ("-one-row", "Pre-padding, Packed prefill"),
    ):
        text = load_result(SHIPPED / f"h200-ladder-gpt2-xl{name}.json").to_text()
        assert f"As many launches a token as the rung before: {alike}. So what" in text


def test_the_recorded_ladder_of_xl_says_what_mask_removal_launches():
    text = load_result(SHIPPED / "h200-ladder-gpt2-xl.json").to_text()
    assert "+ Mask removal took 33.7 ms a token, the rung before 21.9: 1,600 launches" in text.replace("\n", " ")


def test_a_small_change_of_memory_is_seen_as_one():
    """One decimal would show 3.7 and 3.8, and their difference as 0.02."""
    before, after = (
        replace(measurement(name), memory=dict.fromkeys(MEMORY_KEYS, int(mib * 2**20)))
        for name, mib in (("baseline", 3.74), ("memory_reuse", 3.76))
    )
    lines = comparison(baseline=before, selection=after).to_text().splitlines()
    [line] = [line for line in lines if line.startswith("  KV cache")]
    assert line.split()[2:] == ["3.74", "MiB", "3.76", "MiB", "0.02", "MiB", "more"]


@pytest.mark.parametrize(
    ("took", "told"),
    [(51.0, "noise"), (56.0, "noise"), (80.0, "60 % longer than the median of the runs without it (41 to 83 % longer")],
)
def test_what_watching_costs_has_a_range_and_is_of_one_run(took, told):
    watched = comparison(watched=measurement("memory_reuse", took), watching_cost_percent=2 * (took - 50))
    [said] = [line for line in watched.to_text().splitlines() if "live view" in line]
    assert told in said and ("One run is too few to tell" in said) == (took > 56)
