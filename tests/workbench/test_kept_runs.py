"""Kept runs on the page: opened, ticked, pinned, exported, raced."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eet_lab.figures.results import runs
from eet_lab.workbench import Workbench, history
from eet_lab.workbench.history import LONGEST_NAME, LONGEST_NOTE, History
from eet_lab.workbench.opened import models_apart
from eet_lab.workbench.page import VIEWS
from eet_lab.workbench.rows import KeptRun, file_stem
from eet_lab.workbench.views.runs import MOST_UPLOAD_BYTES, SHOWN, runs_state
from workbench.driving import ask, do, enabled, errors, full, read_all, row, shown, status, turn, turn_until


def test_the_folder_is_looked_at_now_and_then_and_never_while_something_is_timed(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy: list[bool] = []
    files = History._files
    monkeypatch.setattr(History, "_files", lambda kept: (busy.append(bench.controller.busy), files(kept))[1])
    do(bench, ask.setting("repeats", 2), ask.compare())
    turn_until(bench, lambda: bench.controller.background.idle)
    assert not any(busy)
    busy.clear()
    turn(bench, 30)
    assert 1 <= len(busy) <= 3, "once a second"


def test_the_last_ladder_is_opened_once_for_what_it_tells(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    inner = History.open
    monkeypatch.setattr(History, "open", lambda kept, id: (opened.append(id), inner(kept, id))[1])
    do(bench, ask.setting("repeats", 1), ask.toggle("mask_removal", False), ask.ladder(), ask.run())
    turn(bench, 30)
    assert "in Ladder 1" in shown(bench, "techniques")["effects_of"] and row(bench, "memory_reuse")["effect"]
    assert len(opened) == 1
    do(bench, ask.ladder())
    newer = replace(bench.result, environment=replace(bench.result.environment, model="another"))
    bench.controller.results.history.add(newer, {})
    do(bench, ask.run())
    assert "in Ladder 2" in shown(bench, "techniques")["effects_of"], "not in Ladder 3, which is of another model"
    first, second, *_ = (each["id"] for each in shown(bench, "runs")["rows"] if each["kind"] == "run")
    do(bench, ask.tick(first, True), ask.tick(second, True), ask.compare_ticked())
    assert row(bench, "memory_reuse")["effect"], "it is of the choices, which stay"
    do(bench, ask.close_run())
    do(bench, ask.edit_prompt(0, "Other words"))
    assert shown(bench, "techniques")["effects_of"] == "" and not row(bench, "memory_reuse")["effect"], "of others"


def test_a_row_is_renamed_exported_replayed_and_deleted_and_what_is_shown_stays(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(bench, ask.setting("repeats", 1), ask.compare())
    kept = next(row["id"] for row in shown(bench, "runs")["rows"] if row["shown"])
    do(bench, ask.rename(kept, "mine"), ask.annotate(kept, "a note"))
    [found] = [row for row in shown(bench, "runs")["rows"] if row["id"] == kept]
    assert (found["name"], found["note"]) == ("mine", "a note")
    files: dict[str, bytes] = {}
    keep = lambda message, buffers: files.update({message["name"]: gzip.decompress(*buffers)})  # noqa: E731
    monkeypatch.setattr(bench.controller.page.runs, "send", keep)
    stem = file_stem("mine", bench.result.environment.date)
    do(bench, ask.export(kept, "csv"))
    assert shown(bench, "runs")["said"] == f"Exported: {stem}.csv"
    do(bench, ask.replay(kept))
    assert shown(bench, "answer")["tab"] == "race" and bench.controller.page.race.race["begin"]
    do(bench, ask.delete(kept))
    said = shown(bench, "runs")["said"]
    assert said.startswith("Deleted: mine, "), "nothing is said of files that are gone"
    assert said.endswith("It is shown until the next result, and no longer kept.") and bench.result is not None
    assert not bench.controller.results.opened and bench.controller.page.race.race == {}
    assert kept not in [row["id"] for row in shown(bench, "runs")["rows"]]
    do(bench, ask.take_timeline(), ask.export("", "csv"), ask.export("", "trace"))
    assert errors(bench) == "", "it is here as long as it is shown"
    assert shown(bench, "runs")["said"].endswith("-trace.json")
    do(bench, ask.export("", "json"))
    name = shown(bench, "runs")["said"].removeprefix("Exported: ")
    do(bench, ask.upload(name, b64encode(files[name]).decode()))
    again = next(row["id"] for row in shown(bench, "runs")["rows"] if row["shown"])
    assert set(bench.controller.results.history.open(again)[1]) == {"monitor", "timeline"}
    do(bench, ask.run(), ask.open_run(again), ask.delete(bench.controller.results._id))
    assert "shown" not in shown(bench, "runs")["said"], "another is"
    do(bench, ask.delete(again))
    assert shown(bench, "runs")["said"].startswith("Deleted: ") and "shown" not in shown(bench, "runs")["said"]
    do(bench, ask.open_run(again))
    assert "no longer kept" in errors(bench)


def test_every_job_is_kept_and_shown_and_opens_with_its_own_choices(bench: Workbench) -> None:
    do(bench, ask.setting("repeats", 1), ask.run(), ask.compare())
    rows = [row for row in shown(bench, "runs")["rows"] if row["writable"]]
    assert {row["kind"] for row in rows} == {"run", "compare"}
    [latest] = [row for row in rows if row["shown"]]
    assert latest["kind"] == "compare" and latest["ttft"].endswith(" ms") and latest["same"]
    kept = latest["id"]
    do(bench, ask.toggle("mask_removal", False), ask.edit_prompt(0, "9 9 9 9"), ask.open_run(kept))
    assert errors(bench) == ""
    assert shown(bench, "bar")["read_only"] and shown(bench, "techniques")["read_only"]
    assert "kept run" in shown(bench, "bar")["banner"]["text"]
    assert next(row for row in shown(bench, "techniques")["list"] if row["name"] == "mask_removal")["on"]
    assert shown(bench, "inputs")["prompts"]["rows"][0]["text"] == "5 6 7"
    assert shown(bench, "answer")["mode"] == "recording"
    do(bench, ask.close_run())
    assert not shown(bench, "bar")["read_only"]
    assert shown(bench, "inputs")["prompts"]["rows"][0]["text"] == "9 9 9 9"


def test_the_text_of_a_kept_run_is_what_it_opens_on(bench: Workbench) -> None:
    do(bench, ask.run())
    kept = next(row["id"] for row in shown(bench, "runs")["rows"] if row["shown"])
    assert [tab["name"] for tab in shown(bench, "answer")["tabs"]] == ["texts", "arena", "planners", "table"]
    texts = bench.result.texts
    do(bench, ask.run(), ask.open_run(kept))
    assert [tab["name"] for tab in shown(bench, "answer")["tabs"]] == ["texts", "table"]
    assert [each["text"] for each in shown(bench, "answer")["words"]] == list(texts)


def test_the_recorded_gpu_races(bench: Workbench) -> None:
    read_all(bench.controller.results.history)
    do(bench, ask.run())
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
        do(bench, ask.open_run(recording.id))
        for tab in [each["name"] for each in shown(bench, "answer")["tabs"]]:
            do(bench, ask.tab(tab))
            assert errors(bench) == "", (recording.id, tab)


def test_two_ticked_runs_stand_side_by_side_without_a_claim(bench: Workbench) -> None:
    do(bench, ask.setting("repeats", 1), ask.setting("max_new_tokens", 4))
    do(bench, ask.compare(), ask.toggle("memory_reuse", False), ask.compare())
    first, second = [row["id"] for row in shown(bench, "runs")["rows"] if row["writable"]]
    do(bench, ask.compare_ticked())
    assert "tick two" in errors(bench)
    do(bench, ask.tick(first, True), ask.tick(second, True))
    assert shown(bench, "runs")["can_compare"]
    do(bench, ask.replay(first), ask.edit_prompt(0, "9 9"), ask.compare_ticked())
    [table] = shown(bench, "answer")["tables"]
    assert "not timed in turn" in table["notes"][0]
    assert bench.controller.page.race.race == {}, "no race goes on unseen"
    banner = shown(bench, "bar")["banner"]["text"]
    assert "side by side" in banner and "(all)" in banner and "(all - memory reuse)" in banner
    labels = {row["id"]: row["label"] for row in shown(bench, "runs")["rows"]}
    assert labels[first] in banner and labels[second].removesuffix(" (2)") in banner
    assert table["head"][1] == labels[first]
    tiles = shown(bench, "answer")["tiles"]
    assert [tile["change"]["text"] for tile in tiles[:2]] == ["not timed in turn"] * 2
    told = [tiles[0]["before"].removeprefix("from "), tiles[0]["value"]]
    cells = [cell.removesuffix(" ms") for cell in table["rows"][2][1:]]
    in_tile, in_table = ([float(each.replace(",", "")) for each in texts] for texts in (told, cells))
    assert in_tile == in_table, "a tile keeps its zeros, and so may be longer"
    assert tiles[3]["change"]["text"] == "identical"
    do(bench, ask.rename(first, "slow one"))
    assert "slow one" in shown(bench, "answer")["tables"][0]["head"][1], "not under its old name"
    assert "slow one" in shown(bench, "bar")["banner"]["text"]
    assert not any(shown(bench, view)["read_only"] for view in ("bar", "techniques", "inputs"))
    assert shown(bench, "inputs")["prompts"]["rows"][0]["text"] == "9 9", "the reader's own choices stay"
    assert not row(bench, "memory_reuse")["on"] and row(bench, "mask_removal")["on"]
    do(bench, ask.measure_ticked())
    assert errors(bench) == ""
    recipes = {bench.result.baseline.recipe, bench.result.selection.recipe}
    assert {"memory_reuse" in recipe for recipe in recipes} == {True, False}


def test_the_page_takes_words_as_long_as_are_kept_and_a_cleared_name_brings_back_the_first(bench: Workbench) -> None:
    assert f"{{ name: {LONGEST_NAME}, note: {LONGEST_NOTE} }}" in VIEWS["runs"]
    do(bench, ask.run())
    [kept] = [each["id"] for each in shown(bench, "runs")["rows"] if each["writable"]]
    do(bench, ask.rename(kept, "mine"), ask.rename(kept, ""))
    assert shown(bench, "runs")["rows"][0]["name"] == "Run 1"


def test_a_kept_run_that_is_open_is_told_of_by_its_present_name(bench: Workbench) -> None:
    do(bench, ask.run())
    [kept] = [each["id"] for each in shown(bench, "runs")["rows"] if each["writable"]]
    do(bench, ask.open_run(kept))
    assert "Run 1" in shown(bench, "bar")["banner"]["text"]
    do(bench, ask.rename(kept, "mine"))
    assert "This is a kept run: mine" in shown(bench, "bar")["banner"]["text"]


def test_runs_of_other_prompts_are_said_to_be_of_others(bench: Workbench) -> None:
    do(bench, ask.run(), ask.edit_prompt(0, "9 9"), ask.run())
    for kept in [each["id"] for each in shown(bench, "runs")["rows"] if each["writable"]]:
        do(bench, ask.tick(kept, True))
    do(bench, ask.compare_ticked())
    assert shown(bench, "answer")["tiles"][3]["change"]["text"] == "of other prompts"
    assert shown(bench, "runs")["can_measure"]
    do(bench, ask.delete(kept))
    assert shown(bench, "bar")["banner"]["text"].startswith("CPU mode"), "nothing is said of a run that is gone"


def test_runs_of_two_models_are_said_to_be_and_cannot_be_measured_again(bench: Workbench) -> None:
    do(bench, ask.run())
    rows = bench.controller.results.history.rows()
    own, other = (next(row for row in rows if row.writable == mine and row.kind != "ladder") for mine in (True, False))
    do(bench, ask.tick(own.id, True), ask.tick(other.id, True))
    listed = shown(bench, "runs")
    differ = f"The models differ: {own.model} and {other.model}."
    assert (listed["can_compare"], listed["can_measure"]) == (True, False)
    assert listed["why_not"].startswith(differ)
    do(bench, ask.compare_ticked())
    assert {tile["change"]["text"] for tile in shown(bench, "answer")["tiles"]} == {"of other models and prompts"}
    [table] = shown(bench, "answer")["tables"]
    assert table["rows"][0] == ["model", own.model, other.model] and "models differ" in table["notes"][0]
    assert "Measure again" not in " ".join(table["notes"])
    assert "models differ" in shown(bench, "bar")["banner"]["text"]
    do(bench, ask.measure_ticked())
    assert "models differ" in errors(bench), "where it is asked for all the same"
    weights = own.weights, "other weights"
    assert models_apart([own, replace(own, weights=weights[1])]) == f"The weights differ: {' and '.join(weights)}."
    assert models_apart([own, replace(own, weights="")]) == "", "a row of before says nothing of them"


def test_one_recipe_twice_is_two_runs(bench: Workbench) -> None:
    do(bench, ask.setting("repeats", 1), ask.run(), ask.run())
    for kept in [each["id"] for each in shown(bench, "runs")["rows"] if each["writable"]]:
        do(bench, ask.tick(kept, True))
    do(bench, ask.measure_ticked())
    assert errors(bench) == "" and bench.result.baseline.recipe == bench.result.selection.recipe
    watching, latency = bench.controller.watching, bench.controller.page.live.latency
    assert set(watching.monitor) == {"baseline", "selection"}, "as files name them"
    assert [*watching.memory] == ["all (first)", "all (second)"] == [each["name"] for each in latency.series]
    assert {series for series, _, _ in latency.points} == {0, 1}
    assert [name for name, _ in runs(bench.result)] == ["all (first)", "all (second)"]
    do(bench, ask.replay(next(each["id"] for each in shown(bench, "runs")["rows"] if each["shown"])))
    assert [lane["name"] for lane in bench.controller.page.race.race["lanes"]] == ["all (first)", "all (second)"]


def test_words_of_what_is_over_are_taken_down(bench: Workbench) -> None:
    do(bench, ask.run(), ask.run())
    assert "run done in" in bench.controller.status.text
    for kept in [each["id"] for each in shown(bench, "runs")["rows"] if each["writable"]]:
        do(bench, ask.tick(kept, True))
    do(bench, ask.compare_ticked())
    assert status(bench) == "ready"
    said = [part["text"] for part in shown(bench, "bar")["headline"]["parts"]]
    assert said == ["two kept runs side by side", "not timed in turn"]
    do(bench, ask.export(kept, "csv"))
    assert shown(bench, "runs")["said"].startswith("Exported: ")
    do(bench, ask.upload("x.json", "!!"))
    assert errors(bench) and shown(bench, "runs")["said"] == "", "a card that tells of a failure stands alone"


def test_nothing_starts_while_a_kept_run_is_open(bench: Workbench) -> None:
    do(bench, ask.open_run("recorded:h200-compare-gpt2-xl"))
    assert not any(enabled(bench).values())
    assert "Back to my model" in status(bench), "which stands in the banner"
    assert "Back to my model" in shown(bench, "bar")["actions"]["compare"]["tip"]
    do(bench, ask.tab("texts"))
    assert "text means nothing" in shown(bench, "answer")["words"][0]["text"]
    assert "text means nothing" in bench.controller.page.race.race["title"]
    do(bench, ask.close_run())
    assert enabled(bench)["run"]
    do(bench, ask.open_run("recorded:h200-compare-demo"))
    assert "text means nothing" not in bench.controller.page.race.race["title"], "its weights are trained"


def test_a_recording_has_its_own_charts_in_place_of_this_machines(bench: Workbench) -> None:
    page = bench.controller.page
    hidden = lambda: [each.box.layout.display == "none" for each in (page.live, page.kept)]  # noqa: E731
    do(bench, ask.open_run("recorded:h200-compare-gpt2-xl"))
    assert hidden() == [True, False]
    assert all(chart.title.endswith("· recorded") and chart.points for chart in page.kept.charts)
    lines = {series: [y for at, _, y in page.kept.memory.points if at == series] for series in range(4)}
    assert all(lines.values()) and max(lines[0]) < max(lines[1]) < max(lines[3]), "plan, torch's, NVML"
    do(bench, ask.open_run("recorded:h200-compare-demo"))
    assert {chart.note for chart in page.kept.charts[1:]} == {"all: over before anything was sampled"}
    assert [each["name"] for each in page.kept.latency.series] == ["baseline", "all"]
    do(bench, ask.open_run("recorded:h200-ladder-demo"))
    assert hidden() == [True, True], "nothing was sampled"
    do(bench, ask.close_run())
    assert hidden() == [False, True]


def test_an_earlier_run_has_its_own_charts_too(bench: Workbench) -> None:
    page, sizes = bench.controller.page, (3, 6)
    for new in sizes:
        do(bench, ask.setting("max_new_tokens", new), ask.setting("repeats", 1), ask.run())
    newest, earlier = (row["id"] for row in shown(bench, "runs")["rows"][:2])
    do(bench, ask.open_run(earlier))
    shows = [each.box.layout.display != "none" for each in (page.live, page.kept)]
    assert shows in ([False, True], [False, False]), "it may have been over before anything was sampled"
    if shows[1]:
        assert all(chart.title.endswith("· kept") for chart in page.kept.charts) and len(page.kept.latency.points) == 3
    do(bench, ask.open_run(newest))
    assert page.live.box.layout.display != "none" and len(page.live.latency.points) == 6


def test_compare_is_held_against_the_pinned_run(bench: Workbench) -> None:
    do(bench, ask.setting("repeats", 1), ask.toggle("memory_reuse", False), ask.run())
    kept = next(row["id"] for row in shown(bench, "runs")["rows"] if row["shown"])
    do(bench, ask.pin(kept, True), ask.toggle("memory_reuse", True))
    assert shown(bench, "bar")["against"] == "all - memory reuse"
    do(bench, ask.rename(kept, "baseline"))  # a name of the reader's, whatever it says
    assert [shown(bench, "bar")[told] for told in ("against", "against_tip")] == ["baseline", "all - memory reuse"]
    for opened, against in (("compare-demo", "baseline"), ("compare-demo-int8", "all"), ("ladder-demo", "baseline")):
        do(bench, ask.open_run(f"recorded:h200-{opened}"))
        assert shown(bench, "bar")["against"] == against, "its own, not that of the next Compare"
    do(bench, ask.close_run())
    do(bench, ask.compare())
    assert bench.result.baseline.recipe == "pre_padding,mask_removal,packed_prefill"
    do(bench, ask.pin(kept, False))
    assert shown(bench, "bar")["against"] == "baseline"


def test_what_cannot_be_exported_or_loaded_says_why(bench: Workbench) -> None:
    do(bench, ask.export("", "csv"))
    assert "no result to export yet" in errors(bench)
    do(bench, ask.run(), ask.export("", "pdf"))
    assert "formats are" in errors(bench)
    do(bench, ask.upload("x.json", "!!"))
    assert "is incomplete" in errors(bench)
    do(bench, ask.upload("x.json", b64encode(b" " * (MOST_UPLOAD_BYTES + 1)).decode()))
    assert "x.json has more than 7 MiB" in errors(bench) and "Copy it into" in errors(bench)


def test_what_is_exported_goes_to_the_browser_alone_and_comes_back_with_its_words(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[tuple[dict[str, Any], bytes]] = []
    monkeypatch.setattr(
        bench.controller.page.runs, "send", lambda message, buffers: files.append((message, gzip.decompress(*buffers)))
    )
    do(bench, ask.setting("repeats", 1), ask.compare())
    kept = next(each["id"] for each in shown(bench, "runs")["rows"] if each["shown"])
    do(bench, ask.rename(kept, "mine"), ask.annotate(kept, "cold"))
    stem = file_stem("mine", bench.result.environment.date)
    for format in ("csv", "html", "json"):
        do(bench, ask.export(kept if format == "csv" else "", format))
        assert files[-1][0] == {"kind": "file", "name": f"{stem}.{format}", "number": len(files)}
        assert shown(bench, "runs")["said"] == f"Exported: {stem}.{format}" and len(files[-1][1]) > 100
    folder = bench.controller.results.history.folder
    assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == [f"{kept}.json"]
    do(bench, ask.upload("x.json", b64encode(files[-1][1]).decode()))
    assert errors(bench) == "" and shown(bench, "runs")["said"] == "x.json is kept as mine."
    loaded = next(each for each in shown(bench, "runs")["rows"] if each["shown"])
    assert (loaded["name"], loaded["note"], loaded["id"] == kept) == ("mine", "cold", False)
    assert "mine" in shown(bench, "bar")["banner"]["text"]
    odd = json.dumps({**json.loads(files[-1][1]), "words": {"name": 5, "note": "x" * 9999}}).encode()
    do(bench, ask.upload("y.json", b64encode(odd).decode()))
    assert errors(bench) == ""
    monkeypatch.setattr("eet_lab.workbench.views.runs.MOST_DOWNLOAD_BYTES", 10)
    for where in (folder / "exports", None):
        do(bench, ask.export(kept, "csv"))
        told, written = shown(bench, "runs")["said"].split(": ")
        assert len(files) == 3 and told.startswith("Too large") and Path(written).read_bytes() == files[0][1]
        assert where is None or Path(written).parent == where
        monkeypatch.setattr("eet_lab.workbench.history.write_whole", full)


def test_recordings_stay_in_a_list_that_is_cut_and_older_runs_come_on_demand(tmp_path: Path) -> None:
    kept = History(tmp_path)
    recordings = [KeptRun(id=f"recorded:{i}", writable=False) for i in range(6)]
    rows = [*(KeptRun(id=f"{i:03}") for i in range(2 * SHOWN + 3)), *recordings]

    def listed(pages: int) -> dict[str, Any]:
        return runs_state(rows, ["100"], "", kept, "", busy=False, pages=pages)

    ids = [row["id"] for row in listed(1)["rows"]]
    assert ids == [row.id for row in (*rows[:SHOWN], rows[100], *recordings)], "nor is one hidden that is ticked"
    assert listed(1)["more"] == SHOWN + 2
    assert [row["id"] for row in listed(3)["rows"]] == [row.id for row in rows]


def test_older_runs_are_a_click_away(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eet_lab.workbench.views.runs.SHOWN", 1)
    do(bench, ask.setting("max_new_tokens", 1), ask.run(), ask.run(), ask.run())
    recordings = len(list(history.SHIPPED.glob("*.json")))
    assert (len(shown(bench, "runs")["rows"]), shown(bench, "runs")["more"]) == (1 + recordings, 2)
    do(bench, ask.show_older())
    assert (len(shown(bench, "runs")["rows"]), shown(bench, "runs")["more"]) == (2 + recordings, 1)
