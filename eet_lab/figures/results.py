"""Finished results as static plotly figures: they still show when the kernel is gone."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import or_

import plotly.graph_objects as go

from eet_lab.bench import Comparison, Ladder, Measurement, Run
from eet_lab.bench.fusion import FusionMap
from eet_lab.bench.measured import tokens_by_step
from eet_lab.bench.run_memory import MEMORY_PARTS
from eet_lab.bench.timeline import Timelines
from eet_lab.bench.train_compare import TrainComparison, TrainLadder
from eet_lab.errors import ResultError, check_known
from eet_lab.figures import theme
from eet_lab.figures.fusion import fusion
from eet_lab.figures.ladder import left_out, loss_curves, titles, training_waterfall, waterfall
from eet_lab.figures.theme import DIGITS, rounded
from eet_lab.figures.timeline import timeline_figure
from eet_lab.labels import short_form
from eet_lab.words import MiB, brief, counted, mib, ms_words, signed_mib

MEMORY_COLORS = ("#94a3b8", theme.SELECTION, "#93b8f8", "#d97706", "#a855f7")
TIMELINE_PX = 420
LONGEST = 48
"""Characters of a recipe's name in a legend."""


Result = Run | Comparison | Ladder | TrainComparison | TrainLadder | FusionMap | Timelines


def plot(result: Result, kind: str | None = None, log: bool | None = None) -> go.Figure | dict[str, go.Figure]:
    """A figure of a result: the first of its kinds unless one is named; "all" for every one by name.

    Comparison: "latency", "tokens", "memory", "parity"; of an encoder "tokens" and "memory". Ladder: "waterfall",
    "left_out", "latency", "memory", "parity". TrainLadder: "waterfall", TrainComparison: "losses". Run: "latency",
    "tokens", "memory". FusionMap: "fusion". Timelines: "timeline". `log` sets the axis of those in SCALED; None:
    logarithmic where a linear one would hide something.
    ResultError for other kinds.
    """
    if not isinstance(result, Result):
        raise ResultError(
            "plot takes a Run, Comparison, Ladder, TrainComparison, TrainLadder, FusionMap or Timelines, not "
            f"{type(result).__name__}. compare, ladder and load_result return such results."
        )
    makers = kinds(result)
    if kind == "all":
        return {name: _drawn(result, name, log) for name in makers}
    if not makers:
        what = type(result).__name__.lower()
        raise ResultError(f"This {what} was stopped before anything was measured, so there is nothing to draw.")
    kind = kind or next(iter(makers))
    check_known(ResultError, f"{type(result).__name__} figure", kind, [*makers, "all"])
    return _drawn(result, kind, log)


SCALED = ("waterfall", "left_out", "latency", "tokens")
"""Kinds whose axis can be linear or logarithmic."""


def _drawn(result: Result, kind: str, log: bool | None) -> go.Figure:
    make = kinds(result)[kind]
    return make(result, log=log) if kind in SCALED else make(result)


def kinds(result: Result) -> dict[str, Callable[..., go.Figure]]:
    """The figures that a result has, by name; none of what was stopped before its first step or rung."""
    if isinstance(result, TrainComparison):
        return {"losses": loss_curves}
    if isinstance(result, TrainLadder):
        return {"waterfall": training_waterfall}
    if isinstance(result, FusionMap):
        return {"fusion": fusion}
    if isinstance(result, Timelines):
        return {"timeline": partial(timeline_figure, height=TIMELINE_PX)}
    if isinstance(result, Run):
        drawn = {"latency": latency, "tokens": tokens_over_time, "memory": memory}
        return drawn if any(result.measurement.step_ms) else {}
    if isinstance(result, Comparison) and result.reads:
        return {"tokens": tokens_over_time, "memory": memory}
    if isinstance(result, Comparison):
        return {"latency": latency, "tokens": tokens_over_time, "memory": memory, "parity": parity}
    if not result.rungs:
        return {}
    return {
        "waterfall": waterfall,
        **({"left_out": left_out} if result.left_out else {}),
        "latency": latency,
        "memory": memory,
        **({"parity": parity} if len(result.rungs) > 1 else {}),
    }


def latency(result: Run | Comparison | Ladder, log: bool | None = None) -> go.Figure:
    """The duration of every step, one beside the other: on an axis of steps a run 49 times faster is as long to see.

    The steps until the last row has its first token are shaded. `log` is of the durations' axis.
    """
    fig = theme.figure("Latency of every step, one run of each", height=400, legend=theme.LEGEND_BELOW)
    measured = list(runs(result))
    for (name, m), color in zip(measured, colors(result), strict=True):
        ends = zip(accumulate(m.step_ms), m.step_ms, m.step_tokens, strict=False)
        fig.add_scatter(
            x=list(range(1, len(m.step_ms) + 1)), y=rounded(m.step_ms), mode="lines+markers", name=name,
            customdata=[[brief(at), brief(ms), num] for at, ms, num in ends],
            line={"color": color, "width": 1.3}, marker={"size": 3.5},
            hovertemplate=theme.hover(
                name, "step %{x}: %{customdata[1]} ms, %{customdata[2]} tokens",
                "done %{customdata[0]} ms after the run began",
            ),
        )  # fmt: skip
    steps = [step for _, m in measured for step in m.step_ms if step > 0]
    low, high = 0.9 * min(steps), 1.15 * max(steps)
    log = theme.is_far(m.tpot_ms.p50 if m.tpot_ms else max(m.step_ms) for _, m in measured) if log is None else log
    room = 1.0
    if isinstance(result, Comparison):
        for line, ((_, m), color) in enumerate(zip(measured, colors(result), strict=True)):
            longest = max(len(each.step_ms) for _, each in measured)
            _first_token(fig, m, color, line, longest, result.prompt_lengths)
        room = (high / low) ** 0.4 if log else 1.4  # the words stand above every line
    end = 1.02 * max(len(m.step_ms) for _, m in measured)  # said: words that are not cut would make it longer
    fig.update_xaxes(title="step of the run: one pass of the model", range=[0, end], tickformat=DIGITS)
    return fig.update_yaxes(theme.axis(low if log else 0.0, high, "ms per step", log, room=room))


def _first_token(
    fig: go.Figure, m: Measurement, color: str, line: int, longest: int, prompt_lengths: Sequence[int]
) -> None:
    """Shade the steps until the last row has its first token, and say how long they take, where there is room."""
    if m.ttft_ms is None or not m.step_ms:
        return
    begun = accumulate(({row for row, _ in tokens} for tokens in tokens_by_step(m, prompt_lengths)), or_)
    end = next((step for step, rows in enumerate(begun, 1) if len(rows) == len(m.tokens)), len(m.step_ms))
    words, late = f"first tokens: {counted(end, 'step')}, median {ms_words(m.ttft_ms.p50)}", end > 0.6 * longest
    arrow = f"<span style='color:{color}'>{'▸' if late else '◂'}</span>"
    fig.add_vrect(x0=0, x1=end + 0.5, fillcolor=color, opacity=0.12, line_width=0, layer="below")
    fig.add_annotation(
        text=f"{words} {arrow}" if late else f"{arrow} {words}", x=end + 0.5, xanchor="right" if late else "left", y=1,
        yref="paper", yanchor="top", yshift=-16 * line, showarrow=False, font={"size": 11},
    )  # fmt: skip


def tokens_over_time(result: Run | Comparison | Ladder, log: bool | None = None) -> go.Figure:
    """How many tokens there were at each moment: the slope is the throughput. `log` is of the axis of time."""
    done, of = ("read", "texts") if result.reads else ("generated", "prompts")
    fig = theme.figure(f"Tokens {done} over time", height=360, legend=theme.LEGEND_BELOW)
    measured = [(name, m) for name, m in runs(result) if m.step_ms]
    if log is None:  # of one step, a logarithmic axis would have the end alone
        log = not result.reads and theme.is_far(sum(m.step_ms) for _, m in measured)
    for (name, m), color in zip(runs(result), colors(result), strict=True):
        x, y = list(accumulate(m.step_ms)), list(accumulate(m.step_tokens))
        # A logarithmic axis has no 0.
        first = next((at for at, num in enumerate(y) if num and x[at]), len(x) - 1) if log else 0
        fig.add_scatter(
            x=rounded(x[first:] if log else [0.0, *x]), y=y[first:] if log else [0, *y], mode="lines", name=name,
            line={"color": color, "width": 2.2},
            hovertemplate=theme.hover(name, f"%{{y:{DIGITS}}} tokens after %{{x:{DIGITS}}} ms"),
        )  # fmt: skip
    ends = [x for trace in fig.data for x in (trace.x[:1] if log else ()) + trace.x[-1:]]
    fig.update_xaxes(theme.axis(0.9 * min(ends) if log else 0.0, 1.02 * max(ends), "ms since the run began", log))
    return fig.update_yaxes(title=f"tokens, all {of}", rangemode="tozero", tickformat=DIGITS)


def memory(result: Run | Comparison | Ladder) -> go.Figure:
    """What the peak is made of. Parts are not all alive at once: together they can be longer than the peak."""
    measured = list(runs(result))
    source = {m.memory_source for _, m in measured}
    how = "by torch's counters" if source == {"measured"} else "as planned, on the CPU"
    peaks = [m.memory["peak"] for _, m in measured]
    wholes = [sum(m.memory.get(key, 0) for key in MEMORY_PARTS) for _, m in measured]
    ends = [max(pair) for pair in zip(peaks, wholes, strict=True)]
    why = "<br>not all parts are in memory at the same time" if ends != peaks else ""
    fig = theme.figure(
        f"Peak memory in MiB, {how}{why}", height=110 + 32 * len(measured), barmode="stack", bargap=0.35,
        legend=theme.LEGEND_BELOW,
    )  # fmt: skip
    names = [name for name, _ in measured]
    for (key, title), color in zip(MEMORY_PARTS.items(), MEMORY_COLORS, strict=True):
        sizes = [m.memory.get(key, 0) / MiB for _, m in measured]
        if any(sizes):
            hover = theme.hover(title, f"%{{x:{DIGITS}}} MiB")
            fig.add_bar(
                y=names, x=rounded(sizes), name=title, orientation="h", marker={"color": color}, hovertemplate=hover
            )
    fig.add_scatter(
        x=rounded(peak / MiB for peak in peaks), y=names, mode="markers", name="peak", legendgroup="peak",
        marker={"symbol": "line-ns", "size": 16, "line": {"width": 2.5, "color": theme.INK}},
        hovertemplate=f"peak %{{x:{DIGITS}}} MiB<br>(not all of its parts are alive at once)<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        x=rounded(end / MiB for end in ends), y=names, mode="text", text=list(map(_peak, peaks, [None, *peaks])),
        textfont={"size": 10}, name="peak", legendgroup="peak",
        textposition="middle right", cliponaxis=False, hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    size = 11 if len(measured) < 8 else 10
    fig.update_yaxes(autorange="reversed", showgrid=False, tickfont={"size": size}, dtick=1)
    return fig.update_xaxes(range=[0, max(ends) / MiB * 1.2], tickformat=DIGITS)


def _peak(peak: int, before: int | None) -> str:
    """A peak, and what it is more or less than the one above it; memory is counted, so that every byte of it is one."""
    return f"  {mib(peak)}" + ("" if before is None else f" ({signed_mib(peak - before)})")


def parity(result: Comparison | Ladder) -> go.Figure:
    """Token by token: where each recipe's output is that of what it is held against, and where a row parts from it."""
    (_, baseline), *panels = runs(result)
    num_rows = len(baseline.tokens)
    grid, labels = [], []
    for name, m in panels:
        for row, (ours, theirs) in enumerate(zip(m.tokens, baseline.tokens, strict=True)):
            grid.append([int(a != b) for a, b in zip(ours, theirs, strict=False)])
            labels.append(f"{name}, prompt {row + 1}" if len(panels) > 1 else f"prompt {row + 1}")
    fig = theme.figure(f"The same tokens as {theme.words(other_side(result))}?", height=min(90 + 26 * len(grid), 420))
    fig.add_heatmap(
        z=grid, y=labels, zmin=0, zmax=1, showscale=False, xgap=1, ygap=1 if len(grid) > 12 else 3,
        colorscale=[[0, theme.GAIN], [1, theme.LOSS]],
        hovertemplate=theme.hover("%{y}", "new token %{x}: %{z}", "0 is the same, 1 another"),
    )  # fmt: skip
    one_each = len(panels) == 1
    fig.update_yaxes(
        autorange="reversed", showgrid=False, zeroline=False, tickfont={"size": 11}, type="category",
        tickvals=list(range(num_rows)) if one_each else [num_rows * (i + 0.5) - 0.5 for i in range(len(panels))],
        ticktext=labels if one_each else [name for name, _ in panels],
    )  # fmt: skip
    for at in range(1, len(panels)):
        fig.add_hline(y=num_rows * at - 0.5, line={"color": theme.INK, "width": 1})
    words = "new token; green: the same, red: different"
    return fig.update_xaxes(title=words, showgrid=False, zeroline=False)


def other_side(result: Comparison | Ladder) -> str:
    """What a result is held against: "the baseline", or another recipe in short."""
    recipe = result.baseline.recipe if isinstance(result, Comparison) else result.rungs[0].measurement.recipe
    return "the baseline" if recipe == "baseline" else short_form(recipe, result.environment.device_kind)


def runs(result: Run | Comparison | Ladder) -> list[tuple[str, Measurement]]:
    """Every measurement that belongs side by side, with its name for a figure; the baseline first."""
    if isinstance(result, Run):
        return [("run", result.measurement)]
    if isinstance(result, Ladder):
        names = titles(result.rungs)
        return [(theme.words(name), rung.measurement) for name, rung in zip(names, result.rungs, strict=True)]
    pair = result.baseline, result.selection
    names = pair_names([m.recipe for m in pair], result.environment.device_kind)
    return list(zip(map(theme.words, names), pair, strict=True))


def pair_names(recipes: Sequence[str], device: str) -> list[str]:
    """The recipes of baseline and selection in short, told apart."""
    short = [short_form(recipe, device) for recipe in recipes]
    named = [textwrap.shorten(name, LONGEST, placeholder=" …") for name in short]
    if len(set(named)) == len(named):
        return named
    alike = len(set(short)) == 1  # else only what was cut off differs
    return [f"{named[0]} ({word})" for word in ("first", "second")] if alike else ["baseline", "selection"]


def colors(result: Run | Comparison | Ladder) -> Sequence[str]:
    """Grey for the baseline, then the house's colours."""
    if isinstance(result, Run):
        return [theme.SELECTION if result.recipe != "baseline" else theme.BASELINE]
    count = len(runs(result)) - 1
    return [theme.BASELINE, *(theme.SERIES[i % len(theme.SERIES)] for i in range(count))]
