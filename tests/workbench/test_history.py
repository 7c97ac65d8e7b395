"""Kept runs survive, can be named, pinned, opened and compared; and whatever a folder holds, nothing breaks."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from eet_lab.bench import Comparison, Ladder
from eet_lab.errors import ResultError
from eet_lab.workbench import Workbench, history
from eet_lab.workbench.history import History
from eet_lab.workbench.opened import SideBySide
from eet_lab.workbench.rows import KeptRun
from eet_lab.workbench.views.runs import runs_state
from workbench.driving import own, read_all


def test_what_is_added_is_a_row_and_comes_back_in_another_kernel(
    comparison: Comparison, climbed: Ladder, tmp_path: Path
) -> None:
    first = History(tmp_path)
    first.add(comparison, {})
    time.sleep(1.05)  # names go by the second
    ladder = first.add(climbed, {})
    rows = own(History(tmp_path))
    assert [row.kind for row in rows] == ["ladder", "compare"], "the newest first"
    assert rows[0] == ladder
    row = rows[1]
    assert (row.model, row.recipe, row.recorded, row.same) == (
        comparison.environment.model, "all - packed prefill", False, comparison.parity.verdict,
    )  # fmt: skip
    assert row.ttft_ms == comparison.selection.ttft_ms.p50 and row.peak_bytes == comparison.selection.memory["peak"]
    result, beside = History(tmp_path).open(row.id)
    assert result.selection == comparison.selection and beside == {}
    assert "Measured on this machine" in row.origin


def test_of_two_runs_of_one_moment_the_later_is_first(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "STAMP", "20261128-000000-000000")
    kept = History(tmp_path)
    ids = [kept.add(comparison, {}).id for _ in range(3)]
    assert len(set(ids)) == 3 and [row.id for row in own(kept)] == ids[::-1]


def test_recordings_come_along_and_are_not_to_be_changed(tmp_path: Path) -> None:
    kept = History(tmp_path)
    read_all(kept)
    rows = kept.rows()
    assert len(rows) == len(list(history.SHIPPED.glob("*.json"))) > 3
    assert all(row.recorded and not row.writable and not row.problem for row in rows)
    names = [row.name for row in rows]
    assert any("gpt2-xl, 8 prompts, H200" in name for name in names)
    assert len(set(names)) == len(names), "those of one model are told apart"
    assert "demo, 8 prompts, H200, compare, all + int8 weights against all" in names
    assert all("Recorded on" in row.origin for row in rows)
    for refused in (lambda: kept.delete(rows[0].id), lambda: kept.rename(rows[0].id, "x")):
        with pytest.raises(ResultError, match="recording that comes with"):
            refused()
    kept.pin(rows[0].id)
    assert kept.pinned().id == rows[0].id, "but pinned it can be"


def test_rows_of_one_name_are_told_apart_by_their_moment(tmp_path: Path) -> None:
    now = datetime.now().astimezone().replace(microsecond=0)
    names = {"name": "demo, 4 prompts", "date": now.isoformat()}
    rows = [
        KeptRun(id="a", **names),
        KeptRun(id="b", **names),
        KeptRun(id="c", name="demo, 4 prompts", date="2020-01-02T12:00:05"),
        KeptRun(id="d", name="x.json", problem="cannot be read"),
    ]
    found = runs_state(rows, [], "", History(tmp_path), "", busy=False)["rows"]
    assert [row["short_when"] for row in found] == [f"{now:%H:%M}", f"{now:%H:%M}", "2020-01-02", ""]
    assert [row["label"] for row in found] == [
        f"demo, 4 prompts, {now:%H:%M:%S}",
        f"demo, 4 prompts, {now:%H:%M:%S} (2)",
        "demo, 4 prompts, 2020-01-02 12:00:05",
        "x.json",
    ]


def test_a_workbench_that_is_asked_for_a_recipe_counts_no_earlier_pin(comparison: Comparison, tmp_path: Path) -> None:
    kept = History(tmp_path)
    pinned = kept.add(comparison, {}).id
    kept.pin(pinned)
    for recipe in (None, "pre_padding"):
        workbench = Workbench("demo", recipe=recipe, device="cpu", folder=tmp_path)
        history = workbench.controller.results.history
        assert [row.id for row in history.rows() if row.pinned] == ([pinned] if recipe is None else [])
        assert (history.pinned() is None) == (recipe is not None)
    history.look()
    other = kept.add(comparison, {}).id
    kept.pin(other)  # elsewhere, while this one is open
    history.look()
    assert history.pinned() is None
    history.pin(pinned)
    assert history.pinned().id == pinned == History(tmp_path).pinned().id, "a pin that is set here counts here"
    history.pin(None)
    workbench.close()


def test_names_notes_and_the_pin_survive(comparison: Comparison, tmp_path: Path) -> None:
    kept = History(tmp_path)
    a, b = kept.add(comparison, {}), kept.add(comparison, {})
    kept.rename(a.id, "  before the fix\x1b[31m ")
    kept.annotate(a.id, "cold")
    kept.pin(a.id)
    kept.pin(b.id)
    rows = {row.id: row for row in History(tmp_path).rows()}
    assert "before the fix" in rows[a.id].name and "\x1b" not in rows[a.id].name
    assert rows[a.id].note == "cold"
    assert (rows[a.id].pinned, rows[b.id].pinned) == (False, True), "one at most"
    assert kept.rows()[0].id == b.id, "the pinned one first"
    kept.rename(a.id, "")
    assert {row.id: row for row in kept.rows()}[a.id].name == a.name, "an empty name brings back the first"
    kept.pin(None)
    assert kept.pinned() is None


def test_two_workbenches_on_one_folder_see_each_others_runs_and_lose_no_word(
    comparison: Comparison, tmp_path: Path
) -> None:
    one, two = History(tmp_path), History(tmp_path)
    ids = [one.add(comparison, {}).id for _ in range(6)]
    assert {row.id for row in own(two)} == set(ids)

    def name(kept: History, mine: list[str]) -> None:
        for id in mine:
            kept.rename(id, f"name of {id}")

    threads = [threading.Thread(target=name, args=(kept, mine)) for kept, mine in ((one, ids[::2]), (two, ids[1::2]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row.id: row.name for row in own(one)} == {id: f"name of {id}" for id in ids}
    two.delete(ids[0])
    assert ids[0] not in {row.id for row in own(one)}
    with pytest.raises(ResultError, match="no longer kept"):
        one.open(ids[0])


def test_a_run_that_was_taken_elsewhere_says_so(comparison: Comparison, tmp_path: Path) -> None:
    row = History(tmp_path).add(comparison, {})
    path = tmp_path / f"{row.id}.json"
    content = json.loads(path.read_text())
    content["result"]["environment"]["machine"] = "0123456789abcdef"
    taken = History(tmp_path).take("mine.json", json.dumps(content).encode())
    assert taken.recorded and "not measured on this machine" in taken.origin
    with pytest.raises(ResultError, match=r"mine\.json"):
        History(tmp_path).take("mine.json", b"nonsense")


def test_two_that_end_at_once_overwrite_nothing_and_keep_their_order(comparison: Comparison, tmp_path: Path) -> None:
    one, two = History(tmp_path), History(tmp_path)
    ids = [kept.add(comparison, {}).id for kept in (one, two) * 5]
    assert [row.id for row in own(one)] == ids[::-1]


def test_a_ladder_that_was_stopped_at_once_is_a_row(climbed: Ladder, comparison: Comparison, tmp_path: Path) -> None:
    kept = History(tmp_path)
    row = kept.add(replace(climbed, rungs=(), left_out=(), partial=True), {})
    assert (row.ttft_ms, row.peak_bytes, row.same, row.problem) == (None, None, "", "")
    rows = [row, kept.add(comparison, {})]
    with pytest.raises(ResultError, match="stopped before anything was measured"):
        SideBySide.of(rows, [kept.open(each.id)[0] for each in rows])


def test_runs_of_one_kind_are_numbered_and_keep_their_numbers(
    comparison: Comparison, climbed: Ladder, tmp_path: Path
) -> None:
    kept = History(tmp_path)
    first, second, ladder = (kept.add(each, {}) for each in (comparison, comparison, climbed))
    assert [row.name for row in (first, second, ladder)] == ["Compare 1", "Compare 2", "Ladder 1"]
    assert first.subject == second.subject == ladder.subject != ""
    kept.delete(first.id)
    third = kept.add(comparison, {})
    assert [row.name for row in own(History(tmp_path))] == ["Compare 3", "Ladder 1", "Compare 2"]
    kept.rename(third.id, "mine")
    assert kept.add(comparison, {}).name == "Compare 4"


def test_files_of_an_earlier_version_are_numbered_in_their_order(comparison: Comparison, tmp_path: Path) -> None:
    for day in (3, 1, 2):
        comparison.save(tmp_path / f"2026110{day}-120000-000000-compare.json")
    kept = History(tmp_path)
    read_all(kept)
    names = {row.id[7]: row.name for row in own(kept)}
    assert names == {"1": "Compare 1", "2": "Compare 2", "3": "Compare 3"}


def test_runs_that_cannot_be_written_are_numbered_too(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = History(tmp_path / "file")
    assert [kept.add(comparison, {}).name for _ in range(2)] == ["Compare 1", "Compare 2"]


# On the page
