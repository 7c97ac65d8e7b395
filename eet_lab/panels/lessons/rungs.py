"""A ladder's rungs, time per token: what bytes and launches predict beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go
from IPython.display import HTML

from eet_lab.bench import Cost, Ladder, Spread
from eet_lab.bench.cost import LaunchCost, launch_cost
from eet_lab.models.config import Config
from eet_lab.panels import theme
from eet_lab.panels.lessons.show import table
from eet_lab.panels.lessons.step_calls import call_us, counted
from eet_lab.parts import Parts
from eet_lab.technique import Recipe

H200 = LaunchCost(kernel_us=0.921, launch_us=5.168)
"""Measured where the ladder was recorded (benchmarks/h200-machine.json)."""


class Rise(NamedTuple):
    """One rung. `launches` is what the host hands over in a step, `kernels` what the device runs."""

    title: str
    launches: int
    kernels: int
    floor_ms: float
    predicted_ms: float
    measured: Spread


def rises(result: Ladder, config: Config, price: LaunchCost | None) -> list[Rise]:
    """The rungs of a ladder that have a time per token. `price` is None on the CPU, where a call is waited for."""
    device, found = result.environment.device_kind, []
    one_call_us = call_us() if price is None else 0.0
    for number, rung in enumerate(result.rungs):
        cost, tpot = rung.measurement.cost, rung.measurement.tpot_ms
        if cost is None or cost.floor_ms is None or tpot is None:
            continue
        parts = Recipe.parse(rung.measurement.recipe.removeprefix("baseline"), device).parts
        kernels = counted(parts, result.prompt_lengths, config.num_layers).total
        launches = kernels if parts.launch is Parts().launch else 1
        predicted = _predicted_ms(cost, launches, kernels, price, one_call_us)
        title = f"+ {rung.title}" if number else rung.title
        found.append(Rise(title, launches, kernels, cost.floor_ms, predicted, tpot))
    return found


def price_here(device: str) -> LaunchCost | None:
    """What launching costs on this GPU, measured; None on the CPU."""
    return launch_cost(device)


def _predicted_ms(cost: Cost, launches: int, kernels: int, price: LaunchCost | None, one_call_us: float) -> float:
    """A CPU reads and calls in turn; a GPU reads while the host launches, and the slower of both counts."""
    floor_ms = cost.floor_ms or 0.0
    if price is None:
        return floor_ms + launches * one_call_us / 1e3
    return max(floor_ms + kernels * price.kernel_us / 1e3, launches * price.launch_us / 1e3)


def figure(found: Sequence[Rise], title: str) -> go.Figure:
    """For each rung a line from the predicted time (open) to the measured one (full), and the floor across all."""
    fig = theme.figure(title, height=160 + 42 * len(found), margin={"l": 60, "r": 24, "t": 44, "b": 58})
    names = [rise.title for rise in found]
    gaps = [(rise.predicted_ms, rise.measured.p50) for rise in found]
    fig.add_scatter(
        x=[x for pair in gaps for x in (*map(_digits, pair), None)],
        y=[y for name in names for y in (name, name, None)],
        mode="lines", line={"color": theme.GRID, "width": 6}, hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    fig.add_scatter(
        x=[_digits(rise.predicted_ms) for rise in found], y=names, mode="markers", name="predicted",
        marker={"symbol": "circle-open", "size": 11, "color": theme.SELECTION, "line": {"width": 2}},
        hovertemplate="%{y}: predicted %{x} ms<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        x=[_digits(rise.measured.p50) for rise in found], y=names, mode="markers+text", name="measured",
        text=[f"   {rise.measured.p50:.3g} ms" for rise in found], textposition="middle right", cliponaxis=False,
        marker={"size": 11, "color": theme.GAIN}, hovertemplate="%{y}: measured %{x} ms<extra></extra>",
    )  # fmt: skip
    floor = min(rise.floor_ms for rise in found)
    fig.add_vline(x=floor, line={"color": theme.INK, "dash": "dot", "width": 1.5})
    fig.add_annotation(
        x=math.log10(floor), y=1, yref="paper", xanchor="left", yanchor="bottom", showarrow=False,
        text=f"dotted: the floor, {floor:.3g} ms", font={"size": 11},
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", showgrid=False)
    ends = 0.92 * floor, 1.3 * max(max(pair) for pair in gaps)
    fig.update_xaxes(title="ms for a token (log scale)", type="log", range=[math.log10(end) for end in ends])
    return fig.update_xaxes(tickvals=_ticks(*ends), ticktext=[f"{tick:g}" for tick in _ticks(*ends)])


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two, more of them on a short axis."""
    steps = (1, 2, 5) if high > 8 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = (step * 10.0**decade for decade in decades for step in steps)
    return [_digits(tick) for tick in ticks if low <= tick <= high]


def listing(found: Sequence[Rise]) -> HTML:
    """The same in numbers."""
    rows = [
        [
            rise.title,
            f"{rise.launches}" if rise.launches == rise.kernels else f"1 (a graph of {rise.kernels})",
            f"{rise.predicted_ms:.3g}",
            f"{rise.measured.p50:.3g}",
            f"{rise.floor_ms / rise.measured.p50:.0%}",
        ]
        for rise in found
    ]
    return table(["rung", "launches a step (counted)", "predicted ms", "measured ms", "floor / measured"], rows)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
