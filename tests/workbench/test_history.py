"""Kept runs survive, can be named, pinned, opened and compared; and whatever a folder holds, nothing breaks."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from base64 import b64encode
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from eet_lab.bench import Comparison, Ladder
from eet_lab.errors import ResultError
from eet_lab.figures.results import runs
from eet_lab.paths import write_whole
from eet_lab.workbench import Workbench, history, sidecar
from eet_lab.workbench import commands as c
from eet_lab.workbench.history import BATCH, UNREAD, History
from eet_lab.workbench.rows import Row
from eet_lab.workbench.sidecar import LOCK, SIDECAR, locked
from eet_lab.workbench.views.runs import MOST_UPLOAD_BYTES, SHOWN, runs_state
from workbench.driving import do, enabled, errors, row, shown, status, turn, turn_until


def own(history: History) -> list[Row]:
    """Rows of the folder as it is now, without the recordings that come along."""
    history.look()
    return [row for row in history.rows() if not row.id.startswith("recorded:")]


def read_all(history: History) -> None:
    history.look()
    while files := history.unread():
        history.learn(history.read(files))


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
        comparison.environment.model, "all - packed prefill", False, comparison.sameness.verdict,
    )  # fmt: skip
    assert row.ttft_ms == comparison.selection.ttft_ms.p50 and row.peak_bytes == comparison.selection.memory["peak"]
    result, beside = History(tmp_path).open(row.id)
    assert result.selection == comparison.selection and beside == {}
    assert "Measured on this machine" in row.origin


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
        Row(id="a", **names),
        Row(id="b", **names),
        Row(id="c", name="demo, 4 prompts", date="2020-01-02T12:00:05"),
        Row(id="d", name="x.json", problem="cannot be read"),
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
        history = Workbench("demo", recipe=recipe, device="cpu", folder=tmp_path).controller.results.history
        assert [row.id for row in history.rows() if row.pinned] == ([pinned] if recipe is None else [])
        assert (history.pinned() is None) == (recipe is not None)
    history.pin(pinned)
    assert history.pinned().id == pinned == History(tmp_path).pinned().id, "a pin that is set here counts here"
    history.pin(None)


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


def test_a_folder_that_cannot_be_written_to_keeps_runs_in_memory(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = History(tmp_path / "file" / "folder")
    assert "is a file. Runs are kept in memory" in kept.problem, "from the start"
    row = kept.add(comparison, {"baseline": {}})
    assert "kept in memory" in kept.problem
    name, content = kept.export(row.id, "json")
    assert name == f"{row.id}.json" and "eet_lab_result" in json.loads(content)
    assert kept.put_down(name, content).read_bytes() == content, "elsewhere"
    assert row.id in {each.id for each in kept.rows()}
    assert kept.open(row.id)[0] is comparison
    with pytest.raises(ResultError, match="Give another"):
        kept.rename(row.id, "x")
    kept.delete(row.id)
    assert row.id not in {each.id for each in kept.rows()}


def test_a_folder_that_is_read_only_is_told_of_before_anything_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eet_lab.workbench.history.os.access", lambda path, mode: False)
    kept = History(tmp_path / "new")
    assert f"{tmp_path} is read-only" in kept.problem and not kept.folder.exists()
    told = runs_state(kept.rows(), [], "", kept, "", busy=False)["read_only_folder"]
    assert "export what you need" in told


def full(path: Any, content: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_loses_nothing(comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = History(tmp_path)

    monkeypatch.setattr("eet_lab.bench.results.write_whole", full)
    row = kept.add(comparison, {})
    assert "No space left" in kept.problem and kept.open(row.id)[0] is comparison
    monkeypatch.undo()
    kept.add(comparison, {})
    assert kept.problem == ""
    assert row.id in {each.id for each in own(History(tmp_path))}, "written late"


HOSTILE = {
    "text.json": b"not json",
    "list.json": b"[1, 2]",
    "deep.json": b"[" * 100_000,
    "later.json": json.dumps({"eet_lab_result": 99, "kind": "comparison", "result": {}}).encode(),
    "empty.json": b"",
    "infinite.json": b'{"eet_lab_result": 1, "kind": "comparison", "result": 1e999}',
    "<img src=x onerror=alert(1)>.json": b"{}",
}


def test_whatever_a_folder_holds_is_a_row_with_its_reason(
    comparison: Comparison, bench: Workbench, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    good = History(folder).add(comparison, {})
    for name, content in HOSTILE.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe.json")
    (folder / "endless.json").symlink_to("/dev/zero")
    (folder / "folder.json").mkdir()
    kept = bench.controller.results.history
    read_all(kept)
    rows = {row.id: row for row in own(kept)}
    assert not rows[good.id].problem
    for name in [*HOSTILE, "pipe.json", "endless.json", "folder.json"]:
        row = rows[Path(name).stem]
        assert row.problem and "moment" not in row.problem, name
        do(bench, c.OpenRun(row.id))
        assert errors(bench), name
    assert any("onerror" in row["name"] for row in shown(bench, "runs")["rows"]), "as text: the page makes no markup"


DAMAGED = [
    b"garbage",
    b"[]",
    b'{"a": 5}',
    b'{"a": {"summary": 5, "stamp": "x", "name": 7}}',
    b'{"a": {"stamp": [1, 2], "summary": 5}}',
    b'{"a": {"stamp": [1, 2], "summary": {"name": 5}, "pinned": "yes"}}',
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_list_of_names_counts_as_none(comparison: Comparison, tmp_path: Path, content: bytes) -> None:
    row = History(tmp_path).add(comparison, {})
    (tmp_path / SIDECAR).write_bytes(content)
    again = History(tmp_path)
    read_all(again)
    assert own(again) == [row]
    History(tmp_path).rename(row.id, "again")
    assert own(History(tmp_path))[0].name == "again"


@pytest.mark.parametrize("content", [b"{", b"[1]"])
def test_a_damaged_run_that_has_a_name_cannot_be_exported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    history = History(tmp_path)
    history.rename("x", "mine")
    with pytest.raises(ResultError):
        history.export("x", "json")


@pytest.mark.parametrize("lie", [{"ttft_ms": "<b>"}, {"unknown": 1}, {"pinned": True}, {"id": "other"}, {"name": 5}])
def test_a_summary_that_is_none_is_read_again(comparison: Comparison, tmp_path: Path, lie: dict[str, Any]) -> None:
    row = History(tmp_path).add(comparison, {})
    entries = json.loads((tmp_path / SIDECAR).read_text())
    entries[row.id]["summary"] |= lie
    entries[row.id]["note"] = "a field that is damaged takes no other with it"
    (tmp_path / SIDECAR).write_text(json.dumps(entries))
    again = History(tmp_path)
    read_all(again)
    assert own(again) == [replace(row, note=entries[row.id]["note"])]


def test_a_thousand_files_are_listed_quickly_once_they_have_been_read(comparison: Comparison, tmp_path: Path) -> None:
    first = History(tmp_path)
    path = tmp_path / f"{first.add(comparison, {}).id}.json"
    for i in range(1000):
        os.link(path, tmp_path / f"20260101-000000-compare-{i}.json")
    begun = time.perf_counter()
    rows = own(first)
    assert len(rows) == 1001
    assert sum(row.problem == UNREAD for row in rows) == 1000, "they are read elsewhere, and the page goes on meanwhile"
    assert time.perf_counter() - begun < 1
    [entry] = json.loads((tmp_path / SIDECAR).read_text()).values()
    (tmp_path / SIDECAR).write_text(json.dumps({each.stem: entry for each in tmp_path.glob("2*.json")}))
    again = History(tmp_path)
    begun = time.perf_counter()
    assert not any(row.problem for row in own(again))
    assert time.perf_counter() - begun < 1
    begun = time.perf_counter()
    again.rows()
    assert time.perf_counter() - begun < 0.01, "ten times a second"


def test_files_are_read_in_batches_with_one_write_each(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = comparison.save(tmp_path / "20260101.json")
    for i in range(BATCH + 3):
        os.link(result, tmp_path / f"20260102-{i:02}.json")
    written: list[Any] = []
    monkeypatch.setattr(sidecar, "write_whole", lambda path, text: (written.append(text), write_whole(path, text)))
    kept = History(tmp_path)
    read_all(kept)
    assert not any(row.problem for row in own(kept)) and len(written) == 2
    (tmp_path / "20260102-00.json").unlink()
    comparison.save(tmp_path / "20260102-00.json")
    os.utime(tmp_path / "20260102-00.json", (1, 1))
    kept.look()
    assert list(kept.unread()) == ["20260102-00"], "it has changed, and no other has"


def test_a_run_that_was_taken_elsewhere_says_so(comparison: Comparison, tmp_path: Path) -> None:
    row = History(tmp_path).add(comparison, {})
    path = tmp_path / f"{row.id}.json"
    content = json.loads(path.read_text())
    content["result"]["environment"]["machine"] = "0123456789abcdef"
    taken = History(tmp_path).take("mine.json", json.dumps(content).encode())
    assert taken.recorded and "not measured on this machine" in taken.origin
    with pytest.raises(ResultError, match=r"mine\.json"):
        History(tmp_path).take("mine.json", b"nonsense")


def test_a_list_of_names_that_nothing_could_write_or_send_counts_as_none(
    comparison: Comparison, tmp_path: Path
) -> None:
    row = History(tmp_path).add(comparison, {})
    entries = json.loads((tmp_path / SIDECAR).read_text())
    for name, value in (("name", "\ud800"), ("ttft_ms", float("nan")), ("peak_bytes", float("inf"))):
        hostile = {row.id: entries[row.id] | {"summary": entries[row.id]["summary"] | {name: value}}}
        (tmp_path / SIDECAR).write_text(json.dumps(hostile))
        kept = History(tmp_path)
        read_all(kept)
        assert own(kept) == [row], name
        kept.annotate(row.id, "")


def test_what_else_an_uploaded_file_holds_is_left_behind(comparison: Comparison, tmp_path: Path) -> None:
    content = json.loads(comparison.save(tmp_path / "mine.json").read_text())
    content |= {"path": "/etc/passwd", "self": 1, "timeline": {"baseline": 5}, "monitor": {}, "author": "me"}
    kept = History(tmp_path / "results")
    row = kept.take("mine.json", json.dumps(content).encode())
    assert not row.problem and kept.open(row.id)[1] == {}
    assert set(json.loads((kept.folder / f"{row.id}.json").read_text())) == {"eet_lab_result", "kind", "result"}
    whole = kept.take("h200.json", (history.SHIPPED / "h200-compare-gpt2-xl.json").read_bytes())
    assert set(kept.open(whole.id)[1]) == {"monitor", "timeline"}
    (kept.folder / f"{row.id}.json").write_text(json.dumps(content))
    assert kept.export(row.id, "csv")[1].startswith(b"run,recipe,")
    assert [kept.export(row.id, format)[0] for format in ("json", "csv", "html")] == [
        f"{row.id}.{ending}" for ending in ("json", "csv", "html")
    ]
    kept.rename(row.id, "../mine: the best/")
    assert [kept.export(row.id, format)[0] for format in ("json", "csv")] == ["mine-the-best.json", "mine-the-best.csv"]
    with pytest.raises(ResultError, match="There is no trace"):
        kept.export(row.id, "trace")


def test_links_and_pipes_in_place_of_the_own_files_are_not_followed(comparison: Comparison, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / SIDECAR).symlink_to(precious)
    os.mkfifo(folder / LOCK)
    kept = History(folder)
    row = kept.add(comparison, {})
    kept.rename(row.id, "again")
    assert precious.read_text() == "mine"
    assert own(kept)[0].name == "again"
    (folder / LOCK).unlink()
    (folder / LOCK).symlink_to(precious)
    with pytest.raises(ResultError, match="cannot be written"):
        kept.rename(row.id, "once more")


def test_a_lock_that_is_never_let_go_is_told(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = History(tmp_path)
    row = kept.add(comparison, {})
    monkeypatch.setattr(sidecar, "PATIENCE_S", 0.05)
    with locked(tmp_path / LOCK), pytest.raises(ResultError, match="another workbench keeps them locked"):
        kept.rename(row.id, "x")
    kept.rename(row.id, "x")


def test_two_that_end_at_once_overwrite_nothing_and_keep_their_order(comparison: Comparison, tmp_path: Path) -> None:
    one, two = History(tmp_path), History(tmp_path)
    ids = [kept.add(comparison, {}).id for kept in (one, two) * 5]
    assert [row.id for row in own(one)] == ids[::-1]


def test_a_ladder_that_was_stopped_at_once_is_a_row(climbed: Ladder, comparison: Comparison, tmp_path: Path) -> None:
    kept = History(tmp_path)
    row = kept.add(replace(climbed, rungs=(), left_out=(), partial=True), {})
    assert (row.ttft_ms, row.peak_bytes, row.same, row.problem) == (None, None, "", "")
    with pytest.raises(ResultError, match="stopped before anything was measured"):
        kept.compared(row.id, kept.add(comparison, {}).id)


# On the page


def test_the_folder_is_looked_at_now_and_then_and_never_while_something_is_timed(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy: list[bool] = []
    files = History._files
    monkeypatch.setattr(History, "_files", lambda kept: (busy.append(bench.controller.busy), files(kept))[1])
    do(bench, c.Setting("repeats", 2), c.Compare())
    turn_until(bench, lambda: bench.controller.background.idle)
    assert not any(busy)
    busy.clear()
    turn(bench, 30)
    assert 1 <= len(busy) <= 3, "once a second"


def test_the_last_ladder_is_opened_once_for_what_it_tells(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    inner = History.open
    monkeypatch.setattr(History, "open", lambda kept, id: (opened.append(id), inner(kept, id))[1])
    do(bench, c.Setting("repeats", 1), c.Ladder(), c.Run())
    turn(bench, 30)
    assert "last ladder" in shown(bench, "techniques")["effects_of"] and row(bench, "memory_reuse")["effect"]
    assert len(opened) == 1
    do(bench, c.EditPrompt(0, "Other words"))
    assert shown(bench, "techniques")["effects_of"] == "" and not row(bench, "memory_reuse")["effect"], "of others"


def test_a_row_is_renamed_exported_replayed_and_deleted_and_what_is_shown_stays(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(bench, c.Setting("repeats", 1), c.Compare())
    kept = next(row["id"] for row in shown(bench, "runs")["rows"] if row["shown"])
    do(bench, c.Rename(kept, "mine"), c.Annotate(kept, "a note"))
    [found] = [row for row in shown(bench, "runs")["rows"] if row["id"] == kept]
    assert (found["name"], found["note"]) == ("mine", "a note")
    files: dict[str, bytes] = {}
    keep = lambda message, buffers: files.update({message["name"]: gzip.decompress(*buffers)})  # noqa: E731
    monkeypatch.setattr(bench.controller.page.runs, "send", keep)
    do(bench, c.Export(kept, "csv"))
    assert shown(bench, "runs")["said"] == "Exported: mine.csv"
    do(bench, c.Replay(kept))
    assert shown(bench, "answer")["tab"] == "race" and bench.controller.page.race.race["begin"]
    do(bench, c.Delete(kept))
    assert shown(bench, "runs")["said"].startswith("Deleted: mine, "), "nothing is said of files that are gone"
    assert not bench.controller.results.opened and bench.controller.page.race.race == {}
    assert kept not in [row["id"] for row in shown(bench, "runs")["rows"]]
    do(bench, c.TakeTimeline(), c.Export("", "csv"), c.Export("", "trace"))
    assert errors(bench) == "", "it is here as long as it is shown"
    assert shown(bench, "runs")["said"].endswith("-trace.json")
    do(bench, c.Export("", "json"))
    name = shown(bench, "runs")["said"].removeprefix("Exported: ")
    do(bench, c.Upload(name, b64encode(files[name]).decode()))
    again = next(row["id"] for row in shown(bench, "runs")["rows"] if row["shown"])
    assert set(bench.controller.results.history.open(again)[1]) == {"monitor", "timeline"}
    do(bench, c.OpenRun(again), c.Delete(again), c.OpenRun(again))
    assert "no longer kept" in errors(bench)


def test_every_job_is_kept_and_shown(bench: Workbench) -> None:
    do(bench, c.Setting("repeats", 1), c.Run(), c.Compare())
    rows = [row for row in shown(bench, "runs")["rows"] if row["writable"]]
    assert {row["kind"] for row in rows} == {"run", "compare"}
    assert [row["shown"] for row in rows].count(True) == 1
    latest = next(row for row in rows if row["shown"])
    assert latest["kind"] == "compare" and latest["ttft"].endswith(" ms") and latest["same"]


def test_a_kept_run_opens_with_its_own_choices_and_goes_again(bench: Workbench) -> None:
    do(bench, c.Setting("repeats", 1), c.Compare())
    kept = next(row["id"] for row in shown(bench, "runs")["rows"] if row["shown"])
    do(bench, c.Toggle("mask_removal", False), c.EditPrompt(0, "9 9 9 9"), c.OpenRun(kept))
    assert errors(bench) == ""
    assert shown(bench, "bar")["read_only"] and shown(bench, "techniques")["read_only"]
    assert "kept run" in shown(bench, "bar")["banner"]["text"]
    assert next(row for row in shown(bench, "techniques")["list"] if row["name"] == "mask_removal")["on"]
    assert shown(bench, "inputs")["prompts"]["rows"][0]["text"] == "5 6 7"
    assert shown(bench, "answer")["mode"] == "recording"
    do(bench, c.CloseRun())
    assert not shown(bench, "bar")["read_only"]
    assert shown(bench, "inputs")["prompts"]["rows"][0]["text"] == "9 9 9 9"


def test_the_text_of_a_kept_run_is_what_it_opens_on(bench: Workbench) -> None:
    do(bench, c.Run())
    kept = next(row["id"] for row in shown(bench, "runs")["rows"] if row["shown"])
    assert [tab["name"] for tab in shown(bench, "answer")["tabs"]] == ["texts", "arena", "planners", "table"]
    texts = bench.result.texts
    do(bench, c.Run(), c.OpenRun(kept))
    assert [tab["name"] for tab in shown(bench, "answer")["tabs"]] == ["texts", "table"]
    assert [each["text"] for each in shown(bench, "answer")["words"]] == list(texts)


def test_the_recorded_gpu_races(bench: Workbench) -> None:
    read_all(bench.controller.results.history)
    do(bench, c.Run())
    turn_until(bench, lambda: shown(bench, "bar")["banner"]["action"])
    bench.controller.put(shown(bench, "bar")["banner"]["action"]["command"])
    turn_until(bench, lambda: bench.controller.results.opened)
    assert errors(bench) == ""
    assert "GPT-2 XL" in shown(bench, "bar")["banner"]["text"] or "gpt2-xl" in shown(bench, "bar")["banner"]["text"]
    assert shown(bench, "answer")["tab"] == "race"
    race = bench.controller.page.race.race
    slow, fast = race["lanes"]
    assert slow["ends_ms"][-1] > 10 * fast["ends_ms"][-1], "on one clock, as it was"
    for lane in (slow, fast):
        assert lane["tokens"][-1] == len(lane["pieces"]) or lane["pieces"][-1][0] == len(lane["ends_ms"]) - 1
        assert all(0 <= row < len(race["prompts"]) for _, row, _ in lane["pieces"])
    assert shown(bench, "bar")["device"] == "NVIDIA H200"


def test_every_recording_opens_on_all_of_its_tabs(bench: Workbench) -> None:
    read_all(bench.controller.results.history)
    for recording in bench.controller.results.history.rows():
        do(bench, c.OpenRun(recording.id))
        for tab in [each["name"] for each in shown(bench, "answer")["tabs"]]:
            do(bench, c.Tab(tab))
            assert errors(bench) == "", (recording.id, tab)


def test_two_ticked_runs_stand_side_by_side_without_a_claim(bench: Workbench) -> None:
    do(bench, c.Setting("repeats", 1), c.Compare(), c.Toggle("memory_reuse", False), c.Compare())
    first, second = [row["id"] for row in shown(bench, "runs")["rows"] if row["writable"]]
    do(bench, c.CompareTicked())
    assert "tick two" in errors(bench)
    do(bench, c.Tick(first, True), c.Tick(second, True))
    assert shown(bench, "runs")["can_compare"]
    do(bench, c.Replay(first), c.EditPrompt(0, "9 9"), c.CompareTicked())
    [table] = shown(bench, "answer")["tables"]
    assert "not timed in turn" in table["notes"][0]
    assert bench.controller.page.race.race == {}, "no race goes on unseen"
    banner = shown(bench, "bar")["banner"]["text"]
    assert "side by side" in banner and "(all)" in banner and "(all - memory reuse)" in banner
    labels = {row["id"]: row["label"] for row in shown(bench, "runs")["rows"]}
    assert labels[first] in banner and labels[second].removesuffix(" (2)") in banner
    assert table["head"][1] == labels[first]
    assert not any(shown(bench, view)["read_only"] for view in ("bar", "techniques", "inputs"))
    assert shown(bench, "inputs")["prompts"]["rows"][0]["text"] == "9 9", "the reader's own choices stay"
    assert not row(bench, "memory_reuse")["on"] and row(bench, "mask_removal")["on"]
    do(bench, c.MeasureTicked())
    assert errors(bench) == ""
    recipes = {bench.result.baseline.recipe, bench.result.selection.recipe}
    assert {"memory_reuse" in recipe for recipe in recipes} == {True, False}


def test_one_recipe_twice_is_two_runs(bench: Workbench) -> None:
    do(bench, c.Setting("repeats", 1), c.Run(), c.Run())
    for kept in [each["id"] for each in shown(bench, "runs")["rows"] if each["writable"]]:
        do(bench, c.Tick(kept, True))
    do(bench, c.MeasureTicked())
    assert errors(bench) == "" and bench.result.baseline.recipe == bench.result.selection.recipe
    watching, latency = bench.controller.watching, bench.controller.page.live.latency
    assert set(watching.monitor) == set(watching.memory) == {"baseline", "selection"}
    assert {series for series, _, _ in latency.points} == {0, 1}
    assert [name for name, _ in runs(bench.result)] == ["all (first)", "all (second)"]


def test_words_of_what_is_over_are_taken_down(bench: Workbench) -> None:
    do(bench, c.Run(), c.Run())
    assert "run done in" in bench.controller.status.text
    for kept in [each["id"] for each in shown(bench, "runs")["rows"] if each["writable"]]:
        do(bench, c.Tick(kept, True))
    do(bench, c.CompareTicked())
    assert shown(bench, "bar")["headline"] is None and status(bench) == "ready"
    do(bench, c.Export(kept, "csv"))
    assert shown(bench, "runs")["said"].startswith("Exported: ")
    do(bench, c.Upload("x.json", "!!"))
    assert errors(bench) and shown(bench, "runs")["said"] == "", "a card that tells of a failure stands alone"


def test_nothing_starts_while_a_kept_run_is_open(bench: Workbench) -> None:
    do(bench, c.OpenRun("recorded:h200-compare-gpt2-xl"))
    assert not any(enabled(bench).values())
    assert "Back to my model" in status(bench), "which stands in the banner"
    assert "Back to my model" in shown(bench, "bar")["actions"]["compare"]["tip"]
    do(bench, c.Tab("texts"))
    assert "text means nothing" in shown(bench, "answer")["words"][0]["text"]
    assert "text means nothing" in bench.controller.page.race.race["title"]
    do(bench, c.CloseRun())
    assert enabled(bench)["run"]
    do(bench, c.OpenRun("recorded:h200-compare-demo"))
    assert "text means nothing" not in bench.controller.page.race.race["title"], "its weights are trained"


def test_a_recording_has_its_own_charts_in_place_of_this_machines(bench: Workbench) -> None:
    page = bench.controller.page
    hidden = lambda: [each.box.layout.display == "none" for each in (page.live, page.recorded)]  # noqa: E731
    do(bench, c.OpenRun("recorded:h200-compare-gpt2-xl"))
    assert hidden() == [True, False]
    assert all(chart.title.endswith("· recorded") and chart.points for chart in page.recorded.charts)
    lines = {series: [y for at, _, y in page.recorded.memory.points if at == series] for series in range(4)}
    assert all(lines.values()) and max(lines[0]) < max(lines[1]) < max(lines[3]), "plan, torch's, NVML"
    do(bench, c.OpenRun("recorded:h200-compare-demo"))
    assert {chart.note for chart in page.recorded.charts[1:]} == {"selection: over before anything was sampled"}
    do(bench, c.OpenRun("recorded:h200-ladder-demo"))
    assert hidden() == [True, True], "nothing was sampled"
    do(bench, c.CloseRun())
    assert hidden() == [False, True]


def test_compare_is_held_against_the_pinned_run(bench: Workbench) -> None:
    do(bench, c.Setting("repeats", 1), c.Toggle("memory_reuse", False), c.Run())
    kept = next(row["id"] for row in shown(bench, "runs")["rows"] if row["shown"])
    do(bench, c.Pin(kept, True), c.Toggle("memory_reuse", True))
    assert shown(bench, "bar")["against"] == "all - memory reuse"
    do(bench, c.Compare())
    assert bench.result.baseline.recipe == "pre_padding,mask_removal,packed_prefill"
    do(bench, c.Pin(kept, False))
    assert shown(bench, "bar")["against"] == "baseline"


def test_what_cannot_be_exported_or_loaded_says_why(bench: Workbench) -> None:
    do(bench, c.Export("", "csv"))
    assert "no result to export yet" in errors(bench)
    do(bench, c.Run(), c.Export("", "pdf"))
    assert "formats are" in errors(bench)
    do(bench, c.Upload("x.json", "!!"))
    assert "is incomplete" in errors(bench)
    do(bench, c.Upload("x.json", b64encode(b" " * (MOST_UPLOAD_BYTES + 1)).decode()))
    assert "x.json has more than 7 MiB" in errors(bench) and "Copy it into" in errors(bench)


def test_what_is_exported_goes_to_the_browser_alone_and_comes_back_with_its_words(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[tuple[dict[str, Any], bytes]] = []
    monkeypatch.setattr(
        bench.controller.page.runs, "send", lambda message, buffers: files.append((message, gzip.decompress(*buffers)))
    )
    do(bench, c.Setting("repeats", 1), c.Compare())
    kept = next(each["id"] for each in shown(bench, "runs")["rows"] if each["shown"])
    do(bench, c.Rename(kept, "mine"), c.Annotate(kept, "cold"))
    for format in ("csv", "html", "json"):
        do(bench, c.Export(kept if format == "csv" else "", format))
        assert files[-1][0] == {"kind": "file", "name": f"mine.{format}", "number": len(files)}
        assert shown(bench, "runs")["said"] == f"Exported: mine.{format}" and len(files[-1][1]) > 100
    folder = bench.controller.results.history.folder
    assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == [f"{kept}.json"]
    do(bench, c.Upload("x.json", b64encode(files[-1][1]).decode()))
    assert errors(bench) == "" and shown(bench, "runs")["said"] == "x.json is kept as mine."
    loaded = next(each for each in shown(bench, "runs")["rows"] if each["shown"])
    assert (loaded["name"], loaded["note"], loaded["id"] == kept) == ("mine", "cold", False)
    assert "mine" in shown(bench, "bar")["banner"]["text"]
    odd = json.dumps({**json.loads(files[-1][1]), "words": {"name": 5, "note": "x" * 9999}}).encode()
    do(bench, c.Upload("y.json", b64encode(odd).decode()))
    assert errors(bench) == ""
    monkeypatch.setattr("eet_lab.workbench.views.runs.MOST_DOWNLOAD_BYTES", 10)
    for where in (folder / "exports", None):
        do(bench, c.Export(kept, "csv"))
        told, written = shown(bench, "runs")["said"].split(": ")
        assert len(files) == 3 and told.startswith("Too large") and Path(written).read_bytes() == files[0][1]
        assert where is None or Path(written).parent == where
        monkeypatch.setattr("eet_lab.workbench.history.write_whole", full)


def test_recordings_stay_in_a_list_that_is_cut_and_older_runs_come_on_demand(tmp_path: Path) -> None:
    kept = History(tmp_path)
    recordings = [Row(id=f"recorded:{i}", writable=False) for i in range(6)]
    rows = [*(Row(id=f"{i:03}") for i in range(2 * SHOWN + 3)), *recordings]

    def listed(pages: int) -> dict[str, Any]:
        return runs_state(rows, ["100"], "", kept, "", busy=False, pages=pages)

    ids = [row["id"] for row in listed(1)["rows"]]
    assert ids == [row.id for row in (*rows[:SHOWN], rows[100], *recordings)], "nor is one hidden that is ticked"
    assert listed(1)["more"] == SHOWN + 2
    assert [row["id"] for row in listed(3)["rows"]] == [row.id for row in rows]


def test_older_runs_are_a_click_away(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eet_lab.workbench.views.runs.SHOWN", 1)
    do(bench, c.Setting("repeats", 1), c.Run(), c.Run(), c.Run())
    recordings = len(list(history.SHIPPED.glob("*.json")))
    assert (len(shown(bench, "runs")["rows"]), shown(bench, "runs")["more"]) == (1 + recordings, 2)
    do(bench, c.ShowOlder())
    assert (len(shown(bench, "runs")["rows"]), shown(bench, "runs")["more"]) == (2 + recordings, 1)
