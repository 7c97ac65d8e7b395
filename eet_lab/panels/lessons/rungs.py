"""A ladder's rungs, time per token: what bytes and launches predict beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import plotly.graph_objects as go
from IPython.display import HTML

from eet_lab.bench import Ladder, Spread
from eet_lab.bench.calls import is_launched_by_python, num_kernels
from eet_lab.bench.cost import LaunchCost, launch_cost, step_ms
from eet_lab.bench.launches import StepLaunches
from eet_lab.models.config import Config
from eet_lab.panels import theme
from eet_lab.panels.lessons.show import table
from eet_lab.technique import Recipe
from eet_lab.techniques import DependentLaunch
from eet_lab.words import counted as told

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
        launches = kernels if is_launched_by_python(parts) else 1
        predicted = step_ms(cost.floor_ms, StepLaunches(launches, kernels), price)
        title = f"+ {rung.title}" if number else rung.title
        found.append(Rise(title, launches, kernels, cost.floor_ms, predicted, tpot))
    return found


def price_here(device: str) -> LaunchCost | None:
    """What launching costs on this GPU, measured; None on the CPU."""
    return launch_cost(device)


def above_prediction(found: Sequence[Rise]) -> str:
    """How often a step on a CPU took longer than predicted, and why one does."""
    above = sum(rise.measured.p50 > rise.predicted_ms for rise in found)
    why = "Python runs between the calls, and calls on real tensors do more than that one"
    if above == len(found):
        return f"What is measured is more: {why}."
    return (
        f"On {above} of {told(len(found), 'rung')} what is measured is more: {why}. Where it is less, the weights "
        "came from the CPU's caches, or the price of a call was measured at a busier moment."
    )


def unsteady(found: Sequence[Rise], what: str) -> str:
    """How far two times of one step are apart, whose every kernel Python launches: that is the measurement's error.

    `what` was so unsteady.
    """
    same = [
        (before, after)
        for before, after in pairwise(found)
        if before.launches == before.kernels == after.launches == after.kernels and before.floor_ms == after.floor_ms
    ]
    if not same:
        return ""
    apart = max(same, key=lambda pair: abs(math.log(pair[1].measured.p50 / pair[0].measured.p50)))
    times = " and ".join(f"{rise.measured.p50:.3g}" for rise in apart)
    factor = max(rise.measured.p50 for rise in apart) / min(rise.measured.p50 for rise in apart)
    return (
        f"So {times} ms of {apart[0].title.removeprefix('+ ')} and {apart[1].title.removeprefix('+ ')} are two "
        f"measurements of one step, a factor of {factor:.2f} apart: so unsteady was {what}. "
        "Where Python launches both rungs, read nothing into a smaller factor."
    )


def early_start(result: Ladder) -> str:
    """What the prediction does not know of dependent launch, with a space ahead; nothing where that is on no rung."""
    for rung, before in zip(result.rungs[1:], result.rungs, strict=False):
        took, took_before = rung.measurement.tpot_ms, before.measurement.tpot_ms
        if rung.technique == DependentLaunch.name and took and took_before:
            along = "" if rung.along else ": on that rung only the measurement moves"
            return (
                " The prediction does not know that dependent launch lets a kernel begin while the one before still "
                f"runs{along}, from {took_before.p50:.3g} to {took.p50:.3g} ms."
            )
    return ""


def figure(found: Sequence[Rise], title: str) -> go.Figure:
    """For each rung a line from the predicted time (open) to the measured one (full), and the floor across all."""
    fig = theme.figure(title, height=170 + 42 * len(found), legend=theme.LEGEND_BELOW)
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
        x=[_digits(rise.measured.p50) for rise in found], y=names, mode="markers", name="measured",
        legendgroup="measured", marker={"size": 11, "color": theme.GAIN},
        hovertemplate="%{y}: measured %{x} ms<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        x=[_digits(max(pair)) for pair in gaps], y=names, mode="text", cliponaxis=False, hoverinfo="skip",
        text=[f"   {rise.measured.p50:.3g} ms" for rise in found], textposition="middle right",
        name="measured", legendgroup="measured", showlegend=False,
    )  # fmt: skip
    floor = min(rise.floor_ms for rise in found)
    fig.add_vline(x=floor, line={"color": theme.INK, "dash": "dot", "width": 1.5})
    fig.add_annotation(
        x=math.log10(floor), y=1, yref="paper", xanchor="left", yanchor="bottom", showarrow=False,
        text=f"dotted: the floor, {floor:.3g} ms", font={"size": 11},
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", showgrid=False)
    low, high = 0.92 * floor, 1.1 * max(map(max, gaps))
    room = (high / low) ** 0.12  # for the words beside the last marker
    return fig.update_xaxes(theme.log_axis(low, high * room, "ms for a token"))


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
