"""A stream of requests as a film: chunks as boxes, each request's tensors in them, and what is held over time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import plotly.graph_objects as go

from eet_lab.figures import theme
from eet_lab.figures.packing import GAP, color_of, grid, op_of, unit_of
from eet_lab.figures.slider import with_slider
from eet_lab.memory import Chunk, Lifetime
from eet_lab.memory.replays import Replay, Served
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
        "name": "", "offset": 0, "showlegend": False, "marker_opacity": 0.82,
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]} from address %{customdata[2]}"
        "<br>at times %{x} to %{customdata[3]}<extra></extra>",
    },
    _line("chunks held", theme.INK, "solid"),
    _line("new", theme.GAIN, "solid"),
    _line("freed", theme.LOSS, "dot"),
    {
        "mode": "markers", "showlegend": False, "hoverinfo": "skip",
        "marker": {"size": 11, "color": theme.INK, "symbol": "diamond"},
    },
)  # fmt: skip
"""The look of what moves, in the order of `_moving`."""


def film(replay: Replay, title: str) -> go.Figure:
    """Request by request, with a play button and a slider; all in the figure, so it plays in a saved notebook.

    Boxes are chunks: grey ones were there, green ones are new, red ones are given back after the request. A stream of
    more than MOST_FRAMES requests is sampled evenly, and keeps its first and its last.
    """
    shown = _sampled(len(replay.served))
    served = replay.served
    top = max((chunk.end for each in served for chunk in each.plan.chunks), default=1)
    unit, scale = unit_of(top)
    head = f"{title}: {counted(len(served), 'request')}"
    fig = grid(2, 1, head, 660, row_heights=[0.68, 0.32], vertical_spacing=0.13)
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
        fig.add_trace({**trace, **look}, row=2 if mark else 1, col=1)
    moving = range(still, len(fig.data))
    ops = dict.fromkeys(op_of(life) for each in served for life in each.plan.lifetimes)
    for op in ops if len(ops) <= MOST_NAMED else ():
        fig.add_bar(x=[None], y=[None], name=op, marker={"color": color_of(op), "opacity": 0.82}, row=1, col=1)
    end = max((life.last for each in served for life in each.plan.lifetimes), default=0) + 1
    fig.update_xaxes(range=[-0.3, end + 0.3], title="time within the request", row=1, col=1)
    fig.update_yaxes(range=[0, 1.03 * top / scale], title=f"address ({unit})", row=1, col=1)
    fig.update_xaxes(range=[0.4, len(served) + 0.6], title="request", row=2, col=1)
    fig.update_yaxes(rangemode="tozero", title=unit, row=2, col=1)
    frames = {at + 1: (_told(at, served[at]), _moving(served, at, scale)) for at in shown}
    return with_slider(fig, frames, moving, pace_ms=PACE_MS, legend_y=1.02)


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


def _told(at: int, each: Served) -> str:
    asked, freed = each.calls.allocations, each.calls.frees
    took = f", {asked} allocated" if asked else ""
    took += f", {freed} freed" if freed else ""
    held, alive = sized(each.plan.footprint_bytes), sized(each.plan.lower_bound_bytes)
    return f"request {at + 1}, {each.length} tokens: {held} held, {alive} alive{took}"


def _sampled(count: int) -> list[int]:
    """At most MOST_FRAMES places, evenly spread, both ends among them."""
    if count <= MOST_FRAMES:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MOST_FRAMES - 1)) for i in range(MOST_FRAMES)})
