"""Memory plans as pictures: one, several side by side, what each planner holds, and a stream of requests as a film."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import plotly.graph_objects as go

from eet_lab.figures import theme
from eet_lab.memory import Chunk, Lifetime, Plan, live_bytes
from eet_lab.memory.replays import Placed, Replay, Served
from eet_lab.words import GiB, KiB, MiB, counted, ms_words, sized, times

GAP = 0.08
"""A share of a request: what is made next does not touch what died just now."""
MOST_CHUNKS = 24
"""More chunks than this are drawn without their sizes."""
COLUMNS = 3
"""Small pictures side by side."""
SKY = 3.0
"""Times the lower bound: as far up as small pictures go."""

OP_COLORS = (
    theme.SELECTION, "#d97706", "#a855f7", "#7dd3fc", "#a16207", "#f0abfc", "#1e40af", "#94a3b8", "#d6b98c", "#6d28d9",
)  # fmt: skip
"""Neither red nor green: in these pictures those two tell what is held, new or given back."""
FAMILIES = (
    ("norm_linear", "linear_residual", "attention", "masked_attention", "next_token", "embed", "mask", "advance"),
    ("qkv", "q", "k", "v", "scores", "context", "self_out", "attention_out", "intermediate", "layer_output"),
)
"""What one picture shows together: the lab's ops, and the tensors of TurboTransformers' BERT."""


def packing(plan: Plan, title: str = "") -> go.Figure:
    """One plan: rectangles, the borders of its chunks, and below what is alive against what is held.

    Colours are ops; hovering over a rectangle names the tensor, its op, size, life and address. Where far more is held
    than these tensors need, the axes end above the tensors, and the title says what is held.
    """
    bound, held, span = plan.lower_bound_bytes, plan.footprint_bytes, max((c.end for c in plan.chunks), default=0)
    sky, height = _seen(span, plan.end), _seen(held, bound)
    unit, scale = unit_of(sky)
    fig = theme.grid(
        2, 1, title or in_words(plan), 520, shared_xaxes=True, row_heights=[0.72, 0.28], vertical_spacing=0.05
    )
    for op, trace in _rectangles(plan, scale).items():
        fig.add_bar(**trace, name=op, legendgroup=op, row=1, col=1)
    _chunk_borders(fig, plan, scale)
    end = _end(plan)
    alive = [*live_bytes(plan.lifetimes), 0]
    fig.add_scatter(
        x=list(range(len(alive))), y=_scaled(alive, scale), mode="lines", name="alive", fill="tozeroy",
        line={"shape": "hv", "width": 1.5, "color": theme.INK}, fillcolor=theme.GRID,
        hovertemplate=f"request %{{x}}: %{{y}} {unit} alive<extra></extra>", row=2, col=1,
    )  # fmt: skip
    levels = ("lower bound", bound, theme.GAIN, "dot"), ("held", held, theme.LOSS, "dash")
    for name, num_bytes, color, dash in levels:
        fig.add_scatter(
            x=[0, end], y=_scaled([num_bytes, num_bytes], scale), mode="lines", name=f"{name}: {sized(num_bytes)}",
            line={"color": color, "dash": dash, "width": 2}, hoverinfo="name", row=2, col=1,
        )  # fmt: skip
    fig.update_yaxes(title=f"address ({unit})", range=[0, sky / scale], row=1, col=1)
    fig.update_yaxes(title=unit, range=[0, height / scale], row=2, col=1)
    return fig.update_xaxes(title="request for memory, in order", range=[-0.3, end + 0.3], row=2, col=1)


def packings(plans: Mapping[str, Plan]) -> go.Figure:
    """The same lifetimes placed in several ways, side by side at one scale: the lower the skyline, the better.

    What climbs far above the lower bound, as without any reuse, is cut off, and its title says how far it would go.
    """
    bound = max(plan.lower_bound_bytes for plan in plans.values())
    top = min(max(plan.footprint_bytes for plan in plans.values()), round(SKY * bound))
    unit, scale = unit_of(top)
    columns = min(COLUMNS, len(plans))
    rows = -(-len(plans) // columns)
    titles = [
        f"{name}: {sized(plan.footprint_bytes)}{' (cut off)' if plan.footprint_bytes > top else ''}"
        for name, plan in plans.items()
    ]
    fig = theme.grid(
        rows, columns, "", 90 + 210 * rows, shared_xaxes="all", shared_yaxes="all", subplot_titles=titles,
        horizontal_spacing=0.03, vertical_spacing=0.28 / rows,
    )  # fmt: skip
    for at, plan in enumerate(plans.values()):
        place = {"row": at // columns + 1, "col": at % columns + 1}
        for op, trace in _rectangles(plan, scale).items():
            fig.add_bar(**trace, name=op, **place)
        fig.add_hline(y=bound / scale, line={"color": theme.GAIN, "dash": "dot", "width": 1.5}, **place)
    fig.update_yaxes(range=[0, 1.04 * top / scale])
    return theme.legend_once(fig).update_yaxes(title=unit, col=1)


def in_words(plan: Plan) -> str:
    """The title that a plan gets."""
    total, held, bound = sum(life.num_bytes for life in plan.lifetimes), plan.footprint_bytes, plan.lower_bound_bytes
    whole = len(plan.chunks) != 1 or plan.end == held  # else a larger request has made the arena
    needed = held if whole else plan.end
    how_good = "the lower bound" if needed == bound else f"{times(needed / max(bound, 1))} the lower bound"
    where = f"placed in {sized(needed)} ({how_good}){'' if whole else f'; {sized(held)} are held'}"
    return f"{counted(len(plan.lifetimes), 'tensor')} of {sized(total)} in total, {where}"


def unit_of(num_bytes: float) -> tuple[str, int]:
    """The unit in which that many bytes read well, and how many bytes it is."""
    if num_bytes >= 4 * GiB:
        return "GiB", GiB
    return ("MiB", MiB) if num_bytes >= MiB else ("KiB", KiB)


def op_of(life: Lifetime) -> str:
    """What a lifetime is coloured by: the op that asked, or its own name where nobody is known to have."""
    return life.op or life.name


def color_of(op: str) -> str:
    """An op's colour, the same in every picture; one that is not known gets one by its name."""
    family = next((family for family in FAMILIES if op in family), None)
    at = family.index(op) if family else crc32(op.encode())
    return OP_COLORS[at % len(OP_COLORS)]


def _rectangles(plan: Plan, scale: int) -> dict[str, dict]:
    """A bar trace for each op, without its name. A bar, unlike an outline, is hovered over all of its face."""
    groups: dict[str, list[tuple[Lifetime, int]]] = {}
    for life, offset in zip(plan.lifetimes, plan.offsets, strict=True):
        groups.setdefault(op_of(life), []).append((life, offset))
    return {
        op: {
            **_bars(placed, scale),
            "offset": 0,
            "customdata": [[life.name, sized(life.num_bytes), life.last, sized(offset)] for life, offset in placed],
            "marker": {"color": color_of(op), "opacity": 0.82, "line": {"width": 0.5, "color": theme.GRID}},
            "hovertemplate": f"<b>%{{customdata[0]}}</b>, {op}<br>%{{customdata[1]}} from address %{{customdata[3]}}"
            "<br>requests %{x} to %{customdata[2]}<extra></extra>",
        }
        for op, placed in groups.items()
    }


def _bars(placed: Sequence[tuple[Lifetime, int]], scale: int) -> dict[str, list]:
    """Where the bars of lifetimes and their offsets lie."""
    return {
        "x": [life.first for life, _ in placed],
        "width": [life.last - life.first + 1 - GAP for life, _ in placed],
        "base": _scaled([offset for _, offset in placed], scale),
        "y": _scaled([life.num_bytes for life, _ in placed], scale),
    }


def _chunk_borders(fig: go.Figure, plan: Plan, scale: int) -> None:
    """Lines where what was allocated begins and ends, and how much each chunk is; one that is full needs none."""
    if sum(chunk.num_bytes for chunk in plan.chunks) == plan.end:
        return
    for chunk in plan.chunks:
        low, high = chunk.start / scale, chunk.end / scale
        fig.add_shape(
            type="rect", x0=0, x1=1, xref="x domain", y0=low, y1=high, layer="below",
            line={"color": theme.INK, "width": 1.2}, row=1, col=1,
        )  # fmt: skip
        if len(plan.chunks) <= MOST_CHUNKS:
            fig.add_annotation(
                text=f"chunk {chunk.id}: {sized(chunk.num_bytes)}", x=1, xref="x domain", y=high, xanchor="right",
                yanchor="top", showarrow=False, font={"size": 10}, row=1, col=1,
            )  # fmt: skip


def _seen(held: int, needed: int) -> float:
    """How far up an axis goes."""
    return 1.06 * (held if held <= 4 * needed else 1.4 * needed)


def _end(plan: Plan) -> int:
    return max((life.last for life in plan.lifetimes), default=0) + 1


def _scaled(num_bytes: Sequence[int], scale: int) -> list[float]:
    return [round(each / scale, 3) for each in num_bytes]


POOL_HEAD = ("pool", "mean held", "most held", "× lower bound", "allocations + frees", "new bytes per request")
HEAD = ("planner", "held", "× lower bound", "driver calls", "bytes allocated", "planning")


def lines(placed: Sequence[Placed]) -> list[list[str]]:
    """A table's rows, under HEAD."""
    rows = []
    for each in placed:
        if each.plan is None:
            rows.append([each.name, each.why, "", "", "", ""])
            continue
        held, bound = each.plan.footprint_bytes, each.plan.lower_bound_bytes
        calls = each.calls.allocations + each.calls.frees
        asked, took = sized(each.calls.allocated_bytes), ms_words(each.planning_ms)
        rows.append([each.name, sized(held), f"{held / max(bound, 1):,.3f}", f"{calls:,}", asked, took])
    return rows


def pool_lines(replays: Mapping[str, Replay]) -> list[list[str]]:
    """A table's rows, under POOL_HEAD: pools on one stream of requests."""
    rows = []
    for name, each in replays.items():
        most, bound = max(each.footprint_bytes, default=0), max(each.lower_bound_bytes, default=0)
        ended = f" (ended at request {len(each.served) + 1})" if each.ended else ""
        calls = f"{each.calls.allocations:,} + {each.calls.frees:,}"
        mean, new = (sized(each.mean_footprint_bytes), sized(each.new_bytes_per_request)) if each.served else ("", "")
        rows.append([name + ended, mean, sized(most), f"{most / max(bound, 1):,.2f}", calls, new])
    return rows


def footprints(placed: Sequence[Placed]) -> go.Figure:
    """A bar for each planner, against the bytes that are alive at once; what is far off runs out of the figure."""
    held = {each.name: each.plan.footprint_bytes for each in placed if each.plan}
    bound = max((each.plan.lower_bound_bytes for each in placed if each.plan), default=0)
    title = f"Held by each planner; alive at once: {sized(bound)}"
    fig = theme.figure(title, height=120 + 30 * len(held), bargap=0.35)
    end = 1.3 * max((size for size in held.values() if size <= 3 * bound), default=bound) / MiB
    fig.add_bar(
        y=list(held), x=theme.rounded(size / MiB for size in held.values()), orientation="h",
        marker={"color": [theme.GAIN if size == bound else theme.SELECTION for size in held.values()]},
        hovertemplate=f"%{{y}}: %{{x:{theme.DIGITS}}} MiB<extra></extra>", showlegend=False,
    )  # fmt: skip
    for name, size in held.items():
        fits = size / MiB < 0.86 * end
        fig.add_annotation(
            y=name, x=size / MiB if fits else end, text=f"{sized(size)}{'' if fits else ' ▸'}", showarrow=False,
            xanchor="left" if fits else "right", xshift=4 if fits else -4,
            font={"color": None if fits else "#fff", "size": 11},
        )  # fmt: skip
    fig.add_vline(x=bound / MiB, line={"color": theme.INK, "dash": "dot", "width": 2})
    fig.update_yaxes(autorange="reversed", showgrid=False)
    return fig.update_xaxes(title="MiB; dotted: the lower bound", range=[0, end])


MOST_FRAMES = 50
MOST_OPS = 8
"""More ops than these are told by hovering only."""
PACE_MS = 450


LOOKS: tuple[dict[str, Any], ...] = (
    {
        "name": "", "offset": 0, "showlegend": False, "marker_opacity": 0.82,
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]} from address %{customdata[2]}"
        "<br>at times %{x} to %{customdata[3]}<extra></extra>",
    },
    *(
        {"name": name, "mode": "lines", "hoverinfo": "skip", "line": {"color": color, "width": 2, "dash": dash}}
        for name, color, dash in (
            ("chunks held", theme.INK, "solid"), ("new", theme.GAIN, "solid"), ("freed", theme.LOSS, "dot"),
        )
    ),
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
    served = replay.served
    top = max((chunk.end for each in served for chunk in each.plan.chunks), default=1)
    unit, scale = unit_of(top)
    head = f"{title}: {counted(len(served), 'request')}"
    fig = theme.grid(2, 1, head, 660, row_heights=[0.68, 0.32], vertical_spacing=0.13)
    x = list(range(1, len(served) + 1))
    for name, values, color, fill in (
        ("held", replay.footprint_bytes, theme.SELECTION, None),
        ("alive at most", replay.lower_bound_bytes, theme.GAIN, "tozeroy"),
    ):
        fig.add_scatter(
            x=x, y=_scaled(values, scale), name=name, mode="lines", fill=fill,
            line={"shape": "hvh", "color": color, "width": 1.6}, row=2, col=1,
        )  # fmt: skip
    still = len(fig.data)
    for look, trace in zip(LOOKS, _moving(served, 0, scale), strict=True):
        fig.add_trace({**trace, **look}, row=2 if look is LOOKS[-1] else 1, col=1)
    moving = range(still, len(fig.data))
    ops = dict.fromkeys(op_of(life) for each in served for life in each.plan.lifetimes)
    for op in ops if len(ops) <= MOST_OPS else ():
        fig.add_bar(x=[None], y=[None], name=op, marker={"color": color_of(op), "opacity": 0.82}, row=1, col=1)
    end = max(_end(each.plan) for each in served)
    fig.update_xaxes(range=[-0.3, end + 0.3], title="time within the request", row=1, col=1)
    fig.update_yaxes(range=[0, 1.03 * top / scale], title=f"address ({unit})", row=1, col=1)
    fig.update_xaxes(range=[0.4, len(served) + 0.6], title="request", row=2, col=1)
    fig.update_yaxes(rangemode="tozero", title=unit, row=2, col=1)
    shown = sorted({round(at) for at in np.linspace(0, len(served) - 1, MOST_FRAMES)})
    frames = {at + 1: (_frame_label(at, served[at]), _moving(served, at, scale)) for at in shown}
    return theme.with_slider(fig, frames, moving, pace_ms=PACE_MS, legend_y=1.02)


def _moving(served: Sequence[Served], at: int, scale: int) -> list[dict[str, Any]]:
    """What changes from request to request: tensors, three kinds of chunks, and the mark in the curve below."""
    plan = served[at].plan
    before, now = set(served[at - 1].plan.chunks) if at else set(), set(plan.chunks)
    placed = list(zip(plan.lifetimes, plan.offsets, strict=True))
    tensors = {
        "type": "bar",
        **_bars(placed, scale),
        "customdata": [
            [f"{life.name}, {life.op}" if life.op else life.name, sized(life.num_bytes), sized(offset), life.last]
            for life, offset in placed
        ],
        "marker": {"color": [color_of(op_of(life)) for life, _ in placed]},
    }
    boxes = [_chunk_boxes(chunks, _end(plan), scale) for chunks in (now & before, now - before, before - now)]
    mark = {"type": "scatter", "x": [at + 1], "y": [round(plan.footprint_bytes / scale, 3)]}
    return [tensors, *boxes, mark]


def _chunk_boxes(chunks: Collection[Chunk], end: int, scale: int) -> dict[str, Any]:
    x: list[float | None] = []
    y: list[float | None] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        low, high = round(chunk.start / scale, 3), round(chunk.end / scale, 3)
        x += [0, end, end, 0, 0, None]
        y += [low, low, high, high, low, None]
    return {"type": "scatter", "x": x or [None], "y": y or [None]}


def _frame_label(at: int, each: Served) -> str:
    calls = {"allocated": each.calls.allocations, "freed": each.calls.frees}
    took = "".join(f", {number} {name}" for name, number in calls.items() if number)
    held, alive = sized(each.plan.footprint_bytes), sized(each.plan.lower_bound_bytes)
    return f"request {at + 1}, {each.length} tokens: {held} held, {alive} alive{took}"
