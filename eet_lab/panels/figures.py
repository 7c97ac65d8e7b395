"""Finished results as static plotly figures: they still show when the kernel is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eet_lab.bench import Comparison, Ladder, Measurement, Rung
from eet_lab.bench.metrics import MEMORY_PARTS, MiB
from eet_lab.errors import ResultError, did_you_mean
from eet_lab.panels import theme

MEMORY_COLORS = ("#94a3b8", theme.SELECTION, "#93b8f8", "#f59e0b", "#a855f7")


def plot(result: Comparison | Ladder, kind: str | None = None) -> go.Figure | dict[str, go.Figure]:
    """A figure of a result: the first of its kinds unless one is named; "all" for every one by name.

    Comparison: "latency", "tokens", "memory", "sameness". Ladder: "waterfall", "left_out", "latency", "memory",
    "sameness". ResultError for others.
    """
    makers = kinds(result)
    if kind == "all":
        return {name: make(result) for name, make in makers.items()}
    if not makers:
        raise ResultError("This ladder was stopped before anything was measured, so there is nothing to draw.")
    kind = kind or next(iter(makers))
    if kind not in makers:
        raise ResultError(
            f"There is no figure {kind!r} of a {type(result).__name__}.{did_you_mean(kind, makers)} "
            f"Kinds are {', '.join(makers)} and all."
        )
    return makers[kind](result)


def kinds(result: Comparison | Ladder) -> dict[str, Callable[[Any], go.Figure]]:
    """The figures that a result has, by name; none of a ladder that was stopped before its first rung."""
    if isinstance(result, Comparison):
        return {"latency": latency, "tokens": tokens_over_time, "memory": memory, "sameness": sameness}
    if not result.rungs:
        return {}
    return {
        "waterfall": waterfall,
        **({"left_out": left_out} if result.left_out else {}),
        "latency": latency,
        "memory": memory,
        **({"sameness": sameness} if len(result.rungs) > 1 else {}),
    }


def latency(result: Comparison | Ladder) -> go.Figure:
    """Every step's duration on one time axis, with the time until the last row has its first token shaded."""
    fig = theme.figure("Latency of every step", height=380)
    for (name, m), color in zip(runs(result), colors(result), strict=True):
        fig.add_scatter(
            x=_rounded(accumulate(m.step_ms)),
            y=_rounded(m.step_ms),
            customdata=m.step_tokens,
            mode="lines+markers",
            name=name,
            line={"color": color, "width": 1.3},
            marker={"size": 3.5},
            hovertemplate="%{y:.3g} ms, %{customdata} tokens<br>at %{x:.4g} ms<extra>" + name + "</extra>",
        )
    if isinstance(result, Comparison):
        _first_token(fig, result.baseline, theme.BASELINE, 0.12, 1.0)
        _first_token(fig, result.selection, theme.SELECTION, 0.12, 0.92)
    fig.update_xaxes(title="time since the run began (ms)", rangemode="tozero")
    fig.update_yaxes(title="step (ms)", type="log", dtick="D2", exponentformat="none")
    return fig


def _first_token(fig: go.Figure, m: Measurement, color: str, opacity: float, height: float) -> None:
    """Shade the time until the last row has its first token, and say how long it is."""
    if m.ttft_ms is None:
        return
    fig.add_vrect(x0=0, x1=m.ttft_ms.p50, fillcolor=color, opacity=opacity, line_width=0, layer="below")
    fig.add_annotation(
        text=f"◂ first tokens: {m.ttft_ms.p50:.3g} ms", x=m.ttft_ms.p50, xanchor="left", y=height, yref="paper",
        yanchor="top", showarrow=False, font={"color": color, "size": 11},
    )  # fmt: skip


def tokens_over_time(result: Comparison | Ladder) -> go.Figure:
    """How many tokens there were at each moment: the slope is the throughput."""
    fig = theme.figure("Tokens generated over time", height=340)
    for (name, m), color in zip(runs(result), colors(result), strict=True):
        x, y = list(accumulate(m.step_ms)), list(accumulate(m.step_tokens))
        line = {"color": color, "width": 2.2}
        fig.add_scatter(x=_rounded([0.0, *x]), y=[0, *y], mode="lines", name=name, line=line)
    fig.update_xaxes(title="time since the run began (ms)", rangemode="tozero")
    fig.update_yaxes(title="tokens, all prompts", rangemode="tozero")
    return fig


def memory(result: Comparison | Ladder) -> go.Figure:
    """What the peak is made of."""
    measured = list(runs(result))
    source = {m.memory_source for _, m in measured}
    how = "measured by torch's counters" if source == {"measured"} else "as planned, on the CPU"
    fig = theme.figure(
        f"Memory at its peak in MiB, {how}", height=150 + 46 * len(measured), barmode="stack", bargap=0.35
    )
    names = [name for name, _ in measured]
    for (key, title), color in zip(MEMORY_PARTS.items(), MEMORY_COLORS, strict=True):
        sizes = [m.memory.get(key, 0) / MiB for _, m in measured]
        if any(sizes):
            fig.add_bar(
                y=names,
                x=_rounded(sizes),
                name=title,
                orientation="h",
                marker={"color": color},
                hovertemplate="%{x:.4g} MiB<extra>" + title + "</extra>",
            )
    peaks = [m.memory["peak"] / MiB for _, m in measured]
    fig.add_scatter(
        x=_rounded(peaks),
        y=names,
        mode="markers+text",
        name="peak",
        text=[f" {peak:.4g} MiB" for peak in peaks],
        textposition="middle right",
        cliponaxis=False,
        marker={"symbol": "line-ns", "size": 22, "line": {"width": 2.5, "color": theme.INK}},
        hovertemplate="peak %{x:.4g} MiB<extra></extra>",
    )
    fig.update_yaxes(autorange="reversed", showgrid=False)
    fig.update_xaxes(range=[0, max(peaks) * 1.16])
    return fig.update_layout(legend={"x": 0, "xanchor": "left", "y": -0.3, "yanchor": "top", "traceorder": "normal"})


def sameness(result: Comparison | Ladder) -> go.Figure:
    """Token by token: where each recipe's output is the baseline's, and where a row parts from it."""
    panels = [(name, m) for name, m in runs(result)][1:]
    baseline = next(iter(runs(result)))[1]
    fig = theme.figure("The same tokens as the baseline?", height=110 + 26 * len(panels) * len(baseline.tokens))
    grid, labels = [], []
    for name, m in panels:
        for row, (ours, theirs) in enumerate(zip(m.tokens, baseline.tokens, strict=True)):
            grid.append([int(a != b) for a, b in zip(ours, theirs, strict=False)])
            labels.append(f"{name}, prompt {row + 1}" if len(panels) > 1 else f"prompt {row + 1}")
    fig.add_heatmap(
        z=grid, y=labels, zmin=0, zmax=1, showscale=False, xgap=1, ygap=4,
        colorscale=[[0, theme.GAIN], [1, theme.LOSS]],
        hovertemplate="%{y}, new token %{x}: %{z}<extra>0 same, 1 other</extra>",
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", showgrid=False, type="category")
    fig.update_xaxes(title="new token", showgrid=False, zeroline=False)
    return fig


def waterfall(result: Ladder) -> go.Figure:
    """From the baseline to the full recipe: what each technique takes away, in ms and in MiB. The steps add up."""
    rungs = result.rungs
    titles = ("end to end, ms (median, p20 to p80)", "peak memory, MiB")
    fig = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=titles)
    fig.update_layout(theme.figure("Where it comes from", height=560).layout)
    times, deltas = [rung.measurement.total_ms for rung in rungs], [rung.delta_ms for rung in rungs]
    _fall(fig, 1, rungs, [_p50(t) for t in times], [_p50(d) for d in deltas], [*map(_range, [times[0], *deltas[1:]])])
    peaks = [rung.measurement.memory["peak"] / MiB for rung in rungs]
    _fall(fig, 2, rungs, peaks, [rung.delta_bytes / MiB for rung in rungs], [""] * len(rungs))
    fig.update_yaxes(rangemode="tozero", gridcolor=theme.GRID, zerolinecolor=theme.GRID)
    fig.update_xaxes(showgrid=False)
    return fig.update_layout(showlegend=False, margin={"t": 76})


def left_out(result: Ladder) -> go.Figure:
    """What the full recipe loses without each technique: these do not add up, since techniques help each other."""
    rungs = [rung for rung in result.left_out if rung.delta_ms is not None]
    deltas = [_p50(rung.delta_ms) for rung in rungs]
    fig = theme.figure("The full recipe without one of them: ms added", height=130 + 40 * len(rungs))
    fig.add_bar(
        y=[f"without {name}: {d:+.3g} ms" for name, d in zip(_titles(rungs), deltas, strict=True)],
        x=_rounded(deltas),
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


def runs(result: Comparison | Ladder) -> Iterable[tuple[str, Measurement]]:
    """Every measurement that belongs side by side, with its name; the baseline first."""
    if isinstance(result, Comparison):
        return [("baseline", result.baseline), ("selection", result.selection)]
    return list(zip(_titles(result.rungs), (rung.measurement for rung in result.rungs), strict=True))


def colors(result: Comparison | Ladder) -> Sequence[str]:
    """Grey for the baseline, then the house's colours."""
    count = len(list(runs(result))) - 1
    return [theme.BASELINE, *(theme.SERIES[i % len(theme.SERIES)] for i in range(count))]


def _fall(
    fig: go.Figure,
    row: int,
    rungs: Sequence[Rung],
    levels: Sequence[float],
    deltas: Sequence[float],
    ranges: Sequence[str],
) -> None:
    measures = ["absolute", *["relative"] * (len(rungs) - 1), "total"]
    signed = [f"{levels[0]:.4g}", *(f"{delta:+.3g}" for delta in deltas[1:])]
    texts = [f"{text}<br>{spread}" if spread else text for text, spread in zip(signed, ranges, strict=True)]
    fig.add_waterfall(
        row=row, col=1, x=[*_titles(rungs), "all of it"], measure=measures, y=_rounded([levels[0], *deltas[1:], 0]),
        text=[*texts, f"{levels[-1]:.4g}"], textposition="outside", cliponaxis=False,
        connector={"line": {"color": theme.GRID, "width": 1}},
        decreasing={"marker": {"color": theme.GAIN}}, increasing={"marker": {"color": theme.LOSS}},
        totals={"marker": {"color": theme.SELECTION}},
        hovertemplate="%{x}: %{text}<extra></extra>",
    )  # fmt: skip


def _range(spread: Any) -> str:
    return "" if spread is None else f"<span style='font-size:10px'>{spread.p20:.3g} … {spread.p80:.3g}</span>"


def _titles(rungs: Sequence[Rung]) -> list[str]:
    return [rung.title if i or rung.technique else "baseline" for i, rung in enumerate(rungs)]


def _p50(spread: Any) -> float:
    return 0.0 if spread is None else spread.p50


def _rounded(values: Iterable[float]) -> list[float]:
    """Four digits: a saved notebook need not carry more."""
    return [float(f"{value:.4g}") for value in values]
