"""Batches as they were formed: time from left to right, a box for each pass, and the queue below, on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from eet_lab.figures import theme
from eet_lab.figures.packing import grid
from eet_lab.scheduling.served import Passes, Served
from eet_lab.words import brief, percent

PROMPTS, DECODES, WASTE = "prompts", "decode", "pads: computed, and nobody's"
LOOKS: dict[str, dict[str, Any]] = {
    PROMPTS: {"color": theme.SELECTION},
    DECODES: {"color": theme.GAIN},
    WASTE: {
        "color": "rgba(125,133,144,0.18)",
        "pattern": {"shape": "/", "fillmode": "overlay", "fgcolor": theme.BASELINE, "size": 6},
    },
}
LINES = theme.SERIES[1], theme.SERIES[3], theme.SERIES[4], theme.SERIES[5], theme.SERIES[6], theme.BASELINE
"""Colours of queues: none of those that boxes have."""
MOST_BOXES = 400
"""Passes of a run that are drawn: a saved figure is to stay small."""
POINTS = 300
HEIGHTS = ("tokens", "rows")


class Parts(NamedTuple):
    """What boxes are made of, from the bottom to the top: numbers of each pass [P]."""

    decodes: np.ndarray
    prompts: np.ndarray
    waste: np.ndarray


def parts(passes: Passes, height: str) -> Parts:
    """Tokens of each kind, or rows: those that decode, and of those that read prompts the share that is no pads."""
    if height == "tokens":
        return Parts(passes.decoded, passes.prompt_tokens, passes.pads)
    read = np.maximum(passes.prompt_tokens + passes.pads, 1)
    rows = passes.rows - passes.decoded
    return Parts(passes.decoded, rows * passes.prompt_tokens / read, rows * passes.pads / read)


def batches(
    runs: Mapping[str, Served],
    title: str = "",
    span_ms: tuple[float, float] | None = None,
    *,
    height: str = "tokens",
    queue: bool = True,
    texts: Mapping[str, Sequence[str]] | None = None,
) -> go.Figure:
    """A panel for each run, one above the other on one clock, and all queues below.

    A box is a pass: as wide as it takes, and as high as the `height`, "tokens" or "rows", that it computes; pads are
    shaded. `span_ms` is the time in view, which ends before any run has more than MOST_BOXES passes in it. `texts` are
    what stands in the boxes of a run. ValueError for another height.
    """
    if height not in HEIGHTS:
        raise ValueError(f"height is {height!r}, but it must be one of: {', '.join(HEIGHTS)}.")
    begin, end = _view(runs, span_ms)
    unit, scale = ("s", 1e-3) if end - begin > 5e3 else ("ms", 1.0)
    names = [f"{name}: {in_words(served)}" for name, served in runs.items()]
    num = len(runs) + queue
    shares = [1.0] * len(runs) + [0.7] * queue
    fig = grid(
        num, 1, title, 90 + 175 * len(runs) + 130 * queue, shared_xaxes=True, vertical_spacing=0.24 / num,
        row_heights=shares, subplot_titles=[*names, *["requests that wait"] * queue],
    ).update_annotations(font={"size": 12})  # fmt: skip
    fig.update_layout(barmode="overlay", uniformtext={"minsize": 9, "mode": "hide"})
    shown = set[str]()
    for row, (name, served) in enumerate(runs.items(), 1):
        seen = _seen(served.passes, begin, end)
        for trace in _boxes(served.passes, seen, height, scale, (texts or {}).get(name)):
            kind = trace["name"]
            fig.add_bar(**trace, showlegend=kind not in shown, row=row, col=1)
            shown.add(kind)
        fig.update_yaxes(title=height, rangemode="tozero", row=row, col=1)
    highest = max(float(np.sum(parts(each.passes, height), axis=0).max()) for each in runs.values())
    for row in range(1, len(runs) + 1):
        fig.update_yaxes(range=[0, 1.05 * highest], row=row, col=1)
    if queue:
        for trace in queue_lines(runs, begin, end, scale):
            fig.add_scatter(**trace, row=num, col=1)
        fig.update_yaxes(title="requests", rangemode="tozero", row=num, col=1)
    return fig.update_xaxes(range=[begin * scale, end * scale]).update_xaxes(title=f"time, {unit}", row=num, col=1)


def in_words(served: Served) -> str:
    """Passes, the share of pads, and how long half of the requests, and all but one in a hundred, took at most."""
    times = served.percentiles["e2e_ms"]
    waste = percent(served.waste) if served.waste else "no"
    return f"{len(served.passes):,} passes, {waste} pads, p50 {_told(times['p50'])}, p99 {_told(times['p99'])}"


def queue_lines(runs: Mapping[str, Served], begin_ms: float, end_ms: float, scale: float = 1.0) -> list[dict[str, Any]]:
    """How many requests wait over time, a line for each run."""
    at = np.linspace(begin_ms, end_ms, POINTS)
    return [
        {
            "x": _small(at * scale), "y": served.queued(at).astype(np.int32), "name": f"queue: {name}", "mode": "lines",
            "line": {"shape": "hv", "width": 2, "color": LINES[number % len(LINES)]},
        }
        for number, (name, served) in enumerate(runs.items())
    ]  # fmt: skip


def _small(values: np.ndarray) -> np.ndarray:
    """Numbers as plotly packs them: a saved notebook has each list of numbers with a line for each."""
    return values.astype(np.float32)


def _told(ms: float) -> str:
    return f"{brief(ms / 1e3)} s" if ms >= 1e3 else f"{brief(ms)} ms"


def _view(runs: Mapping[str, Served], span_ms: tuple[float, float] | None) -> tuple[float, float]:
    """The time in view; its end is where a run has had its most boxes."""
    begin, end = span_ms or (0.0, max(float(each.passes.end_ms[-1]) for each in runs.values()))
    for served in runs.values():
        ends = served.passes.end_ms[_seen(served.passes, begin, end)]
        end = min(end, float(ends[MOST_BOXES - 1])) if len(ends) > MOST_BOXES else end
    return begin, end


def _seen(passes: Passes, begin_ms: float, end_ms: float) -> np.ndarray:
    """The numbers of the passes that begin before the end of what is in view and end after its beginning."""
    return np.flatnonzero((passes.end_ms > begin_ms) & (passes.begin_ms < end_ms))[:MOST_BOXES]


def _boxes(
    passes: Passes, seen: np.ndarray, height: str, scale: float, texts: Sequence[str] | None
) -> list[dict[str, Any]]:
    of = parts(passes, height)
    begin, end = passes.begin_ms[seen] * scale, passes.end_ms[seen] * scale
    told = np.stack(
        [seen + 1, passes.rows[seen], passes.prompt_tokens[seen], passes.decoded[seen], passes.pads[seen]], axis=1
    ).astype(np.int32)
    bottom = np.zeros(len(seen))
    traces = []
    for kind, values in zip((DECODES, PROMPTS, WASTE), of, strict=True):
        there = values[seen] > 0
        y = values[seen][there]
        traces.append(
            {
                "x": _small((begin + end)[there] / 2), "width": _small((end - begin)[there]), "y": _small(y),
                "base": _small(bottom[there]), "name": kind, "legendgroup": kind, "customdata": told[there],
                "marker": {**LOOKS[kind], "line": {"width": 0.5, "color": theme.GRID}},
                "text": list(texts) if texts and kind == PROMPTS else None, "textposition": "inside",
                "insidetextanchor": "middle", "textangle": 0, "textfont": {"color": "white", "size": 11},
                "hovertemplate": "pass %{customdata[0]}: %{customdata[1]} requests<br>%{customdata[2]} tokens of "
                "prompts, %{customdata[3]} decode, %{customdata[4]} pads<extra></extra>",
            }
        )  # fmt: skip
        bottom = bottom + values[seen]
    return [trace for trace in traces if len(trace["y"])]
