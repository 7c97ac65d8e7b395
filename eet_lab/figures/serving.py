"""Serving as figures: batches over time, latency against load, costs of a pass, a simulation beside measurements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from math import isfinite
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from eet_lab.figures import theme
from eet_lab.scheduling.agreement import Compared
from eet_lab.scheduling.cost import CostTable, EncoderCost
from eet_lab.scheduling.served import Passes, Served
from eet_lab.scheduling.sweep import LoadPoint
from eet_lab.words import brief, percent, visible

PROMPTS, DECODES, WASTE = "prompts", "decode", "pads: computed, and nobody's"
LOOKS: dict[str, dict[str, Any]] = {
    PROMPTS: {"color": theme.SELECTION},
    DECODES: {"color": theme.GAIN},
    WASTE: theme.hatched("rgba(125,133,144,0.18)", theme.BASELINE),
}
INSIDE = theme.inside(theme.SELECTION)
"""Texts stand on what reads prompts."""
LINES = theme.SERIES[1], theme.SERIES[3], theme.SERIES[4], theme.SERIES[5], theme.SERIES[6], theme.BASELINE
"""Colours of queues: none of those that boxes have."""
MOST_BOXES = 400
"""Passes of a run that are drawn: a saved figure is to stay small."""
POINTS = 300

Height = Literal["tokens", "rows"]


def parts(passes: Passes, height: Height) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What boxes are made of, from the bottom to the top, in numbers of each pass [P]: decodes, prompts and pads.

    They are tokens, or rows: of those that read prompts, the share that is no pads, and that which is.
    """
    if height == "tokens":
        return passes.decoded, passes.prompt_tokens, passes.pads
    read = np.maximum(passes.prompt_tokens + passes.pads, 1)
    rows = passes.rows - passes.decoded
    return passes.decoded, rows * passes.prompt_tokens / read, rows * passes.pads / read


def batches(
    runs: Mapping[str, Served],
    title: str = "",
    span_ms: tuple[float, float] | None = None,
    *,
    height: Height = "tokens",
    queue: bool = True,
    texts: Mapping[str, Sequence[str]] | None = None,
) -> go.Figure:
    """A panel for each run, one above the other on one clock, and all queues below.

    A box is a pass: as wide as it takes, and as high as the `height`, "tokens" or "rows", that it computes; pads are
    shaded. `span_ms` is the time in view, which ends before any run has more than MOST_BOXES passes in it. `texts` are
    what stands in the boxes of a run.
    """
    begin, end = _view(runs, span_ms)
    unit, scale = ("s", 1e-3) if end - begin > 5e3 else ("ms", 1.0)
    names = [f"{name}: {in_words(served)}" for name, served in runs.items()]
    num = len(runs) + queue
    fig = theme.grid(
        num, 1, title, 90 + 175 * len(runs) + 130 * queue, shared_xaxes=True, vertical_spacing=0.24 / num,
        row_heights=[1.0] * len(runs) + [0.7] * queue, subplot_titles=[*names, *["waiting requests"] * queue],
    )  # fmt: skip
    highest = max(float(np.sum(parts(each.passes, height), axis=0).max()) for each in runs.values())
    for row, (name, served) in enumerate(runs.items(), 1):
        seen = _seen(served.passes, begin, end)
        for trace in _boxes(served.passes, seen, height, scale, (texts or {}).get(name)):
            fig.add_bar(**trace, row=row, col=1)
        fig.update_yaxes(title=height, range=[0, 1.05 * highest], row=row, col=1)
    theme.legend_once(fig).update_layout(uniformtext={"minsize": 9, "mode": "hide"})
    if queue:
        for trace in queue_lines(runs, begin, end, scale):
            fig.add_scatter(**trace, row=num, col=1)
        fig.update_yaxes(title="requests", rangemode="tozero", row=num, col=1)
    return fig.update_xaxes(range=[begin * scale, end * scale]).update_xaxes(title=f"time, {unit}", row=num, col=1)


def in_words(served: Served) -> str:
    """Passes, the share of pads, and how long half of the requests, and all but one in a hundred, took at most."""
    times = served.percentiles["e2e_ms"]
    waste = percent(served.waste) if served.waste else "no"
    return f"{len(served.passes):,} passes, {waste} pads, p50 {_told(times['p50'])}, p99 {_told(times['p99'])}"


def queue_lines(runs: Mapping[str, Served], begin_ms: float, end_ms: float, scale: float = 1.0) -> list[dict[str, Any]]:
    """How many requests wait over time, a line for each run."""
    at = np.linspace(begin_ms, end_ms, POINTS)
    return [
        {
            "x": _small(at * scale), "y": served.queued(at).astype(np.int32), "name": f"queue: {name}", "mode": "lines",
            "line": {"shape": "hv", "width": 2, "color": LINES[number % len(LINES)]},
        }
        for number, (name, served) in enumerate(runs.items())
    ]  # fmt: skip


def _small(values: np.ndarray) -> np.ndarray:
    """Numbers as plotly packs them: a saved notebook has each list of numbers with a line for each."""
    return values.astype(np.float32)


def _told(ms: float) -> str:
    return f"{brief(ms / 1e3)} s" if ms >= 1e3 else f"{brief(ms)} ms"


def _view(runs: Mapping[str, Served], span_ms: tuple[float, float] | None) -> tuple[float, float]:
    """The time in view; its end is where a run has had its most boxes."""
    begin, end = span_ms or (0.0, max(float(each.passes.end_ms[-1]) for each in runs.values()))
    for served in runs.values():
        ends = served.passes.end_ms[_seen(served.passes, begin, end)]
        end = min(end, float(ends[MOST_BOXES - 1])) if len(ends) > MOST_BOXES else end
    return begin, end


def _seen(passes: Passes, begin_ms: float, end_ms: float) -> np.ndarray:
    """The numbers of the passes that begin before the end of what is in view and end after its beginning."""
    return np.flatnonzero((passes.end_ms > begin_ms) & (passes.begin_ms < end_ms))[:MOST_BOXES]


def _boxes(
    passes: Passes, seen: np.ndarray, height: Height, scale: float, texts: Sequence[str] | None
) -> list[dict[str, Any]]:
    begin, end = passes.begin_ms[seen] * scale, passes.end_ms[seen] * scale
    counts = (each[seen] for each in (passes.rows, passes.prompt_tokens, passes.decoded, passes.pads))
    told = np.stack([seen + 1, *counts], axis=1).astype(np.int32)
    bottom, traces = np.zeros(len(seen)), []
    for kind, values in zip((DECODES, PROMPTS, WASTE), parts(passes, height), strict=True):
        y = values[seen]
        there = y > 0
        traces.append(
            {
                "x": _small((begin + end)[there] / 2), "width": _small((end - begin)[there]), "y": _small(y[there]),
                "base": _small(bottom[there]), "name": kind, "customdata": told[there], **INSIDE,
                "marker": {**LOOKS[kind], "line": {"width": 0.5, "color": theme.GRID}},
                "text": list(texts) if texts and kind == PROMPTS else None,
                "hovertemplate": "pass %{customdata[0]}: %{customdata[1]} requests<br>%{customdata[2]} tokens of "
                "prompts, %{customdata[3]} decode, %{customdata[4]} pads<extra></extra>",
            }
        )  # fmt: skip
        bottom = bottom + y
    return [trace for trace in traces if len(trace["y"])]


POLICY_COLORS = (theme.BASELINE, theme.LOSS, *theme.SERIES)
"""Colours of policies, in the order in which they are taught: first none, then naive padding, which may lose to it."""
FEW = 5
"""Curves of a cost table."""

Points = Mapping[str, Sequence[LoadPoint]]
"""Loads of each policy, from the lowest to the highest."""
NOTHING: Points = MappingProxyType({})
PALE = 0.5
RATE = "arrival rate (requests/s)"


def latency_against_load(
    simulated: Points, title: str = "", measured: Points = NOTHING, chosen: Collection[str] = ()
) -> go.Figure:
    """Half of the requests are below the dotted line, and all but one in a hundred below the solid one.

    A hollow mark is a load that is more than can be served. `measured` are points of the same policies that were
    measured, as diamonds beside what was simulated; requests that came all at once are no load, so that such a point is
    named alone. Where some are `chosen`, the others are pale, without their dotted line.
    """
    placed = {name: [each for each in points if isfinite(each.rate)] for name, points in measured.items()}
    fig = theme.figure(title, height=430, legend=theme.LEGEND_BELOW, hovermode="closest")
    known = list(dict.fromkeys([*simulated, *measured]))
    for name, color in zip(known, cycle(POLICY_COLORS), strict=False):
        is_pale = bool(chosen) and name not in chosen
        for level, dash, width in (("p99", "solid", 2.2), ("p50", "dot", 1.4))[: 1 if is_pale else 2]:
            points = _points(simulated.get(name, ()), name, level, color, size=5 if is_pale else 7)
            line = {"color": color, "width": 1.2 if is_pale else width, "dash": dash}
            fig.add_scatter(**points, mode="lines+markers", line=line, opacity=PALE if is_pale else 1.0)
        points = _points(placed.get(name, ()), f"{name}, measured", "p99", color, "diamond", 11)
        fig.add_scatter(**points, mode="markers")
        if len(placed.get(name, ())) < len(measured.get(name, ())):
            marker = {"size": 11, "color": color, "symbol": "diamond-open"}
            told = f"{name}, measured all at once: no load"
            fig.add_scatter(x=[None], y=[None], name=told, mode="markers", marker=marker, showlegend=True)
    times = [point.times["e2e_ms"] for of in (simulated, placed) for each in of.values() for point in each]
    found = [each[level] for each in times for level in ("p50", "p99")] or [1.0]
    low, high = 0.8 * min(found), 1.3 * max(found)
    fig.update_yaxes(theme.axis(low, high, "end-to-end latency, ms", log=theme.is_far(found)))
    rates = [point.rate for of in (simulated, placed) for each in of.values() for point in each]
    if theme.is_far(rates):
        return fig.update_xaxes(theme.log_axis(0.8 * min(rates), 1.25 * max(rates), RATE))
    return fig.update_xaxes(title=RATE, rangemode="tozero", tickformat=theme.DIGITS)


def _points(
    points: Sequence[LoadPoint], name: str, level: str, color: str, shape: str = "circle", size: int = 7
) -> dict[str, Any]:
    symbols = [f"{shape}-open" if point.is_full else shape for point in points]
    return {
        "x": theme.rounded(point.rate for point in points),
        "y": theme.rounded(point.times["e2e_ms"][level] for point in points),
        "customdata": [[brief(point.requests_per_s), f"{100 * point.busy:.0f}"] for point in points],
        "name": name, "legendgroup": name, "showlegend": bool(points) and level == "p99",
        "marker": {"size": size, "color": color, "symbol": symbols},
        "hovertemplate": theme.hover(
            name, f"%{{x}} requests/s arrive: {level} %{{y}} ms",
            "%{customdata[0]} requests/s served, busy %{customdata[1]} %",
        ),
    }  # fmt: skip


def cost_surface(table: CostTable, title: str = "") -> go.Figure:
    """Milliseconds of a pass as a surface: over tokens a text and texts, or prompt tokens and rows with no columns."""
    clock = "ms a pass on the device" if getattr(table, "host", ()) else "ms a pass"
    if isinstance(table, EncoderCost):
        x, y, names = table.batches, table.lengths, ("texts", "tokens a text")
        at = [[table.at(length, batch) for batch in x] for length in y]
    else:
        x, y, names = table.rows, table.extras, ("rows", "more prompt tokens")
        at = [[table.at(extra + rows, rows, 0) for rows in x] for extra in y]
    fig = theme.figure(title, height=430)
    fig.add_surface(
        x=list(x), y=list(y), z=[theme.rounded(row) for row in at], colorscale="Viridis", showscale=False,
        hovertemplate=f"%{{x}} {names[0]}, %{{y}} {names[1]}: %{{z}} ms<extra></extra>",
    )  # fmt: skip
    fig.add_scatter3d(
        x=list(x) * len(y), y=[each for each in y for _ in x], z=theme.rounded(ms for row in at for ms in row),
        mode="markers", marker={"size": 2.5, "color": theme.INK}, hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    axis = {
        "gridcolor": theme.GRID, "color": theme.INK, "zerolinecolor": theme.GRID, "backgroundcolor": "rgba(0,0,0,0)",
    }  # fmt: skip
    scene = {
        "xaxis": axis | {"title": names[0], "tickvals": list(x), "type": "log"},
        "yaxis": axis | {"title": names[1]}, "zaxis": axis | {"title": clock},
        "camera": {"eye": {"x": -1.6, "y": -1.7, "z": 0.85}, "center": {"x": 0, "y": 0, "z": -0.22}},
        "aspectmode": "manual", "aspectratio": {"x": 1.3, "y": 1.3, "z": 0.9},
    }  # fmt: skip
    return fig.update_layout(scene=scene, margin={"l": 0, "r": theme.TOOLBAR_PX, "b": 0})


def cost_of_one(table: EncoderCost, title: str = "") -> go.Figure:
    """Milliseconds a text, over the texts of a pass: a curve that falls says that batching pays."""
    places = np.unique(np.linspace(0, len(table.lengths) - 1, min(FEW, len(table.lengths))).round().astype(int))
    lines = []
    for length, color in zip((table.lengths[place] for place in places), theme.SERIES, strict=False):
        each_ms = [table.at(length, batch) / batch for batch in table.batches]
        lines.append(theme.Curve(f"{length} tokens a text", each_ms, color, table.batches))
    return theme.curves(title, lines, "texts of a pass, padded to one length", "ms a text", height=320)


def told_table(table: CostTable) -> str:
    """Where a table comes from, and how far it reaches."""
    reach = f"{table.most_rows} rows and {table.most_length:,} tokens a request"
    if isinstance(table, EncoderCost):
        reach = f"{table.most_rows} texts of {table.most_length:,} tokens"
    of = table.source
    note = f" ({of.note})" if of.note else ""
    return visible(f"{of.model}, {of.dtype} on {of.device}, {of.date[:10]}{note}; up to {reach}")


SIMULATED, MEASURED = "simulated", "measured"
SIDE_COLORS = {SIMULATED: theme.BASELINE, MEASURED: theme.SELECTION}


def simulated_beside_measured(compared: Sequence[Compared], title: str = "") -> go.Figure:
    """Two bars for each number: times on the left, throughput on the right; above them, the simulation's error."""
    panels = [[each for each in compared if (each.unit == "ms") == is_time] for is_time in (True, False)]
    layout = {"barmode": "group", "bargap": 0.35, "legend": theme.LEGEND_BELOW}
    layout["margin"] = {"t": 56 if title else 30, "b": 70}
    fig = theme.subplots(1, 2, title, height=360, layout=layout, column_widths=[0.8, 0.2], horizontal_spacing=0.09)
    for column, panel in enumerate(panels, 1):
        _add_sides(fig, panel, column)
        errors, most = [in_percent(each) for each in panel], max(max(each.simulated, each.measured) for each in panel)
        fig.update_traces({"text": errors}, {"name": SIMULATED}, col=column)
        fig.update_yaxes(range=[0, 1.15 * most], row=1, col=column)
    fig.update_traces(textposition="outside", cliponaxis=False)
    return theme.legend_once(fig)


def highest_loads(panels: Mapping[str, Sequence[Compared]], title: str = "") -> go.Figure:
    """A panel for each traffic, two bars for each policy, whose name a `Compared` has. All are in one unit."""
    layout = {"barmode": "group", "bargap": 0.35, "legend": theme.LEGEND_BELOW, "margin": {"t": 76, "b": 90}}
    fig = theme.subplots(1, len(panels), title, height=400, layout=layout, subplot_titles=[*panels])
    for column, panel in enumerate(panels.values(), 1):
        _add_sides(fig, panel, column)
        if column > 1:  # it would stand on the bars of the panel before
            fig.update_yaxes(title=None, row=1, col=column)
    return theme.legend_once(fig)


def _add_sides(fig: go.Figure, panel: Sequence[Compared], column: int) -> None:
    """Two bars for each number."""
    sides = [each.simulated for each in panel], [each.measured for each in panel]
    for (name, color), values in zip(SIDE_COLORS.items(), sides, strict=True):
        fig.add_bar(
            x=[each.name for each in panel], y=theme.rounded(values), name=name, marker={"color": color},
            hovertemplate=theme.hover(name, f"%{{x}}: %{{y}} {panel[0].unit}"), row=1, col=column,
        )  # fmt: skip
    fig.update_yaxes(title=panel[0].unit, rangemode="tozero", row=1, col=column)


def agreement_table(compared: Sequence[Compared]) -> str:
    """The same as an HTML table."""
    rows = (
        (f"{each.name}, {each.unit}", brief(each.simulated), brief(each.measured), in_percent(each))
        for each in compared
    )
    return theme.table(("", SIMULATED, MEASURED, "error of the simulation"), rows)


def in_percent(compared: Compared) -> str:
    """The error with its sign."""
    return f"{100 * compared.error:+.0f} %".replace("-", "−")
