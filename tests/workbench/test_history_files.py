"""Files in the folder of kept runs that are damaged, hostile, many, or cannot be written."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from eet_lab.bench import Comparison
from eet_lab.errors import ResultError
from eet_lab.paths import write_whole
from eet_lab.workbench import Workbench, history, rows
from eet_lab.workbench.history import BATCH, UNREAD, History, in_memory
from eet_lab.workbench.rows import LOCK, SIDECAR, KeptRun, locked
from eet_lab.workbench.views.bar import UNKEPT, with_unkept
from eet_lab.workbench.views.runs import runs_state
from workbench.driving import ask, do, errors, full, own, read_all, shown

DAMAGED = [
    b"garbage",
    b"[]",
    b'{"a": 5}',
    b'{"a": {"summary": 5, "stamp": "x", "name": 7}}',
    b'{"a": {"stamp": [1, 2], "summary": 5}}',
    b'{"a": {"stamp": [1, 2], "summary": {"name": 5}, "pinned": "yes"}}',
]


NAMES = {
    "": "Compare-1", "../mine: the best/": "mine-the-best", 'a<b>|"c"?*\\d.': "a-b-c-d", "...": "run", "con": "con",
    "größer als 論文": "größer-als-論文", "é" * 79: "é" * 60, "論" * 79: "論" * 40,
}  # fmt: skip
"""What a run is called, and how the name of its file begins: on any system, in one folder, of at most 120 bytes."""


def day(row: KeptRun) -> str:
    """That of the measurement, which the name of an exported file ends with."""
    return str(datetime.fromisoformat(row.date).astimezone().date())


def test_a_folder_that_cannot_be_written_to_keeps_runs_in_memory(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = History(tmp_path / "file" / "folder")
    assert "is a file. Runs are kept in memory" in kept.problem, "from the start"
    row = kept.add(comparison, {"baseline": {}})
    assert "kept in memory" in kept.problem
    name, content = kept.export(row.id, "json")
    assert name == f"Compare-1-{day(row)}.json" and "eet_lab_result" in json.loads(content)
    assert kept.put_down(name, content).read_bytes() == content, "elsewhere"
    assert row.id in {each.id for each in kept.rows()}
    assert kept.open(row.id)[0] is comparison
    named = json.dumps({**json.loads(comparison.to_json()), "words": {"name": "mine", "note": "cold"}}).encode()
    loaded = kept.take("theirs.json", named)
    assert (loaded.name, loaded.note) == ("mine", "cold") and "kept in memory" in kept.problem
    assert loaded in kept.rows() and kept.open(loaded.id)[0].prompts == comparison.prompts
    kept.annotate(row.id, "warm")
    kept.rename(row.id, "x")
    kept.pin(row.id)
    [first] = [each for each in kept.rows() if each.id == row.id]
    assert (first.name, first.note, first.pinned) == ("x", "warm", True) and kept.export(row.id, "csv")[
        0
    ] == f"x-{day(row)}.csv"
    assert kept.problem.count(str(kept.folder)) == 1 and "Workbench(folder=...)" in kept.problem
    monkeypatch.setenv("EET_LAB_RESULTS", str(tmp_path))  # of a command, whose page may hide all cells
    assert in_memory().endswith(": eet-lab lab --dir FOLDER.")
    kept.delete(row.id)
    assert row.id not in {each.id for each in kept.rows()}


def test_a_folder_that_is_read_only_is_told_of_before_anything_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eet_lab.workbench.history.os.access", lambda path, mode: False)
    kept = History(tmp_path / "new")
    assert f"{tmp_path} is read-only" in kept.problem and not kept.folder.exists()
    told = runs_state(kept.rows(), [], "", kept, "", busy=False)["warning"]
    assert "export what you need" in told


def test_a_full_disk_loses_nothing(comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = History(tmp_path)

    monkeypatch.setattr("eet_lab.bench.results.write_whole", full)
    row = kept.add(comparison, {})
    assert "No space left" in kept.problem and kept.open(row.id)[0] is comparison
    monkeypatch.undo()
    kept.add(comparison, {})
    assert kept.problem == ""
    assert row.id in {each.id for each in own(History(tmp_path))}, "written late"


def test_the_bar_says_that_runs_cannot_be_kept(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "memory" not in shown(bench, "bar")["banner"]["text"]
    monkeypatch.setattr(rows, "write_whole", full)
    do(bench, ask.rename("x", "mine"))
    told = shown(bench, "bar")["banner"]
    assert told["text"].startswith(UNKEPT) and "CPU mode" in told["text"]
    assert told["kind"] == "warn" and "No space left" in shown(bench, "runs")["warning"]
    assert with_unkept(None, "why") == {"text": UNKEPT, "action": None, "kind": "warn"}, "on a GPU there is no other"


def test_words_that_cannot_be_written_wait_in_memory(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = History(tmp_path)
    row, other = kept.add(comparison, {}), kept.add(comparison, {})
    kept.annotate(row.id, "cold")

    monkeypatch.setattr(rows, "write_whole", full)
    kept.rename(row.id, "mine")
    assert "No space left" in kept.problem and "mine" in {each.name for each in own(kept)}
    monkeypatch.undo()
    again = History(tmp_path)
    assert "mine" not in {each.name for each in own(again)}
    again.annotate(other.id, "theirs")
    kept.add(comparison, {})
    notes = {each.id: (each.name, each.note) for each in own(History(tmp_path))}
    assert notes[row.id] == ("mine", "cold") and notes[other.id][1] == "theirs" and kept.problem == ""


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
        do(bench, ask.open_run(row.id))
        assert errors(bench), name
    assert any("onerror" in row["name"] for row in shown(bench, "runs")["rows"]), "as text: the page makes no markup"


def test_a_row_says_the_name_of_its_file_once_and_then_the_reason(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "pipe.json")
    (tmp_path / "cut.json").write_text("{")
    kept = History(tmp_path)
    read_all(kept)
    found = {row["name"]: row["problem"] for row in runs_state(kept.rows(), [], "", kept, "", busy=False)["rows"]}
    assert found["pipe.json"] == "is not a regular file, and only those are read. Give a saved result."
    assert found["link.json"] == "is a link, and only regular files are read. Copy the file that it points to."
    assert found["cut.json"].startswith("is not a saved result")


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_list_of_names_counts_as_none(comparison: Comparison, tmp_path: Path, content: bytes) -> None:
    row = History(tmp_path).add(comparison, {})
    (tmp_path / SIDECAR).write_bytes(content)
    again = History(tmp_path)
    read_all(again)
    assert own(again) == [row]
    History(tmp_path).rename(row.id, "again")
    assert own(History(tmp_path))[0].name == "again"


def told(kept: History) -> str:
    """What the head of Runs warns of."""
    return runs_state(kept.rows(), [], "", kept, "", busy=False)["warning"] or ""


def test_a_damaged_list_of_names_is_kept_aside_and_told(comparison: Comparison, tmp_path: Path) -> None:
    kept = History(tmp_path)
    row = kept.add(comparison, {})
    kept.rename(row.id, "mine")
    whole = (tmp_path / SIDECAR).read_bytes()
    assert told(History(tmp_path)) == ""
    for name in (f"{SIDECAR}.damaged", f"{SIDECAR}.damaged.1"):
        (tmp_path / SIDECAR).write_bytes(whole[:-3])
        again = History(tmp_path)
        assert f"Names, notes and pins are missing: {SIDECAR} is damaged (it is not JSON" in told(again)
        read_all(again)
        assert (tmp_path / name).read_bytes() == whole[:-3], "nothing writes over it"
        assert f"{SIDECAR} was damaged, and is kept as {name} (" in told(again)
        assert told(History(tmp_path)) == "" and own(History(tmp_path))[0].number == 1
    (tmp_path / name).write_bytes(whole)
    (tmp_path / name).replace(tmp_path / SIDECAR)
    assert own(again)[0].name == "mine" and told(again) == "", "mended, and put back"
    (tmp_path / SIDECAR).write_bytes(b"{")
    again.look()
    assert "is damaged" in told(again)
    (tmp_path / SIDECAR).write_bytes(whole)
    again.look()
    assert told(again) == "", "mended where it is"


def test_a_damaged_list_of_names_that_cannot_be_kept_aside_stays(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = History(tmp_path).add(comparison, {})
    (tmp_path / SIDECAR).write_bytes(b"{")
    kept = History(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        kept.rename(row.id, "mine")
    assert (tmp_path / SIDECAR).read_bytes() == b"{" and "is damaged" in told(kept)
    assert own(kept)[0].name == "mine", "in memory"


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

    def seconds_to_look_again() -> float:
        begun = time.perf_counter()
        again.rows()
        return time.perf_counter() - begun

    assert any(seconds_to_look_again() < 0.01 for _ in range(3)), "ten times a second"


def test_two_threads_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, write = threading.Barrier(2), Path.write_bytes

    def slow(path: Path, data: bytes) -> int:
        written = write(path, data)
        both.wait(10)
        return written

    monkeypatch.setattr(Path, "write_bytes", slow)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda text: write_whole(tmp_path / "file", text), "ab"))
    assert (tmp_path / "file").read_text() in "ab" and len([*tmp_path.iterdir()]) == 1


def test_files_are_read_in_batches_with_one_write_each(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = comparison.save(tmp_path / "20260101.json")
    for i in range(BATCH + 3):
        os.link(result, tmp_path / f"20260102-{i:02}.json")
    written: list[Any] = []
    monkeypatch.setattr(rows, "write_whole", lambda path, text: (written.append(text), write_whole(path, text)))
    kept = History(tmp_path)
    read_all(kept)
    assert not any(row.problem for row in own(kept)) and len(written) == 2
    (tmp_path / "20260102-00.json").unlink()
    comparison.save(tmp_path / "20260102-00.json")
    os.utime(tmp_path / "20260102-00.json", (1, 1))
    kept.look()
    assert list(kept.unread()) == ["20260102-00"], "it has changed, and no other has"


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
    read_all(kept)
    for name, stem in NAMES.items():
        kept.rename(row.id, name)
        stem = f"{stem}-{day(row)}"
        exported = [kept.export(row.id, format)[0] for format in ("json", "csv", "html")]
        assert exported == [f"{stem}.json", f"{stem}.csv", f"{stem}.html"]
        assert len(f"{stem}-trace.json".encode()) < 255, "the most that file systems take"
    recorded = kept.export("recorded:h200-compare-gpt2-xl", "csv")[0]
    assert recorded.startswith("gpt2-xl-8-prompts-H200-compare-2026-")
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
    monkeypatch.setattr(rows, "PATIENCE_S", 0.05)
    with locked(tmp_path / LOCK), pytest.raises(ResultError, match="another workbench keeps them locked"):
        kept.rename(row.id, "x")
    kept.rename(row.id, "x")
