"""A slider and play and pause buttons under a figure with frames; they work in a saved notebook without a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from eet_lab.figures import theme

LINE = 17
"""The height of the label above a slider, in pixels."""


def with_slider(
    fig: go.Figure, frames: Mapping[int, tuple[str, list]], traces: Sequence[int], *, pace_ms: int, legend_y: float
) -> go.Figure:
    """The figure with a step for each of `frames`: a label, and what becomes of `traces`, whose looks stay.

    The label of the present one stands above the slider; "<br>" begins a line, for which the figure becomes higher.
    Places are in pixels below the axes: buttons have a width of their own, however wide the figure is. The legend is
    above the plot, `legend_y` times as high as it.
    """
    fig.frames = [go.Frame(data=data, name=str(n), traces=list(traces)) for n, (_, data) in frames.items()]
    more = LINE * max(label.count("<br>") for label, _ in frames.values())
    still = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    playing = {**still, "fromcurrent": True, "frame": {"duration": pace_ms, "redraw": True}}
    buttons: list[dict[str, Any]] = [
        {"label": "▶ play", "method": "animate", "args": [None, playing]},
        {"label": "❚❚ pause", "method": "animate", "args": [[None], still]},
    ]
    steps = [{"label": label, "method": "animate", "args": [[str(n)], still]} for n, (label, _) in frames.items()]
    slider = {
        "steps": steps, "x": 0, "len": 1, "y": 0, "yanchor": "top", "pad": {"t": 54, "b": 0, "l": 0, "r": 0},
        "font": {"color": "rgba(0,0,0,0)", "size": 1},  # labels are long: only the present one is shown
        "ticklen": 0, "minorticklen": 0, "bgcolor": theme.GRID, "bordercolor": theme.GRID,
        "currentvalue": {"prefix": "", "font": {"color": theme.INK, "size": 13}, "xanchor": "left"},
    }  # fmt: skip
    menu = {
        "type": "buttons", "direction": "left", "buttons": buttons, "x": 0, "xanchor": "left", "y": 0,
        "yanchor": "top", "pad": {"t": 108 + more}, "showactive": False,
        "bgcolor": "rgba(0,0,0,0)", "bordercolor": theme.GRID,
    }  # fmt: skip
    legend = {"x": 0, "y": legend_y, "yanchor": "bottom", "xanchor": "left", "yref": "paper", "orientation": "h"}
    fig.update_layout(height=fig.layout.height + more, margin={"t": 84, "b": 150 + more}, legend=legend)
    return fig.update_layout(sliders=[slider], updatemenus=[menu])
