"""What serving comes to: latency against load, and what a pass costs by its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import plotly.graph_objects as go

from eet_lab.figures import theme
from eet_lab.scheduling.cost import CostTable, EncoderCost
from eet_lab.scheduling.sweep import LoadPoint
from eet_lab.words import brief, visible

METRICS = {"e2e_ms": "end to end", "ttft_ms": "time to first token", "tpot_ms": "time per token"}
COLORS = (theme.BASELINE, theme.LOSS, *theme.SERIES[:4])
"""Colours of policies, in the order in which they are taught: first none, then naive padding, which may lose to it."""
FEW = 5
"""Curves of a cost table."""

Points = Mapping[str, Sequence[LoadPoint]]
"""Loads of each policy, from the lowest to the highest."""
NOTHING: Points = MappingProxyType({})


def latency_against_load(
    simulated: Points, title: str = "", metric: str = "e2e_ms", measured: Points = NOTHING
) -> go.Figure:
    """Half of the requests are below the dotted line, and all but one in a hundred below the solid one.

    A hollow mark is a load that is more than can be served. `measured` are points of the same policies that were
    measured, as diamonds beside what was simulated. KeyError for a metric that is none of METRICS.
    """
    fig = theme.figure(title, height=430, legend=theme.LEGEND_BELOW | {"orientation": "h"}, hovermode="closest")
    known = list(dict.fromkeys([*simulated, *measured]))
    for name, color in zip(known, [COLORS[at % len(COLORS)] for at in range(len(known))], strict=True):
        for percent, dash in (("p99", "solid"), ("p50", "dot")):
            line = {"color": color, "width": 2.2 if percent == "p99" else 1.4, "dash": dash}
            _marks(fig, simulated.get(name, ()), name, metric, percent, mode="lines+markers", line=line, color=color)
        _marks(fig, measured.get(name, ()), f"{name}, measured", metric, "p99", mode="markers", color=color, size=11)
    points = [point for of in (simulated, measured) for each in of.values() for point in each]
    found = [ms for point in points for ms in (point.times[metric]["p50"], point.times[metric]["p99"])]
    low, high = 0.8 * min(found), 1.3 * max(found)
    fig.update_yaxes(theme.axis(low, high, f"{METRICS[metric]}, ms", log=theme.is_far(found)))
    return fig.update_xaxes(title="requests that come a second", rangemode="tozero", tickformat=theme.DIGITS)


def _marks(
    fig: go.Figure,
    points: Sequence[LoadPoint],
    name: str,
    metric: str,
    percent: str,
    *,
    color: str,
    size: int = 7,
    **look: Any,
) -> None:
    shape = "diamond" if size > 7 else "circle"
    fig.add_scatter(
        x=theme.rounded(point.rate for point in points),
        y=theme.rounded(point.times[metric][percent] for point in points),
        customdata=[[brief(point.requests_per_s), f"{100 * point.busy:.0f}"] for point in points],
        name=name, legendgroup=name, showlegend=bool(points) and percent == "p99",
        marker={
            "size": size, "color": color,
            "symbol": [f"{shape}-open" if point.is_full else shape for point in points],
        },
        hovertemplate=f"%{{x}} come a second: {percent} %{{y}} ms<br>%{{customdata[0]}} a second served, busy "
        f"%{{customdata[1]}} %<extra>{name}</extra>",
        **look,
    )  # fmt: skip


def cost_surface(table: CostTable, title: str = "", kv: float = 0) -> go.Figure:
    """Milliseconds of a pass as a surface: over tokens a text and texts, or prompt tokens and rows at `kv` columns."""
    if isinstance(table, EncoderCost):
        x, y, names = table.batches, table.lengths, ("texts", "tokens a text")
        at = [[table.at(length, batch) for batch in x] for length in y]
    else:
        x, y, names = table.rows, table.extras, ("rows", "more prompt tokens")
        at = [[table.at(extra + rows, rows, kv) for rows in x] for extra in y]
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
        "gridcolor": theme.GRID,
        "color": theme.INK,
        "zerolinecolor": theme.GRID,
        "backgroundcolor": "rgba(0,0,0,0)",
    }
    scene = {
        "xaxis": axis | {"title": names[0], "tickvals": list(x), "type": "log"},
        "yaxis": axis | {"title": names[1]}, "zaxis": axis | {"title": "ms a pass"},
        "camera": {"eye": {"x": -1.6, "y": -1.7, "z": 0.85}, "center": {"x": 0, "y": 0, "z": -0.22}},
        "aspectmode": "manual", "aspectratio": {"x": 1.3, "y": 1.3, "z": 0.9},
    }  # fmt: skip
    return fig.update_layout(scene=scene, margin={"l": 0, "r": theme.TOOLBAR_PX, "b": 0})


def cost_of_one(table: EncoderCost, title: str = "") -> go.Figure:
    """Milliseconds a text, over the texts of a pass: a curve that falls says that company pays."""
    places = np.unique(np.linspace(0, len(table.lengths) - 1, min(FEW, len(table.lengths))).round().astype(int))
    lines = [
        theme.Curve(
            f"{length} tokens a text",
            [table.at(length, batch) / batch for batch in table.batches],
            theme.SERIES[number],
            table.batches,
        )
        for number, length in enumerate(table.lengths[place] for place in places)
    ]
    return theme.curves(title, lines, "texts of a pass, padded to one length", "ms a text", height=320)


def told_table(table: CostTable) -> str:
    """Where a table comes from, and how far it reaches."""
    reach = f"{table.most_rows} rows and {table.most_length:,} tokens a request"
    if isinstance(table, EncoderCost):
        reach = f"{table.most_rows} texts of {table.most_length:,} tokens"
    of = table.source
    note = f" ({of.note})" if of.note else ""
    return visible(f"{of.model}, {of.dtype} on {of.device}, {of.date[:10]}{note}; up to {reach}")
