"""Figures: what a ladder's say of noise, what a box does to them, and whether they can be read."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest

from eet_lab.bench import Comparison, Ladder, Spread, load_result
from eet_lab.bench.paired import Change
from eet_lab.figures import outputs, plot, theme
from eet_lab.figures.batch_steps import CELLS, token_steps
from eet_lab.figures.ladder import OwnTime, effects
from eet_lab.figures.live import SCRIPT
from eet_lab.figures.outputs import PLOTLY, Figure, FigureBox, rendered
from eet_lab.figures.script import style
from eet_lab.models import load
from eet_lab.paths import PACKAGE
from eet_lab.words import brief, ms_words
from eet_lab.workbench.history import SHIPPED

SIX = "h200-ladder-gpt2-xl"


def recorded(stem: str) -> Any:
    return load_result(SHIPPED / f"{stem}.json")


def changed(ladder: Ladder, at: int, delta_ms: tuple[float, float, float], change: Change | None = None) -> Ladder:
    """The ladder with another change on a rung, end to end; without a `change`, as in a file of before those."""
    rungs = [*ladder.rungs]
    changes = {} if change is None else {"total_ms": change}
    rungs[at] = replace(rungs[at], delta_ms=Spread(*delta_ms), changes=changes)
    return replace(ladder, rungs=tuple(rungs))


def p50(ladder: Ladder, at: int) -> float:
    spread = ladder.rungs[at].measurement.total_ms
    assert spread is not None
    return spread.p50


@pytest.mark.parametrize(
    ("delta_ms", "verdict"),
    [
        ((-300.0, -200.0, 10.0), "cannot tell apart"),
        ((-300.0, -200.0, -10.0), "better"),
        ((10.0, 200.0, 300.0), "worse"),
    ],
)
def test_a_rung_without_pairs_goes_by_its_spread_and_says_so(delta_ms: Any, verdict: str) -> None:
    ladder = changed(recorded(SIX), 3, delta_ms)
    found = OwnTime.of(ladder.rungs[3], ladder.rungs[2].measurement)
    assert (found.verdict, found.num_pairs) == (verdict, 0) and "not paired" in found.words
    level = p50(ladder, 2)
    assert (found.low_level, found.high_level) == (level + delta_ms[0], level + delta_ms[2])
    fig = plot(ladder, "waterfall")
    assert isinstance(fig, go.Figure) and "not paired" in fig.layout.xaxis.title.text


def test_the_paired_interval_is_believed_before_the_spread() -> None:
    ladder = recorded(SIX)
    before, after = p50(ladder, 0), p50(ladder, 1)
    change = Change(before, after, 0.2, 1.1, num_pairs=12)
    unsure = changed(ladder, 1, (after - before,) * 3, change)
    found = OwnTime.of(unsure.rungs[1], unsure.rungs[0].measurement)
    assert (found.verdict, found.num_pairs) == ("cannot tell apart", 12)
    assert (found.low_level, found.high_level) == pytest.approx((0.2 * before, 1.1 * before))
    fig = plot(unsure, "waterfall")
    assert isinstance(fig, go.Figure)
    assert fig.data[0].marker.color[1] == theme.UNSURE and "tell apart" in labels(fig)[1]
    assert fig.data[1].error_x.array[0] == pytest.approx(1.1 * before - after, rel=1e-3)
    assert "range of all 6 pairs" in fig.layout.xaxis.title.text, "the other rungs have no more"


def test_a_ladder_of_few_pairs_says_by_which_rule_they_tell_apart() -> None:
    """Memory reuse took -547 to -123 ms: the range leaves out 0 and is wider than it is far from it."""
    ladder = recorded(SIX)
    found = OwnTime.of(ladder.rungs[3], ladder.rungs[2].measurement)
    assert found.verdict == "cannot tell apart" and found.high_level < p50(ladder, 2)
    up, down = plot(ladder, "waterfall"), plot(ladder, "left_out")
    assert isinstance(up, go.Figure) and isinstance(down, go.Figure)
    for fig in (up, down):
        assert "wider than its gap to 0" in fig.layout.xaxis.title.text.replace("<br>", " ")


def test_an_interval_below_nothing_ends_where_a_logarithmic_axis_begins() -> None:
    ladder = recorded(SIX)
    full = p50(ladder, -1)
    noisy = replace(ladder.left_out[0], changes={}, delta_ms=Spread(-2 * full, 1.0, 2.0))
    fig = plot(replace(ladder, left_out=(noisy, *ladder.left_out[1:])), "left_out", log=True)
    whisker, begin = fig.data[1], 10 ** fig.layout.xaxis.range[0]  # type: ignore[union-attr]
    assert whisker.x[0] - whisker.error_x.arrayminus[0] == pytest.approx(begin, rel=1e-3)


def labels(fig: go.Figure) -> list[str]:
    return [str(text) for trace in fig.data if trace.type == "scatter" and trace.mode == "text" for text in trace.text]


@pytest.mark.parametrize(
    ("without_ms", "said"),
    [
        ((4.0, 5.469, 6.0), "the full recipe is 5.47 ms slower without it, so there it pays"),
        ((-6.0, -5.0, -4.0), "the full recipe is 5 ms faster without it"),
        ((-1.0, 1.0, 2.0), "in the full recipe it makes no measurable difference"),
    ],
)
def test_the_waterfall_colours_what_it_can_tell_and_explains_what_is_red(without_ms: Any, said: str) -> None:
    ladder = changed(changed(recorded(SIX), 1, (-3400.0, -3361.0, -3200.0)), 2, (980.0, 1071.0, 1130.0))
    ladder = changed(ladder, 6, (-1.0, 6.31, 13.0))
    left_out = [
        replace(rung, delta_ms=Spread(*without_ms), changes={}) if rung.technique == "mask_removal" else rung
        for rung in ladder.left_out
    ]
    fig = plot(replace(ladder, left_out=tuple(left_out)))
    assert isinstance(fig, go.Figure)
    colors = list(fig.data[0].marker.color)
    assert (colors[1], colors[2], colors[6]) == (theme.GAIN, theme.LOSS, theme.UNSURE)
    assert labels(fig)[1].strip() == "<b>-3,361</b>" and labels(fig)[6].strip() == "cannot tell apart (+6.31)"
    for remark in (fig.layout.title.text, fig.data[0].customdata[2]):
        told = remark.replace("<br>", " ")
        assert f"Mask removal slower here: 1,600 launches per token, up from 1,127; {said}" in told


def test_a_small_rung_beside_a_large_one_is_seen_with_its_number() -> None:
    ladder = recorded(SIX)
    last = ladder.rungs[-1]
    level = ladder.rungs[-2].measurement.total_ms.p50
    ms, delta = Spread(level - 0.031, level - 0.03, level - 0.029), Spread(-0.031, -0.03, -0.029)
    small = replace(last, measurement=replace(last.measurement, total_ms=ms), delta_ms=delta, changes={})
    fig = plot(replace(ladder, rungs=(*ladder.rungs[:-1], small)), "waterfall")
    assert isinstance(fig, go.Figure)
    assert fig.layout.xaxis.type == "log"
    assert labels(fig)[len(ladder.rungs) - 1].strip() == "<b>-0.03</b>"
    assert fig.data[0].marker.line.width == 2, "a bar of no height is a line"


def test_the_steps_to_the_first_tokens_are_counted() -> None:
    """Of the run that is drawn, whatever it took: the time is a median of all."""
    result = recorded("h200-compare-gpt2-xl")
    fig = plot(result)
    assert isinstance(fig, go.Figure)
    told = [note.text for note in fig.layout.annotations]
    assert f"{max(result.prompt_lengths)} steps, median" in told[0] and ": 1 step, median" in told[1]


def test_every_label_stands_within_the_plot() -> None:
    """Which is 240 px wide in a window of 500, where a character of these takes 5.5."""
    for stem in (SIX, "h200-ladder-gpt2-xl-one-row", "h200-ladder-demo"):
        for log in (True, False):
            fig = plot(recorded(stem), "waterfall", log=log)
            assert isinstance(fig, go.Figure)
            begin, end = fig.layout.xaxis.range
            texts = next(trace for trace in fig.data if trace.type == "scatter" and trace.mode == "text")
            for x, side, label in zip(texts.x, texts.textposition, texts.text, strict=True):
                share = ((math.log10(x) if log else x) - begin) / (end - begin)
                room = 240 * share if side == "middle left" else 240 * (1 - share) + theme.TOOLBAR_PX
                assert room > 5.5 * len(re.sub("<.*?>", "", label).strip()), (stem, log, label)


def test_effects_for_a_list_of_techniques() -> None:
    ladder = changed(changed(recorded(SIX), 1, (-3400.0, -3361.0, -3200.0)), 2, (980.0, 1071.0, 1130.0))
    found = effects(changed(changed(ladder, 6, (-1.0, 6.31, 13.0)), 9, (-22.0, -20.9, -20.0)))
    assert [found[name].kind for name in ("pre_padding", "mask_removal", "persistent_layers")] == ["good", "bad", "dim"]
    assert found["pre_padding"].text == "-3,361 ms" and found["pre_padding"].share == -1
    assert found["mask_removal"].share > 0.5, "what costs goes to the other side"
    assert found["persistent_layers"].text == "cannot tell apart" and found["persistent_layers"].share == 0
    assert -0.1 < found["dependent_launch"].share < -0.05, "21 ms beside 3,361 can be seen"
    assert f"{brief(p50(ladder, 0))} → {ms_words(p50(ladder, 1))}" in found["pre_padding"].tip
    assert all(-1 <= effect.share <= 1 for effect in found.values())
    assert effects(replace(ladder, rungs=())) == {}


def test_a_technique_that_changes_the_first_token_alone_is_named_beside_the_verdict() -> None:
    ladder = recorded(SIX)
    level = p50(ladder, 0)
    rung = changed(ladder, 1, (-1.0, 0.5, 1.0), Change(level, level + 0.5, 0.9, 1.1, 9)).rungs[1]
    rung.changes["ttft_ms"] = Change(90, 45, 0.4, 0.6, 9)
    found = effects(replace(ladder, rungs=(ladder.rungs[0], rung)))["pre_padding"]
    assert (found.text, found.kind, found.detail) == ("cannot tell apart", "dim", "first token sooner")
    assert found.tip.endswith("; first token 2.00 × sooner (1.67 to 2.50)")
    rung.changes["ttft_ms"] = Change(90, 85, 0.8, 1.1, 9)
    assert effects(replace(ladder, rungs=(ladder.rungs[0], rung)))["pre_padding"].detail == ""


def test_what_came_along_says_with_whom() -> None:
    ladder = recorded(SIX)
    rungs = (*ladder.rungs[:2], replace(ladder.rungs[3], along=("mask_removal",)))
    found = effects(replace(ladder, rungs=rungs))
    assert found["mask_removal"].text == "with Memory reuse" and found["mask_removal"].kind == "dim"


def test_text_from_a_file_is_no_markup_in_a_figure() -> None:
    ladder = recorded(SIX)
    hostile = replace(ladder.rungs[1], title='<a href="http://x">now</a>')
    for fig in plot(replace(ladder, rungs=(ladder.rungs[0], hostile, *ladder.rungs[2:])), "all").values():  # type: ignore[union-attr]
        assert "<a href" not in fig.to_json().replace('\\"', '"').replace("\\u003c", "<")


def test_a_box_has_its_figures_height_and_plotly_follows_it() -> None:
    box, one, two = FigureBox(), theme.figure("one", height=260), theme.figure("two", height=420)
    box.show(one, two)
    places = [child for child in box.children if "eet-figure" in child._dom_classes]
    assert [place.layout.height for place in places] == [f"calc({high}px * var(--eet-scale, 1))" for high in (260, 420)]
    drawn = [output["data"][PLOTLY] for output in box.outputs]
    assert [fig["layout"]["height"] for fig in drawn] == [260, 420]
    assert all(fig["config"]["responsive"] for fig in drawn)
    box.show("words")
    assert [output["data"]["text/plain"] for output in box.outputs] == ["words"]
    assert box.children[1].layout.height is None and "eet-figure" not in box.children[1]._dom_classes
    box.show()
    assert box.outputs == () and len(box.children) == 1


def test_a_cells_own_figure_is_bare_json_that_keeps_its_height(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(outputs, "display", lambda thing, **_: shown.append(thing))
    monkeypatch.setattr(outputs.pio.renderers, "default", "plotly_mimetype+notebook")
    fig = plot(recorded("h200-compare-gpt2-xl"))
    assert isinstance(fig, Figure)
    fig._ipython_display_()
    style, data = shown
    assert "js-plotly-plot" in style.data and not data[PLOTLY]["config"]["responsive"]


def test_nothing_in_the_toolbar_sends_a_chart_away() -> None:
    config = rendered(theme.figure())["data"][PLOTLY]["config"]
    assert "sendChartToCloud" in config["modeBarButtonsToRemove"] and config["plotlyServerURL"] == ""


@pytest.mark.parametrize("stem", [path.stem for path in sorted(SHIPPED.glob("*.json"))])
def test_text_in_figures_is_in_the_ink_that_follows_the_page(stem: str) -> None:
    result: Comparison | Ladder = recorded(stem)
    css = style("Figure")
    red, green, blue = (int(theme.INK[i : i + 2], 16) for i in (1, 3, 5))
    assert f"rgb({red}, {green}, {blue})" in css
    figs = plot(result, "all")
    assert isinstance(figs, dict)
    for fig in figs.values():
        assert fig.layout.font.color == theme.INK
        assert fig.layout.xaxis.separatethousands and fig.layout.yaxis.exponentformat == "none"
        fonts = [note.font.color for note in fig.layout.annotations]
        fonts += [trace.textfont.color for trace in fig.data if trace.type == "scatter"]
        assert set(fonts) <= {None, theme.INK}


def test_words_have_a_contrast_of_4_5_on_both_themes() -> None:
    """The tokens as they are read on the cards of JupyterLab's two themes, tinted by a tenth of themselves."""
    css = (PACKAGE / "figures" / "widgets.css").read_text(encoding="utf-8")
    light, dark = re.findall(r"\{ (--eet-accent[^}]*)\}", css)
    for rule, paper in ((light, "#ffffff"), (dark, "#212121")):
        for token, color in re.findall(r"(--eet-(?:accent|good|warn|bad|dim)): (#[0-9a-f]{6})", rule):
            assert contrast(color, paper) >= 4.5, (token, paper)
            assert contrast(color, mixed(color, paper, 0.1)) >= 4.4, (token, "on its own tint")
    for color in (theme.BASELINE, *theme.SERIES):
        assert min(contrast(color, "#ffffff"), contrast(color, "#111111")) >= 2.9, "lines and bars"


PAPERS = ("#ffffff", "#111111")
"""Of JupyterLab's pages, light and dark."""
INKS = ("#212121", "#ffffff")


def test_words_on_cells_and_in_bars_have_a_contrast_of_4_5() -> None:
    for color in (theme.BASELINE, theme.LOSS, *theme.SERIES):
        ink = {"black": "#000000", "white": "#ffffff"}[theme.inside(color)["textfont"]["color"]]
        assert contrast(ink, color) >= 4.5, color
    for name, color in CELLS.items():
        for paper, ink in zip(PAPERS, INKS, strict=True):
            found = re.fullmatch(r"rgba\((\d+),(\d+),(\d+),([\d.]+)\)", color)
            if found is None:
                assert name == "generated", "the page cannot show through: no words there"
                continue
            solid = "#" + "".join(f"{int(part):02x}" for part in found.groups()[:3])
            assert contrast(ink, mixed(solid, paper, float(found[4]))) >= 4.5, (name, paper)
    matrix = token_steps(["a b", "c"], "baseline", model=load("demo", device="cpu"))
    assert {trace.textfont.color for trace in matrix.data if trace.type == "heatmap"} == {theme.INK}


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def mixed(color: str, paper: str, share: float) -> str:
    ends = ((int(color[i : i + 2], 16), int(paper[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in ends)


def test_the_strip_chart_writes_numbers_by_the_one_rule() -> None:
    assert "function brief(" in SCRIPT and "toPrecision(a" not in SCRIPT
