"""A step as a timeline: what the host hands over, and what the device does, the baseline above the selection."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from html import escape

import numpy as np
import plotly.graph_objects as go

from eet_lab.bench.timeline import DEVICE, Span, Timeline, Timelines
from eet_lab.figures import theme
from eet_lab.labels import short_form
from eet_lab.words import counted, ms_words, sized

PHASES = {
    "forward": "rgba(59, 130, 246, 0.16)",
    "backward": "rgba(217, 119, 6, 0.16)",
    "update": "rgba(14, 159, 110, 0.22)",
}
"""Shades of a training step's phases."""
KINDS = {
    "phase": ("phase of the step", theme.GRID),
    "op": ("op of the engine", "rgba(125, 133, 144, 0.35)"),
    "call": ("call of PyTorch", theme.SERIES[1]),
    "launch": ("launch", theme.SERIES[1]),
    "wait": ("wait for the device", theme.SERIES[4]),
    "memory": ("memory from the driver", theme.LOSS),
    "own kernel": ("our kernel", theme.GAIN),
    "gemm": ("cuBLAS kernel", theme.SERIES[0]),
    "torch kernel": ("PyTorch kernel", theme.SERIES[3]),
    "copy": ("copy or fill", theme.SERIES[6]),
    "other kernel": ("other kernel", theme.SERIES[5]),
}
"""Kinds of spans, in the order of the legend: what each is called there, and its colour."""
LANES = {"host": 2.6, "device": 1.6, "busy": 0.4}
WIDTHS, WIDTH = {"phase": 1.0, "op": 0.86}, 0.56
"""Heights of a bar in its lane: what runs within an op or a phase is drawn on it."""
BUSY_HEIGHT, BUSY_BINS = 0.8, 120

TOP, BOTTOM = 24, 62
"""Room for the upper step's headline, and for marks of time, their title and two lines of the legend."""
LINE_PX = 14
"""The height of a headline's second line, where steps under the profiler took longer than the headline says."""
LEAST_US_IN_MS = 10_000
"""The shortest axis in ms: below it, thousands of µs can be read."""
LONGEST_LINE = 72
ONE_EACH = "One step of each, and no measure of the difference: how long steps take is in Latency."
SLOWED = 1.05
"""The least ratio of a step under the profiler to one without it that the axis and the caption tell."""


def timeline_figure(timelines: Timelines, height: int, own_width: bool = False) -> go.Figure:
    """The baseline above the selection on one clock, or each over the whole width; zoom and pan go along time alone.

    A bar is at least a pixel wide, so far out the device looks busy all the time: a third lane tells its share.
    A trace is all spans that share a name, so that a hover's words are written once. Its title is left to the page:
    see `caption`.
    """
    slowed, longest = _slowed(timelines), max(timeline.step_us for timeline in timelines)
    fig = theme.subplots(
        2, 1, height=height, layout={"barmode": "overlay"}, vertical_spacing=0.24 + 0.03 * slowed,
        subplot_titles=[_drawn(each) if slowed else headline(each) for each in timelines],
    )  # fmt: skip
    unit, scale = ("ms", 1e-3) if longest >= LEAST_US_IN_MS else ("µs", 1.0)
    for row, timeline in enumerate(timelines, 1):
        for spans in _alike(timeline.spans):
            fig.add_trace(_bars(spans, unit, scale), row=row, col=1)
        lanes = LANES if timeline.device_busy_us is not None else {"host": LANES["host"]}
        for trace in _busy(timeline, scale) if "busy" in lanes else ():
            fig.add_trace(trace, row=row, col=1)
        fig.update_yaxes(
            row=row, col=1, tickvals=list(lanes.values()), ticktext=list(lanes), fixedrange=True, showgrid=False,
            zeroline=False, range=[min(lanes.values()) - 0.5, LANES["host"] + 0.5],
        )  # fmt: skip
        fig.update_xaxes(row=row, col=1, range=[0, scale * (timeline.step_us if own_width else longest)])
    clock = "each over the whole width" if own_width else "both on the same clock"
    watched = " under the profiler" if slowed else ""
    fig.update_xaxes(zeroline=False, tickformat=theme.DIGITS, minallowed=0, tickfont={"size": 10})
    fig.update_xaxes(
        row=2, col=1, matches=None if own_width else "x",
        title={"text": f"{unit}{watched}, {clock}", "font": {"size": 11}, "standoff": 2},
    )  # fmt: skip
    theme.legend_once(fig).update_yaxes(tickfont={"size": 10})
    fig.update_annotations(x=0, xanchor="left", font={"size": 11})
    return fig.update_layout(
        legend={**theme.LEGEND_BELOW, "font": {"size": 10}}, margin={"t": TOP + LINE_PX * slowed, "b": BOTTOM}
    )


def caption(timelines: Timelines) -> str:
    """What the steps are, where they were taken, and what could not be seen."""
    each = (text for timeline in timelines for text in (f"Taken on {timeline.origin}.", timeline.remark))
    return " ".join([short_caption(timelines), ONE_EACH, *dict.fromkeys(text for text in each if text)])


def short_caption(timelines: Timelines) -> str:
    """What the steps are, and how much slower the profiler made them."""
    of = timelines.selection
    rows = counted(of.num_rows, "row")
    if of.stage == "train":
        said = f"One training step: {rows}, {of.num_columns:,} tokens; by {of.source}."
    else:
        said = f"One decode step: {rows}, {of.num_columns:,} columns of KV cache; by {of.source}."
    if _slowed(timelines):
        said += f" While watched: {' and '.join(ms_words(each.step_us / 1e3) for each in timelines)}."
    return said


def _slowed(timelines: Timelines) -> bool:
    return any(each.step_us > SLOWED * each.unprofiled_us for each in timelines)


def headline(timeline: Timeline) -> str:
    """The point of a step in a line: "baseline: 1,127 launches, device busy 31 % of 26.9 ms"."""
    name = _text(short_form(timeline.recipe, timeline.device_kind))
    ms = ms_words(timeline.unprofiled_us / 1e3)
    if timeline.busy_share is None:
        return f"<b>{name}</b>: {counted(timeline.num_launches, 'call')} of PyTorch in {ms}"
    launches = f"{timeline.num_launches:,} launch{'' if timeline.num_launches == 1 else 'es'}"
    return f"<b>{name}</b>: {launches}, device busy {100 * timeline.busy_share:.0f} % of {ms}"


def _drawn(timeline: Timeline) -> str:
    """The headline, and that what is drawn took another time."""
    return f"{headline(timeline)}<br>drawn as it ran under the profiler, in {ms_words(timeline.step_us / 1e3)}"


def _busy(timeline: Timeline, scale: float) -> tuple[go.Bar, go.Scatter]:
    """The device's share of each part of the step as an area, on a bar as high as all of it."""
    shares, width = busy_shares(timeline, BUSY_BINS), scale * timeline.step_us / BUSY_BINS
    whole = go.Bar(
        x=_tenths([timeline.step_us], scale), base=0, y=[LANES["busy"]], width=BUSY_HEIGHT, orientation="h",
        marker={"color": theme.GRID, "line": {"width": 0}}, hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    area = go.Scatter(
        x=[round(width * (place + 0.5), 4) for place in range(BUSY_BINS)],
        y=[round(BUSY_HEIGHT * share, 3) for share in shares],
        customdata=[round(100 * share) for share in shares],
        mode="lines", line={"shape": "hvh", "width": 0, "color": theme.INK}, fill="tozeroy", fillcolor=theme.INK,
        showlegend=False, hovertemplate="device busy %{customdata} % of the time here<extra></extra>",
    )  # fmt: skip
    return whole, area


def busy_shares(timeline: Timeline, bins: int) -> list[float]:
    """How much of each of so many equal parts of the step the device has something to do."""
    spans = sorted((span.start_us, span.end_us) for span in timeline.spans if span.kind in DEVICE)
    if not spans or not timeline.step_us:
        return [0.0] * bins
    starts, ends = np.array(spans).T
    starts[1:] = np.maximum(starts[1:], np.maximum.accumulate(ends)[:-1])  # what overlaps counts once
    edges = np.linspace(0, timeline.step_us, bins + 1)[:, None]
    busy_us = np.clip(edges - starts, 0, np.maximum(ends - starts, 0)).sum(axis=1)
    return np.minimum(np.diff(busy_us) * bins / timeline.step_us, 1.0).tolist()


def _alike(spans: Iterable[Span]) -> list[list[Span]]:
    """Those that share all but their times, in the order of the legend."""
    found: dict[tuple, list[Span]] = {}
    for span in spans:
        found.setdefault((span.kind, span.name, span.full, span.op, span.num_bytes), []).append(span)
    return [found[key] for key in sorted(found, key=lambda key: list(KINDS).index(key[0]))]


def _bars(spans: list[Span], unit: str, scale: float) -> go.Bar:
    one = spans[0]
    name, color = KINDS[one.kind]
    color = PHASES.get(one.name, color) if one.kind == "phase" else color
    took, starts = [span.dur_us for span in spans], [span.start_us for span in spans]
    return go.Bar(
        x=_tenths(took, scale), base=_tenths(starts, scale), y=[LANES[one.lane]] * len(spans),
        orientation="h", width=WIDTHS.get(one.kind, WIDTH), marker={"color": color, "line": {"width": 0}}, name=name,
        customdata=_tenths(took),  # a bar's own x is where it ends
        hovertemplate=f"<b>{_text(one.name)}</b>, %{{customdata:,}} µs, from %{{base:,}} {unit}<br>{_details(one)}"
        "<extra></extra>",
    )  # fmt: skip


def _details(span: Span) -> str:
    """What a hover says below the name."""
    lines = [KINDS[span.kind][0] + (f" of {span.op}" if span.op not in ("", span.name) else "")]
    lines += [f"{sized(span.num_bytes)} to move"] if span.num_bytes else []
    lines += textwrap.wrap(span.full, LONGEST_LINE) if span.full != span.name else []
    return "<br>".join(map(_text, lines))


def _text(text: str) -> str:
    """As plotly shows it letter by letter: it takes tags for markup, and %{...} for a value."""
    return escape(text, quote=False).replace("%{", "&#37;{")


def _tenths(values: Iterable[float], scale: float = 1.0) -> list[float]:
    """Microseconds to a tenth, in the unit of which there are `scale` to one."""
    return [round(scale * round(value, 1), 4) for value in values]
