"""Slots over passes, a lane for each slot and a box for each request; and the tokens of each pass as bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import plotly.graph_objects as go

from eet_lab.figures import theme
from eet_lab.scheduling.simulate import Simulated
from eet_lab.words import counted, percent

READS, AGAIN, GENERATES = "reads its prompt", "reads again", "generates"
LOOKS: dict[str, dict[str, Any]] = {
    READS: theme.hatched("rgba(14,159,110,0.3)", theme.GAIN),
    AGAIN: theme.hatched("rgba(239,68,68,0.25)", theme.LOSS),
    GENERATES: {"color": theme.GAIN},
}
INSIDE = theme.inside(theme.GAIN)
"""Numbers stand on what generates."""
GAP = 0.15
"""A share of a pass: a request's box does not touch the next one's."""


SLIDER_PX = 150
"""What a slider takes of a figure's height, and lanes of more slots."""


class Box(NamedTuple):
    """Passes `first .. first + num_passes - 1`, in which a request does one thing in its slot."""

    request: int
    slot: int
    kind: str
    first: int
    num_passes: int
    leaves: bool = False  # the slot after it, or stops for a pass


def boxes(served: Simulated) -> list[Box]:
    """What each request does, in the order in which it begins."""
    numbers = {request: number for number, request in enumerate(served.requests)}
    found, last, most_read = list[Box](), dict[int, int](), dict[int, int]()
    for at, rows in enumerate(served.passes):
        for request, slot, start, count, _ in rows:
            number, before = numbers[request], most_read.get(numbers[request], 0)
            kind = AGAIN if start < before else READS if start < len(request.prompt) else GENERATES
            most_read[number] = max(before, start + count)
            box = found[last[number]] if number in last else None
            if box and (box.slot, box.kind, box.first + box.num_passes) == (slot, kind, at):
                found[last[number]] = box._replace(num_passes=box.num_passes + 1)
            else:
                last[number] = len(found)
                found.append(Box(number, slot, kind, at, 1))
    goes_on = {(box.request, box.slot, box.first) for box in found}
    return [box._replace(leaves=(box.request, box.slot, box.first + box.num_passes) not in goes_on) for box in found]


def in_words(served: Simulated) -> str:
    """Passes, and the share of slots that were idle in them."""
    return f"{len(served.passes):,} passes, {percent(served.idle_share)} of the slots idle"


def lanes(runs: Mapping[str, Simulated]) -> go.Figure:
    """One panel for each run, on one axis of passes; its title tells passes and idle share."""
    height = 150 + sum(60 + 26 * max(served.num_slots, 4) for served in runs.values())
    places = {"shared_xaxes": True, "subplot_titles": _titles(runs), "vertical_spacing": 0.22 / len(runs)}
    fig = theme.grid(len(runs), 1, "", height, **places)
    for row, served in enumerate(runs.values(), 1):
        for kind, trace in zip(LOOKS, _traces(served), strict=True):
            hover = f"request %{{customdata[0]}} {kind}: passes %{{customdata[1]}} to %{{customdata[2]}}<extra></extra>"
            look = {"marker": {**LOOKS[kind], "line": {"width": 0}}, "hovertemplate": hover, **INSIDE}
            fig.add_bar(**trace, name=kind, **look, row=row, col=1)
        axis = {"title": "slot", "dtick": 1, "showgrid": False, "zeroline": False}
        fig.update_yaxes(**axis, range=_lanes_of(served.num_slots), row=row, col=1)
    fig.update_layout(bargap=0.18, uniformtext={"minsize": 8, "mode": "hide"})
    fig.update_xaxes(range=[0, 1.01 * _longest(runs)]).update_xaxes(title="pass", row=len(runs), col=1)
    return theme.legend_once(fig)


def lanes_by_slots(runs: Mapping[int, Mapping[str, Simulated]], first: int) -> go.Figure:
    """The same for several numbers of slots, with a slider between them; `first` is shown at first."""
    fig = lanes(runs[first])
    frames = {
        slots: (counted(slots, "slot"), [go.Bar(**trace) for each in of.values() for trace in _traces(each)])
        for slots, of in runs.items()
    }
    theme.with_slider(fig, frames, range(len(fig.data)), pace_ms=1500, legend_y=1.08)
    fig.update_layout(height=fig.layout.height + SLIDER_PX)
    fig.layout.sliders[0].active = list(runs).index(first)
    for frame, (slots, of) in zip(fig.frames, runs.items(), strict=True):
        notes = zip(fig.layout.annotations, _titles(of), strict=True)
        frame.layout.annotations = [{**note.to_plotly_json(), "text": text} for note, text in notes]
        longest = max(map(_longest, (runs[first], of)))
        for at in range(1, len(of) + 1):
            frame.layout[f"xaxis{at}"] = {"range": [0, 1.01 * longest]}
            frame.layout[f"yaxis{at}"] = {"range": _lanes_of(slots)}
    return fig


def _titles(runs: Mapping[str, Simulated]) -> list[str]:
    return [f"{name}: {in_words(served)}" for name, served in runs.items()]


def _longest(runs: Mapping[str, Simulated]) -> int:
    return max(len(served.passes) for served in runs.values())


def _traces(served: Simulated) -> list[dict[str, Any]]:
    """The boxes of each kind."""
    groups = {kind: [box for box in boxes(served) if box.kind == kind] for kind in LOOKS}
    return [
        {
            "orientation": "h",
            "y": [box.slot for box in of],
            "base": [box.first for box in of],
            "x": [round(box.num_passes - GAP * box.leaves, 2) for box in of],
            "text": [f"{box.request + 1}" if kind == GENERATES else "" for box in of],
            "customdata": [[box.request + 1, box.first + 1, box.first + box.num_passes] for box in of],
        }
        for kind, of in groups.items()
    ]


def _lanes_of(slots: int) -> list[float]:
    """The axis of the slots, from top to bottom."""
    return [slots - 0.5, -0.5]


def pass_tokens(runs: Mapping[str, Simulated], title: str) -> go.Figure:
    """Tokens of each pass, those of rows that decode below those of prompts; panels side by side, at one scale."""
    layout = {"barmode": "stack", "bargap": 0.1, "legend": theme.LEGEND_BELOW, "margin": {"t": 60, "b": 80}}
    places = {"subplot_titles": list(runs), "shared_yaxes": True, "horizontal_spacing": 0.03}
    fig = theme.subplots(1, len(runs), title, height=340, layout=layout, **places)
    for column, served in enumerate(runs.values(), 1):
        x = list(range(1, len(served.passes) + 1))
        kinds = ("decode tokens", theme.GAIN), ("prompt tokens", theme.SELECTION)
        for (name, color), y in zip(kinds, zip(*served.tokens, strict=True), strict=True):
            hover = f"pass %{{x}}: %{{y}} {name}<extra></extra>"
            fig.add_bar(x=x, y=y, name=name, marker={"color": color}, hovertemplate=hover, row=1, col=column)
    fig.update_yaxes(title="tokens of the pass", col=1).update_xaxes(title="pass")
    return theme.legend_once(fig)
