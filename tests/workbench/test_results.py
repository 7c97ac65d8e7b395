"""Results: figures, files, pages and replays."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import encoders
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.bench import Comparison, Ladder, Spread, compare, load_result
from eet_lab.bench.measured import PEAK, TIMES, MiB, tokens_by_step
from eet_lab.bench.paired import Change
from eet_lab.bench.run_memory import MEMORY_PARTS
from eet_lab.errors import ResultError
from eet_lab.figures import results as figures
from eet_lab.figures import theme
from eet_lab.figures.outputs import rendered
from eet_lab.models.loading import DEMO, DEMO_LABEL, demo_tokenizer, load
from eet_lab.words import brief, mib, plain
from eet_lab.workbench import export, rows
from eet_lab.workbench.history import SHIPPED, History
from eet_lab.workbench.opened import Opened, SideBySide, as_ids
from eet_lab.workbench.views import answer


def opened(stem: str) -> Any:
    return load_result(SHIPPED / f"{stem}.json")


@pytest.fixture(params=[path.stem for path in sorted(SHIPPED.glob("*.json"))])
def recorded(request: pytest.FixtureRequest) -> Comparison | Ladder:
    return opened(request.param)


def test_every_figure_can_be_drawn_and_is_small(comparison: Comparison, climbed: Ladder) -> None:
    for result in (comparison, climbed):
        drawn = figures.plot(result, "all")
        assert list(drawn) == list(figures.kinds(result))
        assert len(json.dumps([rendered(fig) for fig in drawn.values()])) < 60_000


def test_both_numbers_of_a_tile_have_the_same_digits(comparison: Comparison) -> None:
    def timed(ms: float) -> Spread:
        return Spread(ms, ms, ms)

    before, after = comparison.baseline, comparison.selection
    before = replace(before, ttft_ms=timed(3.3004), tpot_ms=timed(0.09003), memory={**before.memory, "peak": 448 * MiB})
    after = replace(after, ttft_ms=timed(3.749), tpot_ms=timed(0.0882), memory={**after.memory, "peak": 1000 * MiB})
    found = answer.tiles(replace(comparison, baseline=before, selection=after))[:3]
    told = [(each["value"], each["before"]) for each in found]
    assert told == [("3.75", "from 3.30"), ("0.0882", "from 0.0900"), ("1,000", "from 448")]


def test_a_tile_and_a_table_say_one_number(comparison: Comparison) -> None:
    time = Spread(28.97, 28.97, 28.97)
    sides = {name: replace(getattr(comparison, name), ttft_ms=time) for name in ("baseline", "selection")}
    told = replace(comparison, **sides)
    assert answer.tiles(told)[0]["value"] == "29.0"
    assert re.search(r"time to first token +29\.0 ms +29\.0 ms", told.to_text())


def test_few_pairs_that_could_not_tell_are_named_beside_the_answer(comparison: Comparison) -> None:
    told = replace(comparison, changes={"ttft_ms": Change(22.4, 12.5, 0.33, 1.55, 6)})
    assert "6 pairs · more pairs could tell" in answer.about(told)
    [tile] = [each for each in answer.tiles(told) if each["label"] == "Time to first token"]
    assert tile["tip"].endswith("One slow run widens an interval of 6 pairs: more pairs of runs could tell.")
    alike = replace(comparison, changes={"ttft_ms": Change(22.4, 22.5, 0.9, 1.1, 6)})
    assert "could tell" not in answer.about(alike) + answer.tiles(alike)[0]["tip"]


def test_the_notes_of_a_table_call_recipes_as_the_page_does() -> None:
    told = "\n".join(answer.table(opened("h200-compare-demo-int8"))["notes"])
    assert "A decode step of all + int8 weights must" in told and "pre_padding" not in told


def test_what_an_output_is_held_against_has_its_name(comparison: Comparison, climbed: Ladder) -> None:
    def told(result: Comparison | Ladder) -> tuple[str, str]:
        words = answer.words(result, "parity")[-1]["text"]
        return figures.plot(result, "parity").layout.title.text, re.search("with the tokens of (.*), are", words)[1]

    assert told(comparison) == told(climbed) == ("The same tokens as the baseline?", "the baseline")
    pinned = replace(comparison, baseline=replace(comparison.baseline, recipe="pre_padding,memory_reuse"))
    assert told(pinned) == ("The same tokens as pre-padding + memory reuse?", "pre-padding + memory reuse")


def test_a_metric_has_one_name_in_tables_and_tiles(comparison: Comparison) -> None:
    table = comparison.to_text()
    assert all(metric.name in table for metric in (*TIMES, PEAK))
    drawn = {trace.name for trace in figures.plot(comparison, "memory").data}
    assert {"weights", "KV cache"} <= drawn <= {*MEMORY_PARTS.values(), "peak"}


@pytest.mark.parametrize(("after", "kind"), [(1000, "dim"), (1019, "dim"), (981, "dim"), (1020, "bad"), (980, "good")])
def test_a_change_of_memory_that_decides_nothing_is_grey(after: int, kind: str) -> None:
    change = answer.memory_change(1000 * MiB, after * MiB)
    assert change["kind"] == kind and (change["text"] == "the same") == (after == 1000)


def test_tiles_rows_tables_and_pages_write_one_number(recorded: Comparison | Ladder) -> None:
    tiles, told = answer.tiles(recorded), rows.facts(rows.end(recorded))
    for tile in tiles[:3]:  # a tile keeps its zeros
        tile["value"] = brief(float(tile["value"].replace(",", "")))
    first, each, peak, *_ = [f"{tile['value']} {tile['unit']}" for tile in tiles]
    assert [told["time to first token"], told["time per token"], told["peak memory"]] == [first, each, peak]
    cells = [cell for row in answer.table(recorded)["rows"] for cell in row]
    page, headline = export.overview(recorded), " ".join(part["text"] for part in answer.headline(recorded))
    for tile, text in zip(tiles, (first, each, peak), strict=False):
        assert any(cell.split(" (")[0] in (text, tile["value"]) for cell in cells), text
        assert tile["change"]["text"] in page and tile["change"]["text"].split(" (")[0] in headline


FASTER, SLOWER, ALIKE = Change(3, 1, 0.3, 0.4, 30), Change(1, 3, 2, 4, 30), Change(1, 1, 0.9, 1.1, 30)


@pytest.mark.parametrize(
    ("first", "each", "whole", "told"),
    [
        (SLOWER, ALIKE, SLOWER, ["first token 3.00 × later", "end to end 3.00 × slower"]),
        (ALIKE, ALIKE, SLOWER, ["first token: cannot tell apart", "end to end 3.00 × slower"]),
        (SLOWER, FASTER, FASTER, ["first token 3.00 × later", "per token 3.00 × faster", "end to end 3.00 × faster"]),
        (FASTER, SLOWER, FASTER, ["first token 3.00 × sooner", "per token 3.00 × slower", "end to end 3.00 × faster"]),
        (FASTER, FASTER, FASTER, ["first token 3.00 × sooner", "per token 3.00 × faster"]),
        (ALIKE, FASTER, FASTER, ["first token: cannot tell apart", "per token 3.00 × faster"]),
        (SLOWER, FASTER, ALIKE, ["first token 3.00 × later", "per token 3.00 × faster"]),
        (SLOWER, None, None, ["first token 3.00 × later"]),
    ],
)
def test_the_headline_tells_the_whole_time_where_its_parts_do_not(
    comparison: Comparison, first: Change, each: Change | None, whole: Change | None, told: list[str]
) -> None:
    changes = {"ttft_ms": first, "tpot_ms": each, "total_ms": whole}
    found = replace(comparison, changes={key: change for key, change in changes.items() if change})
    assert [part["text"] for part in answer.headline(found)][:-2] == told


def test_a_higher_peak_is_explained_where_activations_grew(comparison: Comparison) -> None:
    memory = comparison.baseline.memory
    wider = {**memory, "peak": 2 * memory["peak"], "activations": memory["activations"] + memory["peak"]}
    grown = replace(comparison, selection=replace(comparison.selection, memory=wider))
    assert "whole prompts is wider" in (told := answer.grown(grown)) and "Ladder shows which technique" in told
    packed = replace(grown.baseline, recipe="pre_padding,mask_removal,memory_reuse,packed_prefill")
    unmasked = replace(grown, baseline=packed, selection=replace(grown.selection, recipe="pre_padding,memory_reuse"))
    assert "left out the pads of shorter prompts; each pass builds a mask. " in answer.grown(unmasked)
    alike = replace(grown, baseline=packed, selection=replace(grown.selection, recipe=packed.recipe))
    assert "MiB more. Ladder" in answer.grown(alike), "no reason but one that holds"
    same = replace(comparison, selection=replace(comparison.selection, memory=memory))
    assert answer.grown(same) == ""


def test_a_kept_comparison_of_an_encoder_speaks_of_texts_and_vectors(tmp_path: Any) -> None:
    found = compare(encoders.ours("bert"), [[5, 6, 7], [8, 9, 10, 11]], "all", repeats=2)
    history = History(tmp_path)
    row = history.add(found, {})
    result, beside = history.open(row.id)
    tiles = {tile["label"]: tile for tile in answer.tiles(result)}
    assert list(tiles) == ["End to end", "Throughput", "Peak memory", "Same vectors?"]
    output = tiles["Same vectors?"]
    assert output["unit"] == "off fp32" and output["change"]["text"] == found.parity.verdict
    assert output["value"] == plain(found.parity.max_error, 2) and output["tip"] == found.parity.explanation
    assert answer.headline(result)[0]["text"].startswith("end to end") and "2 texts" in answer.about(result)
    assert [each["heading"] for each in answer.words(result, "texts")] == ["Text 1: 3 tokens", "Text 2: 4 tokens"]
    assert "What was read" in export.page(result)
    assert not Opened.of(row, result, beside).can_race, "it reads all at once"
    pair = SideBySide.of([row, row], [result, result])
    told = {tile["label"]: (tile["value"], tile["change"]["text"]) for tile in pair.tiles()}
    assert told["Same vectors?"] == ("–", "not checked") and "vectors are not kept" in pair.table()["notes"][-1]
    assert answer.tiles_apart(*pair.ends, "of other prompts", True)[-1]["label"] == "Same vectors?"


def test_a_ladder_that_was_stopped_at_once_can_be_shown_and_kept(climbed: Ladder, tmp_path: Any) -> None:
    empty = replace(climbed, rungs=(), left_out=(), partial=True)
    assert "Stopped early" in export.page(empty)
    assert figures.plot(empty, "all") == {}
    for kind in (None, "waterfall"):
        with pytest.raises(ResultError, match="before anything was measured"):
            figures.plot(empty, kind)
    assert answer.tiles(empty) == answer.headline(empty) == []
    row = History(tmp_path).add(empty, {})
    assert not row.problem and row.ttft_ms is None
    assert not Opened.of(row, empty, {}).can_race


def test_a_ladder_of_one_rung_can_be_drawn(climbed: Ladder) -> None:
    assert "waterfall" in figures.plot(replace(climbed, rungs=climbed.rungs[:1], left_out=()), "all")


def test_what_is_no_result_is_not_drawn() -> None:
    for other in (None, "a.json", Spread(1, 2, 3)):
        with pytest.raises(ResultError, match=f"plot takes a Run, Comparison, .* not {type(other).__name__}"):
            figures.plot(other)


def test_an_unknown_figure_is_told_with_the_known_ones(comparison: Comparison) -> None:
    with pytest.raises(ResultError, match="latency"):
        figures.plot(comparison, "latencies")


def test_the_waterfall_adds_up(climbed: Ladder) -> None:
    levels = [rung.measurement.total_ms.p50 for rung in climbed.rungs]
    for log in (False, True):
        bars = figures.plot(climbed, "waterfall", log=log).data[0]
        for base, size, (before, after) in zip(bars.base[1:-1], bars.x[1:-1], pairwise(levels), strict=True):
            assert (base, base + size) == pytest.approx(sorted((before, after)), rel=2e-3)
        assert bars.base[0] + bars.x[0] == pytest.approx(levels[0], rel=2e-3)


def test_the_latency_trace_has_every_step(comparison: Comparison) -> None:
    """Over the steps and not over time: what is 49 times faster would be a line at the left edge."""
    for trace, m in zip(
        figures.plot(comparison, "latency").data, (comparison.baseline, comparison.selection), strict=True
    ):
        assert list(trace.x) == list(range(1, len(m.step_ms) + 1))
        assert list(trace.y) == pytest.approx(list(m.step_ms), rel=1e-3)


def test_no_figure_or_table_of_a_recording_has_an_exponent(recorded: Comparison | Ladder) -> None:
    for name, fig in figures.plot(recorded, "all").items():
        words = [str(text) for trace in fig.data for text in (trace.text if trace.text is not None else ())]
        words += [str(note.text) for note in fig.layout.annotations] + [str(trace.hovertemplate) for trace in fig.data]
        assert not [word for word in words if re.search(r"\de[+-]\d|\.\dg\b", word)], name
    assert not re.search(r"\de[+-]\d", recorded.to_text())


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
        assert mib(memory["peak"]) in text
    assert "not all parts are in memory at the same time" in fig.layout.title.text


def test_a_log_axis_says_so_and_has_plain_round_numbers() -> None:
    compared = opened("h200-compare-gpt2-xl")
    axis = figures.plot(compared, "latency").layout.yaxis
    assert axis.type == "log" and "log scale" in axis.title.text
    assert {"2", "5", "10", "20"} <= set(axis.ticktext)
    assert figures.plot(compared, "latency", log=False).layout.yaxis.type is None
    assert figures.plot(compared, "tokens").layout.xaxis.type == "log"
    assert figures.plot(compared, "tokens", log=False).layout.xaxis.type is None
    assert figures.plot(opened("h200-compare-demo-int8"), "latency").layout.yaxis.type is None
    at_once = replace(compared.selection, step_ms=(0.0, *compared.selection.step_ms[1:]))
    assert figures.plot(replace(compared, selection=at_once), "tokens").layout.xaxis.type == "log"
    assert theme.log_ticks(1.3, 26) == [2, 5, 10, 20]
    assert len(theme.log_ticks(0.001, 10_000)) < 10


@given(st.floats(1e-4, 1e5), st.floats(1.3, 1e6))
def test_a_log_axis_has_ticks_within_its_ends(low: float, ratio: float) -> None:
    ticks = theme.log_ticks(low, low * ratio)
    assert 1 <= len(ticks) <= 13
    assert all(low <= tick <= low * ratio for tick in ticks)


@pytest.mark.parametrize(("step", "side"), [(10, "left"), (90, "right")])
def test_the_first_token_is_told_where_there_is_room(comparison: Comparison, step: int, side: str) -> None:
    rows = len(comparison.baseline.tokens)
    steps = tuple(rows * (at >= step) for at in range(1, 101))
    told = replace(comparison.baseline, step_ms=(1.0,) * 100, step_tokens=steps)
    note = figures.plot(replace(comparison, baseline=told), "latency").layout.annotations[0]
    assert note.xanchor == side and f": {step} steps, median" in note.text


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
    shown = export.page(recorded).split("<h1>")[1].split("</p>")[0]
    assert all(words in shown for words in (*own, e.date[:10], e.model_label)), shown
    if e.model == "demo":
        trained = json.loads((DEMO / "training.json").read_text())["date"]
        assert (e.model_label == DEMO_LABEL) == (e.date[:10] >= trained), "with former weights, and it says so"


def test_a_race_gives_every_row_its_tokens_in_order(comparison: Comparison) -> None:
    for m in (comparison.baseline, comparison.selection):
        rows: list[list[int]] = [[] for _ in m.tokens]
        steps = list(tokens_by_step(m, comparison.prompt_lengths))
        assert [len(step) for step in steps] == list(m.step_tokens)
        for step in steps:
            for row, token in step:
                rows[row].append(token)
        assert tuple(map(tuple, rows)) == m.tokens


def test_the_page_needs_no_network(climbed: Ladder) -> None:
    page = export.page(climbed)
    assert "cdn.plot.ly" not in page.split("<script>", 1)[0]
    assert page.count("Plotly.newPlot(") >= len(figures.kinds(climbed))


def test_lanes_of_a_race_show_what_was_generated(recorded: Comparison | Ladder, tmp_path: Any) -> None:
    """Of another model's run as ids alone: in the demo model's vocabulary they would be half words, half ids."""
    row = History(tmp_path).add(recorded, {})
    _, prompts, lanes = Opened.of(row, recorded, {}).lanes()
    trained = recorded.environment.model == "demo"
    if not trained:
        assert [len(prompt.split()) for prompt in prompts] == list(recorded.prompt_lengths)
        vocabulary = demo_tokenizer()
        assert tuple(vocabulary.decode(list(map(int, prompt.split()))) for prompt in prompts) == recorded.prompts
    for lane, m in zip(lanes, answer.ends(recorded), strict=True):
        said = ["".join(text for _, at, text in lane["pieces"] if at == row) for row in range(len(prompts))]
        assert tuple(said) == m.texts if trained else all(re.fullmatch(r"(\d+ )+", text) for text in said)
        assert lane["ends_ms"][-1] == pytest.approx(sum(m.step_ms), abs=0.01)


def test_the_bar_and_the_list_name_two_recipes_in_one_order(comparison: Comparison) -> None:
    """What changed stands first, in both."""
    other = replace(comparison, baseline=replace(comparison.baseline, recipe="pre_padding"))
    both = rows.Summary.of(other).recipe
    assert both.endswith(" against pre_padding") or " against " in both
    assert answer.about(other).startswith(f"{both} · ")
