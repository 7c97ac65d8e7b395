"""A stream of requests as a film: chunks as boxes, each request's tensors in them, and what is held over time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eet_lab.memory import Chunk, Lifetime
from eet_lab.memory.replays import Replay, Served
from eet_lab.panels import theme
from eet_lab.panels.packing import GAP, color_of, op_of, restyled, unit_of
from eet_lab.words import counted, sized

MOST_FRAMES = 50
MOST_NAMED = 8
"""More ops than these are told by hovering only."""
PACE_MS = 450


def _line(name: str, color: str, dash: str) -> dict[str, Any]:
    line = {"color": color, "width": 2, "dash": dash}
    return {"name": name, "mode": "lines", "line": line, "hoverinfo": "skip"}


LOOKS: tuple[dict[str, Any], ...] = (
    {
        "name": "", "offset": 0, "showlegend": False, "marker": {"opacity": 0.82},
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]} from address %{customdata[2]}"
        "<br>at times %{x} to %{customdata[3]}<extra></extra>",
    },
    _line("chunks held", theme.INK, "solid"),
    _line("new", theme.GAIN, "solid"),
    _line("given back", theme.LOSS, "dot"),
    {
        "mode": "markers", "showlegend": False, "hoverinfo": "skip",
        "marker": {"size": 11, "color": theme.INK, "symbol": "diamond"},
    },
)  # fmt: skip
"""Of what moves, in the order of `_moving`."""


def film(replay: Replay, title: str) -> go.Figure:
    """Request by request, with a play button and a slider; all in the figure, so it plays in a saved notebook.

    Boxes are chunks: grey ones were there, green ones are new, red ones are given back after the request. A stream of
    more than MOST_FRAMES requests is sampled evenly, and keeps its first and its last.
    """
    shown = _sampled(len(replay.served))
    served = replay.served
    top = max((chunk.end for each in served for chunk in each.plan.chunks), default=1)
    unit, scale = unit_of(top)
    fig = make_subplots(2, 1, row_heights=[0.68, 0.32], vertical_spacing=0.13)
    restyled(fig, f"{title}: {counted(len(served), 'request')}", height=660)
    x = list(range(1, len(served) + 1))
    for name, values, color, fill in (
        ("held", replay.footprint_bytes, theme.SELECTION, None),
        ("alive at most", replay.lower_bound_bytes, theme.GAIN, "tozeroy"),
    ):
        fig.add_scatter(
            x=x, y=[round(value / scale, 3) for value in values], name=name, mode="lines", fill=fill,
            line={"shape": "hvh", "color": color, "width": 1.6}, row=2, col=1,
        )  # fmt: skip
    still = len(fig.data)
    for look, trace in zip(LOOKS, _moving(served, 0, scale), strict=True):
        mark = look is LOOKS[-1]
        fig.add_trace(_merged(trace, look), row=2 if mark else 1, col=1)
    moving = list(range(still, len(fig.data)))
    # A frame tells only what changes: how it looks stays.
    fig.frames = [go.Frame(data=_moving(served, at, scale), name=str(at + 1), traces=moving) for at in shown]
    ops = dict.fromkeys(op_of(life) for each in served for life in each.plan.lifetimes)
    for op in ops if len(ops) <= MOST_NAMED else ():
        fig.add_bar(x=[None], y=[None], name=op, marker={"color": color_of(op), "opacity": 0.82}, row=1, col=1)
    end = max((life.last for each in served for life in each.plan.lifetimes), default=0) + 1
    fig.update_xaxes(range=[-0.3, end + 0.3], title="time within the request", row=1, col=1)
    fig.update_yaxes(range=[0, 1.03 * top / scale], title=f"address ({unit})", row=1, col=1)
    fig.update_xaxes(range=[0.4, len(served) + 0.6], title="request", row=2, col=1)
    fig.update_yaxes(rangemode="tozero", title=unit, row=2, col=1)
    return _with_controls(fig, [(at, served[at]) for at in shown])


def _moving(served: Sequence[Served], at: int, scale: int) -> list[dict[str, Any]]:
    """What changes from request to request: tensors, three kinds of chunks, and the mark in the curve below."""
    plan = served[at].plan
    before, now = set(served[at - 1].plan.chunks) if at else set(), set(plan.chunks)
    end = max((life.last for life in plan.lifetimes), default=0) + 1
    placed = list(zip(plan.lifetimes, plan.offsets, strict=True))
    tensors = {
        "type": "bar",
        "x": [life.first for life, _ in placed],
        "width": [life.last - life.first + 1 - GAP for life, _ in placed],
        "base": [round(offset / scale, 3) for _, offset in placed],
        "y": [round(life.num_bytes / scale, 3) for life, _ in placed],
        "customdata": [_hovered(life, offset) for life, offset in placed],
        "marker": {"color": [color_of(op_of(life)) for life, _ in placed]},
    }
    boxes = [_boxes(chunks, end, scale) for chunks in (now & before, now - before, before - now)]
    mark = {"type": "scatter", "x": [at + 1], "y": [round(plan.footprint_bytes / scale, 3)]}
    return [tensors, *boxes, mark]


def _hovered(life: Lifetime, offset: int) -> list[str | int]:
    name = f"{life.name}, {life.op}" if life.op else life.name
    return [name, sized(life.num_bytes), sized(offset), life.last]


def _boxes(chunks: Collection[Chunk], end: int, scale: int) -> dict[str, Any]:
    x: list[float | None] = []
    y: list[float | None] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        low, high = round(chunk.start / scale, 3), round(chunk.end / scale, 3)
        x += [0, end, end, 0, 0, None]
        y += [low, low, high, high, low, None]
    return {"type": "scatter", "x": x or [None], "y": y or [None]}


def _with_controls(fig: go.Figure, shown: Sequence[tuple[int, Served]]) -> go.Figure:
    """A slider that says what the request was and took, and below it a play button and a pause button.

    Places are in pixels below the axes: buttons have a width of their own, however wide the figure is.
    """
    still = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    playing = {**still, "fromcurrent": True, "frame": {"duration": PACE_MS, "redraw": True}}
    buttons: list[dict[str, Any]] = [
        {"label": "▶ play", "method": "animate", "args": [None, playing]},
        {"label": "❚❚ pause", "method": "animate", "args": [[None], still]},
    ]
    steps = [{"label": _told(at, each), "method": "animate", "args": [[str(at + 1)], still]} for at, each in shown]
    # The labels are long: only the present one is shown, above the slider.
    hidden = {"color": "rgba(0,0,0,0)", "size": 1}
    slider = {
        "steps": steps, "x": 0, "len": 1, "y": 0, "yanchor": "top", "pad": {"t": 54, "b": 0, "l": 0, "r": 0},
        "font": hidden, "ticklen": 0, "minorticklen": 0, "bgcolor": theme.GRID, "bordercolor": theme.GRID,
        "currentvalue": {"prefix": "", "font": {"color": theme.INK, "size": 13}, "xanchor": "left"},
    }  # fmt: skip
    menu = {
        "type": "buttons", "direction": "left", "buttons": buttons, "x": 0, "xanchor": "left", "y": 0,
        "yanchor": "top", "pad": {"t": 108}, "bgcolor": "rgba(0,0,0,0)", "bordercolor": theme.GRID, "showactive": False,
    }  # fmt: skip
    return fig.update_layout(
        sliders=[slider], updatemenus=[menu], margin={"t": 84, "b": 150},
        legend={"x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left", "yref": "paper", "orientation": "h"},
    )  # fmt: skip


def _told(at: int, each: Served) -> str:
    asked, freed = each.calls.allocations, each.calls.frees
    took = f", {asked} allocated" if asked else ""
    took += f", {freed} freed" if freed else ""
    held, alive = sized(each.plan.footprint_bytes), sized(each.plan.lower_bound_bytes)
    return f"request {at + 1}, {each.length} tokens: {held} held, {alive} alive{took}"


def _merged(trace: dict[str, Any], look: dict[str, Any]) -> dict[str, Any]:
    marker = {**trace.get("marker", {}), **look.get("marker", {})}
    return {**trace, **look, **({"marker": marker} if marker else {})}


def _sampled(count: int) -> list[int]:
    """At most MOST_FRAMES places, evenly spread, both ends among them."""
    if count <= MOST_FRAMES:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MOST_FRAMES - 1)) for i in range(MOST_FRAMES)})
