"""A ladder's rungs, time per token: what bytes and launches predict, what was measured, and what is left above the
floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import plotly.graph_objects as go
from IPython.display import HTML

from eet_lab.bench import Ladder, Spread
from eet_lab.bench.cost import LaunchCost, step_ms
from eet_lab.bench.launches import StepLaunches, num_kernels
from eet_lab.figures import theme
from eet_lab.lessons.show import table
from eet_lab.models.config import Config
from eet_lab.technique import Recipe
from eet_lab.techniques import DependentLaunch
from eet_lab.words import brief, percent

H200 = LaunchCost(kernel_us=0.902, launch_us=7.34)
"""Measured by a run of its own, on another host than the recorded ladder's (benchmarks/h200-machine.json)."""


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
    for number, rung in enumerate(result.rungs):
        cost, tpot = rung.measurement.cost, rung.measurement.tpot_ms
        if cost is None or cost.floor_ms is None or tpot is None:
            continue
        parts = Recipe.parse(rung.measurement.recipe.removeprefix("baseline"), device).parts
        kernels = num_kernels(parts, result.prompt_lengths, config)
        launches = 1 if parts.is_captured else kernels
        predicted = step_ms(cost.floor_ms, StepLaunches(launches, kernels), price)
        title = f"+ {rung.title}" if number else rung.title
        found.append(Rise(title, launches, kernels, cost.floor_ms, predicted, tpot))
    return found


def unsteady(found: Sequence[Rise], what: str) -> str:
    """How far two times of one step are apart, whose every kernel Python launches: that is the measurement's error.

    `what` varied so much.
    """
    same = [
        (before, after)
        for before, after in pairwise(found)
        if before.launches == before.kernels == after.launches == after.kernels and before.floor_ms == after.floor_ms
    ]
    if not same:
        return ""
    apart = max(same, key=lambda pair: abs(math.log(pair[1].measured.p50 / pair[0].measured.p50)))
    times = sorted(rise.measured.p50 for rise in apart)
    names = " and ".join(rise.title.removeprefix("+ ") for rise in apart)
    return (
        f"{names} make the same calls in a step, and took {brief(times[0])} and {brief(times[1])} ms: {what} varied by "
        f"so much. A difference below a factor of {times[1] / times[0]:.2f} says nothing."
    )


def early_start(result: Ladder) -> str:
    """What the prediction does not know of dependent launch, with a space ahead; nothing where that is on no rung."""
    for rung, before in zip(result.rungs[1:], result.rungs, strict=False):
        took, took_before = rung.measurement.tpot_ms, before.measurement.tpot_ms
        if rung.technique == DependentLaunch.name and took and took_before:
            along = "" if rung.along else ": only the measurement moves"
            return (
                f" Dependent launch lets a kernel begin early, which the prediction does not include{along}, from "
                f"{brief(took_before.p50)} to {brief(took.p50)} ms."
            )
    return ""


def figure(found: Sequence[Rise], title: str) -> go.Figure:
    """A line for each rung from the predicted time (open) to the measured one (full), and the floor across all."""
    fig = theme.figure(title, height=190 + 42 * len(found), legend=theme.LEGEND_BELOW, margin={"t": 58})
    names = [rise.title for rise in found]
    gaps = [(rise.predicted_ms, rise.measured.p50) for rise in found]
    fig.add_scatter(
        x=[x for pair in gaps for x in (*theme.rounded(pair), None)],
        y=[y for name in names for y in (name, name, None)],
        mode="lines", line={"color": theme.GRID, "width": 6}, hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    fig.add_scatter(
        x=theme.rounded(rise.predicted_ms for rise in found), y=names, mode="markers", name="predicted",
        marker={"symbol": "circle-open", "size": 11, "color": theme.SELECTION, "line": {"width": 2}},
        hovertemplate="%{y}: predicted %{x} ms<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        x=theme.rounded(rise.measured.p50 for rise in found), y=names, mode="markers", name="measured",
        legendgroup="measured", marker={"size": 11, "color": theme.GAIN},
        hovertemplate="%{y}: measured %{x} ms<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        x=theme.rounded(max(pair) for pair in gaps), y=names, mode="text", cliponaxis=False, hoverinfo="skip",
        text=[f"   {brief(rise.measured.p50)} ms" for rise in found], textposition="middle right",
        name="measured", legendgroup="measured", showlegend=False,
    )  # fmt: skip
    floor = min(rise.floor_ms for rise in found)
    fig.add_vline(x=floor, line={"color": theme.INK, "dash": "dot", "width": 1.5})
    fig.add_annotation(
        x=math.log10(floor), y=1, yref="paper", xanchor="left", yanchor="bottom", showarrow=False,
        text=f"dotted: the floor, {brief(floor)} ms", font={"size": 11},
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", showgrid=False)
    low, high = 0.92 * floor, 1.1 * max(map(max, gaps))
    room = (high / low) ** 0.12  # for the words beside the last marker
    return fig.update_xaxes(theme.log_axis(low, high * room, "ms per token"))


def listing(found: Sequence[Rise]) -> HTML:
    """The same in numbers."""
    rows = [
        [
            rise.title,
            f"{rise.launches:,}" if rise.launches == rise.kernels else f"1 (a graph of {rise.kernels:,})",
            brief(rise.predicted_ms),
            brief(rise.measured.p50),
            percent(rise.floor_ms / rise.measured.p50),
        ]
        for rise in found
    ]
    return table(["rung", "launches a step (counted)", "predicted ms", "measured ms", "floor / measured"], rows)
