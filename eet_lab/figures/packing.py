"""Plans as pictures: addresses over time, where tensors that live together lie apart.

Each rectangle is a lifetime: from left to right the requests between which it lives, from bottom to top its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import plotly.graph_objects as go

from eet_lab.figures import theme
from eet_lab.memory import Lifetime, Plan, live_bytes
from eet_lab.words import GiB, KiB, MiB, counted, sized, times

GAP = 0.08
"""A share of a request: what is made next does not touch what died just now."""
MOST_NAMED = 24
"""More chunks than this are drawn without their sizes."""
SKY = 3.0
"""Times the lower bound: as far up as small pictures go."""

OP_COLORS = (
    theme.SELECTION,
    "#d97706",
    "#a855f7",
    "#7dd3fc",
    "#a16207",
    "#f0abfc",
    "#1e40af",
    "#94a3b8",
    "#d6b98c",
    "#6d28d9",
)
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
    fig = grid(2, 1, title or in_words(plan), 520, shared_xaxes=True, row_heights=[0.72, 0.28], vertical_spacing=0.05)
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


def packings(plans: Mapping[str, Plan], columns: int = 3) -> go.Figure:
    """The same lifetimes placed in several ways, side by side at one scale: the lower the skyline, the better.

    What climbs far above the lower bound, as without any reuse, is cut off, and its title says how far it would go.
    """
    bound = max(plan.lower_bound_bytes for plan in plans.values())
    top = min(max(plan.footprint_bytes for plan in plans.values()), round(SKY * bound))
    unit, scale = unit_of(top)
    columns = min(columns, len(plans))
    rows = -(-len(plans) // columns)
    titles = [
        f"{name}: {sized(plan.footprint_bytes)}{' (cut off)' if plan.footprint_bytes > top else ''}"
        for name, plan in plans.items()
    ]
    fig = grid(
        rows, columns, "", 90 + 210 * rows, shared_xaxes="all", shared_yaxes="all", subplot_titles=titles,
        horizontal_spacing=0.03, vertical_spacing=0.28 / rows,
    ).update_annotations(font={"size": 12})  # fmt: skip
    told: set[str] = set()
    for at, plan in enumerate(plans.values()):
        place = {"row": at // columns + 1, "col": at % columns + 1}
        for op, trace in _rectangles(plan, scale).items():
            fig.add_bar(**trace, name=op, legendgroup=op, showlegend=op not in told, **place)
            told.add(op)
        fig.add_hline(y=bound / scale, line={"color": theme.GAIN, "dash": "dot", "width": 1.5}, **place)
    fig.update_yaxes(range=[0, 1.04 * top / scale])
    return fig.update_yaxes(title=unit, col=1)


def in_words(plan: Plan) -> str:
    """The title that a plan gets."""
    total, held, bound = sum(life.num_bytes for life in plan.lifetimes), plan.footprint_bytes, plan.lower_bound_bytes
    whole = len(plan.chunks) != 1 or plan.end == held  # else a larger request has made the arena
    needed = held if whole else plan.end
    how_good = "which is the lower bound" if needed == bound else f"{times(needed / max(bound, 1))} the lower bound"
    where = f"in {sized(needed)}, {how_good}{'' if whole else f'; {sized(held)} are held'}"
    return f"{counted(len(plan.lifetimes), 'tensor')}, {sized(total)} in all, {where}"


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
            "x": [life.first for life, _ in placed],
            "width": [life.last - life.first + 1 - GAP for life, _ in placed],
            "offset": 0,
            "y": _scaled([life.num_bytes for life, _ in placed], scale),
            "base": _scaled([offset for _, offset in placed], scale),
            "customdata": [[life.name, sized(life.num_bytes), life.last, sized(offset)] for life, offset in placed],
            "marker": {"color": color_of(op), "opacity": 0.82, "line": {"width": 0.5, "color": theme.GRID}},
            "hovertemplate": f"<b>%{{customdata[0]}}</b>, {op}<br>%{{customdata[1]}} from address %{{customdata[3]}}"
            "<br>requests %{x} to %{customdata[2]}<extra></extra>",
        }
        for op, placed in groups.items()
    }


def _chunk_borders(fig: go.Figure, plan: Plan, scale: int) -> None:
    """Lines where what was allocated begins and ends, and how much each chunk is; one that is full needs none."""
    if sum(chunk.num_bytes for chunk in plan.chunks) == plan.end:
        return
    for chunk in plan.chunks:
        low, high = chunk.start / scale, (chunk.start + chunk.num_bytes) / scale
        fig.add_shape(
            type="rect", x0=0, x1=1, xref="x domain", y0=low, y1=high, layer="below",
            line={"color": theme.INK, "width": 1.2}, row=1, col=1,
        )  # fmt: skip
        if len(plan.chunks) <= MOST_NAMED:
            fig.add_annotation(
                text=f"chunk {chunk.id}: {sized(chunk.num_bytes)}", x=1, xref="x domain", y=high, xanchor="right",
                yanchor="top", showarrow=False, font={"size": 10}, row=1, col=1,
            )  # fmt: skip


def grid(rows: int, columns: int, title: str, height: int, **places: Any) -> go.Figure:
    """Plots in the house style whose bars lie where their bases say, and the legend below them."""
    layout = {"barmode": "overlay", "hovermode": "closest", "bargap": 0}
    fig = theme.subplots(rows, columns, title, height=height, layout=layout, **places)
    return fig.update_layout(
        legend=theme.LEGEND_BELOW | {"orientation": "h"}, margin={"t": 40 if title else 30, "b": 80}
    )


def _seen(held: int, needed: int) -> float:
    """How far up an axis goes."""
    return 1.06 * (held if held <= 4 * needed else 1.4 * needed)


def _end(plan: Plan) -> int:
    return max((life.last for life in plan.lifetimes), default=0) + 1


def _scaled(num_bytes: Sequence[int], scale: int) -> list[float]:
    return [round(each / scale, 4) for each in num_bytes]
