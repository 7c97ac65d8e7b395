"""A ladder as static figures: what each rung takes away, and what the full recipe loses without it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eet_lab.bench import Ladder, Rung
from eet_lab.bench.metrics import MiB
from eet_lab.panels import theme
from eet_lab.panels.theme import rounded
from eet_lab.words import plain, signed


def waterfall(result: Ladder) -> go.Figure:
    """From the baseline to the full recipe: what each technique takes away, in ms and in MiB. The steps add up."""
    rungs = result.rungs
    heads = ("end to end, ms (median, p20 to p80)", "peak memory, MiB")
    fig = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=heads)
    fig.update_layout(theme.figure("Where it comes from", height=640).layout)
    times, deltas = [rung.measurement.total_ms for rung in rungs], [rung.delta_ms for rung in rungs]
    levels, own_ms = [_p50(time) for time in times], [_p50(delta) for delta in deltas]
    sizes = [plain(levels[0]), *map(signed, own_ms[1:])]
    ranges = map(_range, [times[0], *deltas[1:]])
    _fall(fig, 1, rungs, levels, own_ms, [size + spread for size, spread in zip(sizes, ranges, strict=True)])
    peaks = [rung.measurement.memory["peak"] / MiB for rung in rungs]
    own_mib = [rung.delta_bytes / MiB for rung in rungs]
    _fall(fig, 2, rungs, peaks, own_mib, [plain(peaks[0]), *(signed(_coarse(mib)) for mib in own_mib[1:])])
    fig.update_yaxes(tickformat=theme.DIGITS, gridcolor=theme.GRID, zerolinecolor=theme.GRID)
    names = fig.data[0].x
    fig.update_xaxes(showgrid=False, tickvals=names, ticktext=[name.replace(" ", "<br>", 1) for name in names])
    fig.update_annotations(font_size=13)
    return fig.update_layout(showlegend=False, margin={"t": 76})


def left_out(result: Ladder) -> go.Figure:
    """What the full recipe loses without each technique: these do not add up, since techniques help each other."""
    rungs = [rung for rung in result.left_out if rung.delta_ms is not None]
    deltas = [_p50(rung.delta_ms) for rung in rungs]
    fig = theme.figure("The full recipe without one of them: ms added", height=130 + 40 * len(rungs))
    fig.add_bar(
        y=[f"without {name}: {signed(d)} ms" for name, d in zip(titles(rungs), deltas, strict=True)],
        x=rounded(deltas),
        orientation="h",
        marker={"color": [theme.GAIN if d > 0 else theme.LOSS for d in deltas]},
        error_x={
            "type": "data", "symmetric": False, "color": theme.INK, "thickness": 1.2, "width": 5,
            "array": [r.delta_ms.p80 - r.delta_ms.p50 for r in rungs if r.delta_ms],
            "arrayminus": [r.delta_ms.p50 - r.delta_ms.p20 for r in rungs if r.delta_ms],
        },
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", showgrid=False)
    return fig.update_xaxes(title="ms (green: the recipe needs it; red: the recipe is faster without it)")


def _fall(
    fig: go.Figure,
    row: int,
    rungs: Sequence[Rung],
    levels: Sequence[float],
    deltas: Sequence[float],
    texts: Sequence[str],
) -> None:
    measures = ["absolute", *["relative"] * (len(rungs) - 1), "total"]
    names, texts = [*titles(rungs), "all of it"], [*texts, plain(levels[-1])]
    fig.add_waterfall(
        row=row, col=1, x=names, measure=measures, y=rounded([levels[0], *deltas[1:], 0]), text=texts,
        textposition="none",
        connector={"line": {"color": theme.GRID, "width": 1}},
        decreasing={"marker": {"color": theme.GAIN}}, increasing={"marker": {"color": theme.LOSS}},
        totals={"marker": {"color": theme.SELECTION}},
        hovertemplate="%{x}: %{text}<extra></extra>",
    )  # fmt: skip
    # A waterfall's own labels shrink with the bar, and hang below those that fall.
    tops = [levels[0], *map(max, pairwise(levels)), levels[-1]]
    fig.add_scatter(
        row=row, col=1, x=names, y=rounded(tops), mode="text", text=texts, textposition="top center",
        textfont={"size": 12}, cliponaxis=False, hoverinfo="skip",
    )  # fmt: skip
    fig.update_yaxes(row=row, col=1, range=[0, 1.32 * max(tops)])


def _range(spread: Any) -> str:
    if spread is None:
        return ""
    return f"<br><span style='font-size:10px'>{plain(spread.p20)} …<br>{plain(spread.p80)}</span>"


def _coarse(mib: float) -> float:
    """To one decimal, and what would then be nothing to its first digit: a label is as wide as its bar."""
    return round(mib, 1) or float(f"{mib:.1g}")


def titles(rungs: Sequence[Rung]) -> list[str]:
    """The rungs' names."""
    return [rung.title if i or rung.technique else "baseline" for i, rung in enumerate(rungs)]


def _p50(spread: Any) -> float:
    return 0.0 if spread is None else spread.p50
