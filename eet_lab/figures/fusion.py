"""The fusion map: launches, bytes and milliseconds of a training step, by phase, before and after each technique."""

from __future__ import annotations

from collections.abc import Callable

import plotly.graph_objects as go

from eet_lab.bench.fusion import FusionMap, FusionRung, Gain, PhaseWork
from eet_lab.bench.paired import Change
from eet_lab.bench.timeline_steps import PHASES
from eet_lab.figures import theme
from eet_lab.words import MiB, brief, percent

COLORS = dict(zip(PHASES, (theme.SELECTION, theme.SERIES[1], theme.GAIN), strict=True))
PALE = 0.4
"""The opacity of the step before, whose bar is above."""
HALF, HEIGHT = 0.19, 0.34
"""How far a bar is from its technique's line, and how high it is."""
LAUNCHES = {"cuda": "launches", "cpu": "calls of PyTorch"}
COLUMNS: dict[str, Callable[[PhaseWork], float]] = {
    "launches": lambda work: work.launches,
    "MiB moved": lambda work: work.num_bytes / MiB,
    "ms, launched one by one": lambda work: work.ms,
}
ROOM = 1.9
"""The last axis is so many times as long as its longest bar: words stand beside the bars."""


def fusion(result: FusionMap) -> go.Figure:
    """A row for each technique: the step before it in pale colours, and with it below; what it gains stands beside."""
    pairs = result.pairs
    title = f"Fusion map of {result.workload}: before, and with each technique"
    fig = theme.grid(1, len(COLUMNS), title, 150 + 52 * max(1, len(pairs)), shared_yaxes=True, horizontal_spacing=0.03)
    titles = [LAUNCHES[result.environment.device_kind], *list(COLUMNS)[1:]]
    for column, read in enumerate(COLUMNS.values(), 1):
        longest = 0.0
        for place, pair in enumerate(pairs):
            for rung, at, opacity in zip(pair, (place - HALF, place + HALF), (PALE, 1.0), strict=True):
                longest = max(longest, _stacked(fig, rung, read, at, opacity, column))
        fig.update_xaxes(
            row=1, col=column, title=titles[column - 1], tickformat=theme.DIGITS,
            range=[0, (ROOM if column == len(COLUMNS) else 1.05) * (longest or 1.0)],
        )  # fmt: skip
    gains = [after.gain(before) for before, after in pairs]
    ends = [max(sum(work.ms for work in rung.work.values()) for rung in pair) for pair in pairs]
    fig.add_scatter(
        x=theme.rounded(ends), y=list(range(len(pairs))), mode="text",
        text=["<br>".join(f"  {line}" for line in _words(gain).split(", ")) for gain in gains],
        textposition="middle right", textfont={"size": 11}, cliponaxis=False, showlegend=False,
        customdata=[_bound(gain) for gain in gains], hovertemplate="%{customdata}<extra></extra>",
        row=1, col=len(COLUMNS),
    )  # fmt: skip
    fig.update_yaxes(
        tickvals=list(range(len(pairs))), ticktext=[theme.words(after.title) for _, after in pairs], showgrid=False,
        range=[len(pairs) - 0.5, -0.5], zeroline=False,
    )  # fmt: skip
    return theme.legend_once(fig)


def _stacked(
    fig: go.Figure, rung: FusionRung, read: Callable[[PhaseWork], float], at: float, opacity: float, column: int
) -> float:
    """A bar of the three phases, one behind the other; returns where it ends."""
    end = 0.0
    for phase, work in rung.work.items():
        value = read(work)
        fig.add_bar(
            x=theme.rounded([value]), base=theme.rounded([end]), y=[at], width=HEIGHT, orientation="h", name=phase,
            marker={"color": COLORS[phase], "opacity": opacity, "line": {"width": 0}}, customdata=[brief(value)],
            hovertemplate=f"{phase} of {theme.words(rung.recipe)}: %{{customdata}}<extra></extra>", row=1, col=column,
        )  # fmt: skip
        end += value
    return end


def _words(gain: Gain | None) -> str:
    """`update 7.8 ×, step 1.1 ×`, as far as it can be told."""
    if gain is None:
        return "no gain to tell"
    of_phase = "" if gain.of_phase is None else f"{gain.phase} {_times(gain.of_phase)}, "
    return f"{of_phase}step {_times(gain.of_step)}"


def _times(change: Change) -> str:
    return "?" if change.verdict == "cannot tell apart" else f"{brief(1 / change.ratio, 2)} ×"


def _bound(gain: Gain | None) -> str:
    """Why the step gains less than the phase (Amdahl)."""
    if gain is None:
        return "no part of the step is faster by more than noise"
    if gain.of_phase is None:
        return f"step: {gain.of_step.words('ms')}<br>its parts, launched one by one, tell nothing of it"
    return (
        f"{gain.phase}: {gain.of_phase.words('ms')}<br>it was {percent(gain.share)} of the step: were it gone, the "
        f"step would be {brief(gain.most, 3)} × as fast<br>step: {gain.of_step.words('ms')}"
    )
