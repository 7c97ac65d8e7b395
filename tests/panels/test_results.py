"""Results: figures, files, pages and replays."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.bench import Comparison, Ladder, Spread, load_result
from eet_lab.bench.metrics import MEMORY_PARTS, PEAK, TIMES, MiB
from eet_lab.errors import ResultError
from eet_lab.models.load import demo_tokenizer, load
from eet_lab.panels import Workbench, export, figures, jobs, recordings, summary, theme
from eet_lab.panels.outputs import rendered
from eet_lab.panels.recorded_prompts import as_ids
from eet_lab.words import signed
from panels.driving import do, errors, turn_until


def opened(stem: str) -> Any:
    return recordings.open_file(recordings.SHIPPED / f"{stem}.json")[0]


@pytest.fixture(params=[path.stem for path in sorted(recordings.SHIPPED.glob("*.json"))])
def recorded(request: pytest.FixtureRequest) -> Comparison | Ladder:
    return opened(request.param)


def test_results_are_saved_opened_replayed_and_exported(bench: Workbench) -> None:
    do(bench, "compare")
    measured = bench.result
    shelf = bench.desk.shelf
    for button in (shelf.view.save, shelf.view.csv, shelf.view.page):
        button.click()
        turn_until(bench, lambda: bench.desk.idle)
    assert errors(bench) == ""
    written = {path.suffix: path for path in shelf.files.folder.iterdir()}
    assert sorted(written) == [".csv", ".html", ".json"]
    assert load_result(written[".json"]) == measured, "the file is what `load_result` reads"

    page = written[".html"].read_text(encoding="utf-8")
    assert "Plotly.newPlot" in page
    assert 'src="http' not in page

    shelf.view.files.value = str(written[".json"])
    do(bench, "replay")
    assert bench.result.environment.recorded
    assert bench.result.selection == measured.selection
    assert "Recorded on" in shelf.view._words.value
    assert all("recorded on" in chart.title for chart in bench.desk.live.charts)
    assert bench.desk.live.stream.counts == [8, 8]
    assert {series for series, _, _ in bench.desk.live.latency.points} == {0, 1}
    bench.desk.put("replay")
    bench.desk.put("replay")
    bench.desk.tick()
    assert bench.desk.worker._jobs.qsize() <= 1
    turn_until(bench, lambda: bench.desk.idle)
    shelf.view.save.click()
    turn_until(bench, lambda: bench.desk.idle)
    assert json.loads(max(shelf.files.folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns).read_text())[
        "monitor"
    ], "samples are kept on"


def test_a_foreign_file_is_refused_and_not_kept(bench: Workbench) -> None:
    for content in (b"{}", b"\xff\xfe", b'{"eet_lab_result": 1, "kind": "comparison", "result": {}}'):
        do(bench, "upload", [{"name": "mine.json", "content": content}])
        assert "mine.json cannot be used" in errors(bench)
        assert "loaded-" not in errors(bench).split("<details>")[0]
    assert list(bench.desk.shelf.files.folder.glob("*.json")) == []


def test_a_folder_that_cannot_be_written_is_told(
    bench: Workbench, comparison: Comparison, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def full(path: Any, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    kept = recordings.save(tmp_path / "kept.json", comparison, {"baseline": {}})
    before = kept.read_bytes()
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ResultError, match="No space left"):
        recordings.save(kept, comparison, {})
    assert kept.read_bytes() == before, "whole or not at all"
    do(bench, "upload", [{"name": "mine.json", "content": before}])
    assert "No space left" in errors(bench)
    assert "Unexpected" not in errors(bench)
    monkeypatch.undo()
    assert list(tmp_path.glob("**/*.json")) == [kept]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_result_is_written_once(comparison: Comparison, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    written: list[str] = []
    monkeypatch.setattr("eet_lab.bench.results.write_whole", lambda path, content: written.append(content))
    recordings.save(tmp_path / "a.json", comparison, {"baseline": {"label": "x"}})
    [content] = written
    assert json.loads(content)["monitor"] == {"baseline": {"label": "x"}}


def test_samples_that_are_no_numbers_are_told(comparison: Comparison, tmp_path: Any) -> None:
    with pytest.raises(ResultError, match="not finite"):
        recordings.save(tmp_path / "a.json", comparison, {"baseline": {"power_w": [float("nan")]}})
    assert list(tmp_path.iterdir()) == []


def test_damaged_samples_are_refused(comparison: Comparison, tmp_path: Any) -> None:
    path = recordings.save(tmp_path / "a.json", comparison, {"baseline": {"label": "x"}})
    with pytest.raises(ResultError, match="damaged"):
        recordings.open_file(path)


def test_every_figure_can_be_drawn_and_is_small(comparison: Comparison, climbed: Ladder) -> None:
    for result in (comparison, climbed):
        drawn = figures.plot(result, "all")
        assert list(drawn) == list(figures.kinds(result))
        assert len(json.dumps([rendered(fig) for fig in drawn.values()])) < 60_000


def test_a_metric_has_one_name_in_tables_and_tiles(comparison: Comparison) -> None:
    table, tiles = comparison.to_text(), summary.overview(comparison)
    for metric in (*TIMES, PEAK):
        assert metric.name in table
        assert f"<span>{metric.name}</span>" in tiles
    drawn = {trace.name for trace in figures.plot(comparison, "memory").data}
    assert {"weights", "KV cache"} <= drawn <= {*MEMORY_PARTS.values(), "peak"}


def test_a_higher_peak_is_explained_where_activations_grew(comparison: Comparison) -> None:
    memory = comparison.baseline.memory
    wider = {**memory, "peak": 2 * memory["peak"], "activations": memory["activations"] + memory["peak"]}
    grown = replace(comparison, selection=replace(comparison.selection, memory=wider))
    assert "Ladder tells which technique" in summary.overview(grown)
    same = replace(comparison, selection=replace(comparison.selection, memory=memory))
    assert "Ladder tells which technique" not in summary.overview(same)


def test_a_ladder_that_was_stopped_at_once_can_be_shown_kept_and_replayed(
    bench: Workbench, climbed: Ladder, tmp_path: Any
) -> None:
    empty = replace(climbed, rungs=(), left_out=(), partial=True)
    assert "Stopped early" in export.page(empty)
    assert figures.plot(empty, "all") == {}
    for kind in (None, "waterfall"):
        with pytest.raises(ResultError, match="before anything was measured"):
            figures.plot(empty, kind)
    do(bench, "upload", [{"name": "mine.json", "content": empty.save(tmp_path / "empty.json").read_bytes()}])
    assert errors(bench) == ""
    assert bench.result == replace(empty, environment=replace(empty.environment, recorded=True))
    for button in (bench.desk.shelf.view.csv, bench.desk.shelf.view.page, bench.desk.shelf.view.replay):
        button.click()
        turn_until(bench, lambda: bench.desk.idle)
        assert errors(bench) == ""


def test_a_ladder_of_one_rung_can_be_drawn(climbed: Ladder) -> None:
    assert "waterfall" in figures.plot(replace(climbed, rungs=climbed.rungs[:1], left_out=()), "all")


def test_what_is_no_result_is_not_drawn() -> None:
    for other in (None, "a.json", Spread(1, 2, 3)):
        with pytest.raises(ResultError, match=f"plot draws a Comparison or a Ladder, .* not {type(other).__name__}"):
            figures.plot(other)


def test_an_unknown_figure_is_told_with_the_known_ones(comparison: Comparison) -> None:
    with pytest.raises(ResultError, match="latency"):
        figures.plot(comparison, "latencies")


def test_the_waterfall_adds_up(climbed: Ladder) -> None:
    ms = figures.plot(climbed, "waterfall").data[0]
    assert sum(ms.y[:-1]) == pytest.approx(climbed.rungs[-1].measurement.total_ms.p50, rel=2e-3)


def test_the_latency_trace_ends_when_the_run_does(comparison: Comparison) -> None:
    for trace, m in zip(
        figures.plot(comparison, "latency").data, (comparison.baseline, comparison.selection), strict=True
    ):
        assert trace.x[-1] == pytest.approx(sum(m.step_ms), rel=1e-3)


def test_no_figure_or_table_of_a_recording_has_an_exponent(recorded: Comparison | Ladder) -> None:
    for name, fig in figures.plot(recorded, "all").items():
        words = [str(text) for trace in fig.data for text in (trace.text if trace.text is not None else ())]
        words += [str(note.text) for note in fig.layout.annotations] + [str(trace.hovertemplate) for trace in fig.data]
        assert not [word for word in words if re.search(r"\de[+-]\d|\.\dg\b", word)], name
    assert not re.search(r"\de[+-]\d", recorded.to_text())


def test_labels_of_the_waterfall_keep_their_size_above_their_bars() -> None:
    ladder = opened("h200-ladder-gpt2-xl")
    fig = figures.plot(ladder, "waterfall")
    for bars, labels in (fig.data[:2], fig.data[2:]):
        assert (bars.type, bars.textposition) == ("waterfall", "none"), "its own labels shrink"
        assert (labels.mode, labels.textposition, labels.textfont.size) == ("text", "top center", 12)
        level = 0.0
        for top, change in zip(labels.y[:-1], bars.y[:-1], strict=True):
            assert top >= max(level, level + change) - 1e-3 * max(labels.y), "changes are rounded"
            level += change
    assert fig.data[1].text[1].startswith(f"{signed(ladder.rungs[1].delta_ms.p50)}<br>")


def test_every_rung_has_its_own_colour() -> None:
    colors = (theme.BASELINE, *theme.SERIES)
    assert len(opened("h200-ladder-gpt2-xl").rungs) <= len(colors)
    for one, other in combinations(colors, 2):
        assert sum(abs(int(one[i : i + 2], 16) - int(other[i : i + 2], 16)) for i in (1, 3, 5)) > 80, (one, other)


def test_the_legend_is_clear_of_the_title_and_the_mode_bar(climbed: Ladder) -> None:
    for kind in ("latency", "memory"):
        legend = figures.plot(climbed, kind).layout.legend
        assert (legend.y, legend.yref, legend.yanchor) == (0, "container", "bottom")


def test_the_peak_is_written_beside_the_longest_of_bar_and_mark() -> None:
    ladder = opened("h200-ladder-demo")
    fig = figures.plot(ladder, "memory")
    words = fig.data[-1]
    for end, text, rung in zip(words.x, words.text, ladder.rungs, strict=True):
        memory = rung.measurement.memory
        parts = sum(memory.get(key, 0) for key in MEMORY_PARTS)
        assert end == pytest.approx(max(memory["peak"], parts) / MiB, rel=1e-3)
        assert f"{memory['peak'] / MiB:.4g}" in text
    assert "not alive at once" in fig.layout.xaxis.title.text


def test_a_log_axis_says_so_and_has_plain_round_numbers() -> None:
    axis = figures.plot(opened("h200-compare-gpt2-xl"), "latency").layout.yaxis
    assert "log scale" in axis.title.text
    assert {"2", "5", "10", "20"} <= set(axis.ticktext)
    assert theme.log_ticks(1.3, 26) == [2, 5, 10, 20]
    assert len(theme.log_ticks(0.001, 10_000)) < 10


@given(st.floats(1e-4, 1e5), st.floats(1.3, 1e6))
def test_a_log_axis_has_ticks_within_its_ends(low: float, ratio: float) -> None:
    ticks = theme.log_ticks(low, low * ratio)
    assert 1 <= len(ticks) <= 13
    assert all(low <= tick <= low * ratio for tick in ticks)


@pytest.mark.parametrize("ttft_share", [0.1, 0.9])
def test_the_first_token_is_told_where_there_is_room(comparison: Comparison, ttft_share: float) -> None:
    end = max(sum(m.step_ms) for m in (comparison.baseline, comparison.selection))
    told = replace(comparison.baseline, ttft_ms=Spread(*[ttft_share * end] * 3))
    note = figures.plot(replace(comparison, baseline=told), "latency").layout.annotations[0]
    assert note.xanchor == ("left" if ttft_share < 0.5 else "right")


def test_opening_and_replaying_a_recording_say_what_is_shown(bench: Workbench) -> None:
    do(bench, "compare")
    assert bench.desk.status.text.startswith("compare done")
    shelf, live = bench.desk.shelf, bench.desk.live
    shelf.view.files.value = str(recordings.SHIPPED / "h200-ladder-gpt2-xl.json")
    do(bench, "open")
    assert bench.desk.status.text.startswith("showing a recording: ladder of gpt2-xl")
    assert "NVIDIA H200" in bench.desk.status.text
    bench.desk.put("replay")
    turn_until(bench, lambda: live.memory.note)
    bench.desk.put("stop")
    turn_until(bench, lambda: bench.desk.idle)
    assert "holds no samples" in live.memory.note
    assert live.load.note == live.memory.note
    do(bench, "run")
    assert "holds no samples" not in live.memory.note + live.load.note


def test_a_replay_of_another_models_run_shows_ids_alone(recorded: Comparison | Ladder, bench: Workbench) -> None:
    """Prompts as the generated tokens are: in the demo model's vocabulary they would be half words, half ids."""
    path = next(path for path in recordings.SHIPPED.glob("*.json") if recordings.open_file(path)[0] == recorded)
    bench.desk.shelf.view.files.value = str(path)
    bench.desk.put("replay")
    stream = bench.desk.live.stream
    turn_until(bench, lambda: all(stream.texts) and len(stream.texts) == len(recorded.prompts))
    texts = list(stream.texts)
    bench.desk.put("stop")
    turn_until(bench, lambda: bench.desk.idle)
    assert [len(prompt.split()) for prompt in stream.prompts] == list(recorded.prompt_lengths)
    for shown in (*stream.prompts, *texts):
        assert re.fullmatch(r"(\d+ )+", shown)
    vocabulary = demo_tokenizer()
    assert vocabulary is not None
    ids = (list(map(int, prompt.split())) for prompt in stream.prompts)
    assert tuple(map(vocabulary.decode, ids)) == recorded.prompts


def test_prompts_whose_ids_are_not_known_stay_or_are_counted(comparison: Comparison) -> None:
    prompts = {"Return": 1, "a list": 5, "a⟨5000⟩": 3}
    elsewhere = replace(comparison, prompts=tuple(prompts), prompt_lengths=tuple(prompts.values()))
    assert as_ids(elsewhere) == ("Return ", "a list ", "3 tokens "), "of another vocabulary"
    [token] = demo_tokenizer().encode("Return")
    label = load("gpt2", device="meta").label
    borrowed = replace(elsewhere, environment=replace(elsewhere.environment, model="gpt2", model_label=label))
    assert as_ids(borrowed) == (f"{token} ", "a list ", "3 tokens "), "in this one they have other lengths"


def test_a_recording_says_with_what_it_was_taken(recorded: Comparison | Ladder) -> None:
    e = recorded.environment
    own = [e.device, f"driver {e.driver}", f"torch {e.torch}", f"transformers {e.transformers}", f"commit {e.commit}"]
    for shown in (
        summary.overview(recorded).split("</div>")[0],
        export.page(recorded).split("<h1>")[1].split("</p>")[0],
    ):
        assert all(words in shown for words in (*own, e.date[:10])), shown


def test_a_replay_gives_every_row_its_tokens_in_order(comparison: Comparison) -> None:
    for m in (comparison.baseline, comparison.selection):
        rows: list[list[int]] = [[] for _ in m.tokens]
        steps = list(jobs.tokens_by_step(m, comparison.prompt_lengths))
        assert [len(step) for step in steps] == list(m.step_tokens)
        for step in steps:
            for row, token in step:
                rows[row].append(token)
        assert tuple(map(tuple, rows)) == m.tokens


def test_the_page_needs_no_network(climbed: Ladder, tmp_path: Any) -> None:
    page = export.write_page(climbed, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "cdn.plot.ly" not in page.split("<script>", 1)[0]
    assert page.count("Plotly.newPlot(") >= len(figures.kinds(climbed))
