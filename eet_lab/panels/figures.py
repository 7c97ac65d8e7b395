"""Finished results as static plotly figures: they still show when the kernel is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go

from eet_lab.bench import Comparison, Ladder, Measurement
from eet_lab.bench.metrics import MEMORY_PARTS, MiB
from eet_lab.errors import ResultError, did_you_mean
from eet_lab.panels import theme
from eet_lab.panels.ladder_figures import left_out, titles, waterfall
from eet_lab.panels.theme import DIGITS, rounded
from eet_lab.words import plain

MEMORY_COLORS = ("#94a3b8", theme.SELECTION, "#93b8f8", "#f59e0b", "#a855f7")


def plot(result: Comparison | Ladder, kind: str | None = None) -> go.Figure | dict[str, go.Figure]:
    """A figure of a result: the first of its kinds unless one is named; "all" for every one by name.

    Comparison: "latency", "tokens", "memory", "sameness". Ladder: "waterfall", "left_out", "latency", "memory",
    "sameness". ResultError for others.
    """
    if not isinstance(result, Comparison | Ladder):
        raise ResultError(
            f"plot draws a Comparison or a Ladder, as compare, ladder and load_result return them, not "
            f"{type(result).__name__}."
        )
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
    fig = theme.figure("Latency of every step", height=420, legend=theme.LEGEND_BELOW)
    for (name, m), color in zip(runs(result), colors(result), strict=True):
        fig.add_scatter(
            x=rounded(accumulate(m.step_ms)),
            y=rounded(m.step_ms),
            customdata=m.step_tokens,
            mode="lines+markers",
            name=name,
            line={"color": color, "width": 1.3},
            marker={"size": 3.5},
            hovertemplate=f"%{{y:{DIGITS}}} ms, %{{customdata}} tokens<br>at %{{x:{DIGITS}}} ms<extra>{name}</extra>",
        )
    steps = [step for _, m in runs(result) for step in m.step_ms if step > 0]
    low, high = 0.9 * min(steps), 1.15 * max(steps)
    if isinstance(result, Comparison):
        longest = max(sum(m.step_ms) for _, m in runs(result))
        _first_token(fig, result.baseline, theme.BASELINE, 1.0, longest)
        _first_token(fig, result.selection, theme.SELECTION, 0.92, longest)
        high *= (high / low) ** 0.24  # the words stand above every line
    fig.update_xaxes(title="time since the run began (ms)", rangemode="tozero", tickformat=DIGITS)
    return fig.update_yaxes(theme.log_axis(low, high, "step (ms)"))


def _first_token(fig: go.Figure, m: Measurement, color: str, height: float, longest: float) -> None:
    """Shade the time until the last row has its first token, and say how long it is, on the side that has the room."""
    if m.ttft_ms is None:
        return
    end, words = m.ttft_ms.p50, f"first tokens: {plain(m.ttft_ms.p50)} ms"
    late = end > 0.6 * longest
    fig.add_vrect(x0=0, x1=end, fillcolor=color, opacity=0.12, line_width=0, layer="below")
    fig.add_annotation(
        text=f"{words} ▸" if late else f"◂ {words}", x=end, xanchor="right" if late else "left", y=height, yref="paper",
        yanchor="top", showarrow=False, font={"color": color, "size": 11},
    )  # fmt: skip


def tokens_over_time(result: Comparison | Ladder) -> go.Figure:
    """How many tokens there were at each moment: the slope is the throughput."""
    fig = theme.figure("Tokens generated over time", height=360, legend=theme.LEGEND_BELOW)
    for (name, m), color in zip(runs(result), colors(result), strict=True):
        x, y = list(accumulate(m.step_ms)), list(accumulate(m.step_tokens))
        line = {"color": color, "width": 2.2}
        fig.add_scatter(x=rounded([0.0, *x]), y=[0, *y], mode="lines", name=name, line=line)
    fig.update_xaxes(title="time since the run began (ms)", rangemode="tozero", tickformat=DIGITS)
    fig.update_yaxes(title="tokens, all prompts", rangemode="tozero")
    return fig


def memory(result: Comparison | Ladder) -> go.Figure:
    """What the peak is made of. Parts are not all alive at once: together they can be longer than the peak."""
    measured = list(runs(result))
    source = {m.memory_source for _, m in measured}
    how = "measured by torch's counters" if source == {"measured"} else "as planned, on the CPU"
    fig = theme.figure(
        f"Memory at its peak, {how}", height=140 + 40 * len(measured), barmode="stack", bargap=0.35,
        legend=theme.LEGEND_BELOW,
    )  # fmt: skip
    names = [name for name, _ in measured]
    for (key, title), color in zip(MEMORY_PARTS.items(), MEMORY_COLORS, strict=True):
        sizes = [m.memory.get(key, 0) / MiB for _, m in measured]
        if any(sizes):
            fig.add_bar(
                y=names,
                x=rounded(sizes),
                name=title,
                orientation="h",
                marker={"color": color},
                hovertemplate=f"%{{x:{DIGITS}}} MiB<extra>{title}</extra>",
            )
    peaks = [m.memory["peak"] / MiB for _, m in measured]
    fig.add_scatter(
        x=rounded(peaks),
        y=names,
        mode="markers",
        name="peak",
        legendgroup="peak",
        marker={"symbol": "line-ns", "size": 22, "line": {"width": 2.5, "color": theme.INK}},
        hovertemplate=f"peak %{{x:{DIGITS}}} MiB<br>(not all of its parts are alive at once)<extra></extra>",
    )
    wholes = [sum(m.memory.get(key, 0) for key in MEMORY_PARTS) / MiB for _, m in measured]
    ends = [max(pair) for pair in zip(peaks, wholes, strict=True)]
    fig.add_scatter(
        x=rounded(ends), y=names, mode="text", text=[f"  {plain(peak)} MiB" for peak in peaks],
        name="peak", legendgroup="peak",
        textposition="middle right", cliponaxis=False, hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    why = "; a bar that runs past its peak has parts that are not alive at once" if ends != peaks else ""
    fig.update_yaxes(autorange="reversed", showgrid=False)
    return fig.update_xaxes(range=[0, max(ends) * 1.16], tickformat=DIGITS, title={"text": f"MiB{why}", "standoff": 8})


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


def runs(result: Comparison | Ladder) -> Iterable[tuple[str, Measurement]]:
    """Every measurement that belongs side by side, with its name; the baseline first."""
    if isinstance(result, Comparison):
        return [("baseline", result.baseline), ("selection", result.selection)]
    return list(zip(titles(result.rungs), (rung.measurement for rung in result.rungs), strict=True))


def colors(result: Comparison | Ladder) -> Sequence[str]:
    """Grey for the baseline, then the house's colours."""
    count = len(list(runs(result))) - 1
    return [theme.BASELINE, *(theme.SERIES[i % len(theme.SERIES)] for i in range(count))]
