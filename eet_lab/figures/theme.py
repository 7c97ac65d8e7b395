"""One look for all figures and widgets: colours, the style sheet, and the few pieces of HTML that they share."""

from __future__ import annotations

import math
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape, unescape
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eet_lab.errors import EETError, as_called, name_in_words
from eet_lab.figures import outputs
from eet_lab.figures.outputs import Figure
from eet_lab.figures.script import style
from eet_lab.words import plain

BASELINE = "#8a94a6"
SELECTION = "#3b82f6"
GAIN = "#0e9f6e"
LOSS = "#ef4444"
SERIES = (SELECTION, "#d97706", GAIN, "#a855f7", "#ec4899", "#0891b2", "#96550f", "#65a30d", "#dc2626")

# Figures are static and do not know the page's theme, so they use what reads on white and on black; widgets.css, which
# knows this ink, gives text in it the page's own colour.
INK = "#70757f"
GRID = "rgba(125, 133, 144, 0.22)"
UNSURE = "#9aa1ad"
"""The colour of what cannot be told apart from noise."""
# d3's format: thousands separators, four digits, no exponent.
DIGITS = ",.4~r"

# Clear of the title; the plot leaves it the room.
LEGEND_BELOW = {
    "orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom",
    "traceorder": "normal", "font": {"size": 11},
}  # fmt: skip
# plotly's buttons stand one above the other in the figure's right margin, which nothing else uses.
TOOLBAR_PX = 34

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def stylesheet() -> str:
    """The style sheet of widgets and figures as a <style> element."""
    return f"<style>{style('Theme')}</style>{outputs.stylesheet()}"


AXIS = {
    "gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True, "separatethousands": True,
    "exponentformat": "none",
}  # fmt: skip
GRID_AXES = {key: {"ticks": "", "title": {"standoff": 15}, "zerolinewidth": 2} for key in ("xaxis", "yaxis")}
"""Axes of plots in a grid. It stands in place of plotly's own template, 10 kB in every saved figure."""


def figure(title: str = "", *, height: int = 340, **layout: Any) -> Figure:
    """An empty figure in the house style, legible on a light and on a dark page.

    A title too long for a window 500 px wide goes on over lines, which make the figure higher.
    """
    lines = [*_title_lines(title)]
    base = go.Layout(
        title={
            "text": "<br>".join(lines), "font": {"size": 14}, "x": 0, "xref": "container",
            "pad": {"l": 12, "t": 8 if len(lines) == 1 else FIRST_LINE_PX},
            "yref": "container", "y": 1, "yanchor": "top",
        },
        height=height,
        autosize=True,
        margin={"l": 56, "r": TOOLBAR_PX, "t": 34 if title else 10, "b": 40},
        font={"family": FONT, "size": 12, "color": INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        colorway=SERIES,
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        hoverlabel={"font": {"family": FONT}},
        modebar={
            "orientation": "v", "bgcolor": "rgba(0,0,0,0)", "color": INK, "activecolor": SELECTION,
        },
        xaxis=AXIS,
        yaxis=AXIS,
        template="none",
    )  # fmt: skip
    fig = Figure(layout=base).update_layout(**layout)
    more = TITLE_LINE_PX * max(len(lines) - 1, 0)
    return fig.update_layout(height=height + more, margin={"t": fig.layout.margin.t + more})


TITLE_WIDTH = 46
"""Characters of a title's line left of the toolbar where the window is 500 px wide."""
TITLE_LINE_PX = 18
FIRST_LINE_PX = 19
"""Down to the first of several lines: plotly.js measures to its foot, and with a single line to its head."""


def _title_lines(title: str) -> Iterator[str]:
    """Its lines, each broken into equal ones where it is too long; what has tags is left as it is."""
    for line in title.split("<br>"):
        num = math.ceil(len(line) / TITLE_WIDTH)
        if num < 2 or "<" in line:
            yield line
            continue
        tries = (textwrap.wrap(line, width) for width in range(math.ceil(len(line) / num), TITLE_WIDTH))
        yield from next((lines for lines in tries if len(lines) == num), textwrap.wrap(line, TITLE_WIDTH))


def title_apart(fig: go.Figure) -> tuple[str, Figure]:
    """A figure's title as text, which takes the width that there is, and the figure without it."""
    lines = fig.layout.title.text.split("<br>")
    less = TITLE_LINE_PX * (len(lines) - 1)
    bare = Figure(fig).update_layout(height=fig.layout.height - less, margin_t=fig.layout.margin.t - less)
    bare.layout.title = None
    return unescape(" ".join(lines)), bare


def subplots(
    rows: int, columns: int, title: str = "", *, height: int, layout: Mapping[str, Any], **grid: Any
) -> Figure:
    """A grid of empty plots in the house style; `grid` is what plotly's make_subplots takes."""
    fig = make_subplots(rows, columns, figure=Figure(layout={"template": {"layout": GRID_AXES}}), **grid)
    fig.update_layout(figure(title, height=height, **layout).layout)
    return fig.update_xaxes(AXIS).update_yaxes(AXIS).update_annotations(font={"size": 12})


def grid(rows: int, columns: int, title: str, height: int, **places: Any) -> Figure:
    """Such a grid for bars that lie where their bases say, with the legend below it."""
    layout = {"barmode": "overlay", "hovermode": "closest", "bargap": 0, "legend": LEGEND_BELOW}
    margin = {"t": 48 if title else 30, "b": 80}
    return subplots(rows, columns, title, height=height, layout=layout | {"margin": margin}, **places)


def hatched(color: str, lines: str) -> dict[str, Any]:
    """A bar's marker: lines of one colour on another."""
    return {"color": color, "pattern": {"shape": "/", "fillmode": "overlay", "fgcolor": lines, "size": 6}}


def hover(name: str, *lines: str) -> str:
    """What a hover says, with its name inside: plotly.js puts a name beside it, and in larger type past the edge."""
    return "<br>".join([f"<b>{name}</b>", *lines]) + "<extra></extra>"


def inside(color: str) -> dict[str, Any]:
    """Text in a bar of that colour, in black or white: one of the two has a contrast of 4.5 on any."""
    font = {"color": "black" if _luminance(color) > 0.179 else "white", "size": 11}
    return {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "textfont": font}


def _luminance(color: str) -> float:
    """That of an opaque "#rrggbb", as the contrast guidelines of the web define it."""
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def legend_once(fig: Figure) -> Figure:
    """Bars of one name share a place in the legend, which those without a bar do not take."""
    shown = set[str]()
    for bars in fig.select_traces(lambda trace: trace.type == "bar" and trace.name):
        bars.update(legendgroup=bars.name, showlegend=bars.name not in shown and len(bars.y) > 0)
        shown |= {bars.name} if bars.showlegend else set()
    return fig


class Curve(NamedTuple):
    """A line of `curves`: its values, one after the other, at `x`, or at 1, 2, 3 and so on."""

    name: str
    y: Iterable[float]
    color: str
    x: Sequence[float] = ()
    dash: str = "solid"
    fill: str | None = None


def curves(
    title: str, lines: Iterable[Curve], x_title: str, y_title: str, *, height: int, shape: str = "linear"
) -> Figure:
    """Lines from zero up, and the legend below them; `shape` is plotly's."""
    fig = figure(title, height=height, legend=LEGEND_BELOW, showlegend=True)
    for line in lines:
        y = rounded(line.y)
        fig.add_scatter(
            x=list(line.x or range(1, len(y) + 1)), y=y, mode="lines", name=line.name, fill=line.fill,
            line={"shape": shape, "color": line.color, "width": 2, "dash": line.dash},
            hovertemplate=hover(line.name, f"%{{x:{DIGITS}}}: %{{y:{DIGITS}}}"),
        )  # fmt: skip
    return fig.update_xaxes(title=x_title).update_yaxes(title=y_title, rangemode="tozero")


LINE_PX = 17
"""The height of a line of the label above a slider."""


def with_slider(
    fig: go.Figure, frames: Mapping[int, tuple[str, list]], traces: Sequence[int], *, pace_ms: int, legend_y: float
) -> go.Figure:
    """The figure with a step for each of `frames`: a label, and what becomes of `traces`, whose looks stay.

    The label of the present one stands above the slider; "<br>" begins a line, for which the figure becomes higher.
    Places are in pixels below the axes: buttons have a width of their own, however wide the figure is. The legend is
    above the plot, `legend_y` times as high as it.
    """
    fig.frames = [go.Frame(data=data, name=str(n), traces=list(traces)) for n, (_, data) in frames.items()]
    more = LINE_PX * max(label.count("<br>") for label, _ in frames.values())
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
        "ticklen": 0, "minorticklen": 0, "bgcolor": GRID, "bordercolor": GRID,
        "currentvalue": {"prefix": "", "font": {"color": INK, "size": 13}, "xanchor": "left"},
    }  # fmt: skip
    menu = {
        "type": "buttons", "direction": "left", "buttons": buttons, "x": 0, "xanchor": "left", "y": 0,
        "yanchor": "top", "pad": {"t": 108 + more}, "showactive": False,
        "bgcolor": "rgba(0,0,0,0)", "bordercolor": GRID,
    }  # fmt: skip
    legend = {"x": 0, "y": legend_y, "yanchor": "bottom", "xanchor": "left", "yref": "paper", "orientation": "h"}
    fig.update_layout(height=fig.layout.height + more, margin={"t": 84, "b": 150 + more}, legend=legend)
    return fig.update_layout(sliders=[slider], updatemenus=[menu])


def words(text: str, width: int = 0) -> str:
    """Text from outside for a figure, whose own text is a kind of HTML; broken into lines of `width` if given."""
    return "<br>".join(map(escape, textwrap.wrap(text, width) if width else [text]))


def rounded(values: Iterable[float]) -> list[float]:
    """Four digits: a saved notebook need not carry more."""
    return [float(f"{value:.4g}") for value in values]


FAR = 8
"""A ratio of the ends above which a linear axis hides the smaller one."""


def is_far(values: Iterable[float]) -> bool:
    """Whether these, on one linear axis, call for a logarithmic one."""
    known = [value for value in values if value > 0]
    return bool(known) and max(known) > FAR * min(known)


def axis(low: float, high: float, title: str, log: bool, room: float = 1.0) -> dict[str, Any]:
    """A linear axis from 0, or a logarithmic one from `low`; `room` times as far up as `high`."""
    if log:
        return log_axis(low, high * room, title)
    return {"title": title, "range": [min(low, 0.0), high * room], "tickformat": DIGITS}


def log_axis(low: float, high: float, title: str) -> dict[str, Any]:
    """A logarithmic axis between two positive numbers, which says so and has plain numbers at round places."""
    ticks = log_ticks(low, high)
    return {
        "title": f"{title}, log scale",
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [plain(tick) for tick in ticks],
    }


LOG_STEPS = ((2000, (1,)), (8, (1, 2, 5)), (3, (1, 1.5, 2, 3, 4, 5, 6, 8)))
"""Places of ticks in every decade, above a ratio of an axis's ends; no gap between them is as wide as the ratio."""
CLOSE_STEPS = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two: the fewer for each decade, the longer the axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = next((steps for ratio, steps in LOG_STEPS if high > ratio * low), CLOSE_STEPS)
    ticks = (float(f"{step * 10.0**decade:.4g}") for decade in decades for step in steps)
    return [tick for tick in ticks if low <= tick <= high]


def badge(text: str, kind: str = "plain") -> str:
    """A small label; `kind` is "plain", "good", "warn" or "bad"."""
    return f'<span class="eet-badge eet-{kind}">{escape(text)}</span>'


def note(text: str, kind: str = "plain") -> str:
    """A paragraph with a coloured edge."""
    return f'<div class="eet-note eet-{kind}">{escape(text)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], below: str = "") -> str:
    """A table of results, whose rows begin with their names; all of it but `below` is escaped."""
    body = "".join(f"<tr><th>{escape(name)}</th>{_cells('td', rest)}</tr>" for name, *rest in rows)
    whole = f"<table><thead><tr>{_cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="eet-result">{whole}{below}</div>'


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)


def error_state(error: BaseException) -> dict[str, str]:
    """What went wrong, readable: errors made for users as they are, others with their traceback as "details"."""
    if isinstance(error, EETError):
        cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        return {"title": name_in_words(error), "text": str(error), "details": cause}
    text = f"{str(error) or 'It carries no message.'} The session goes on; please report this with the details below."
    return {
        "title": f"Unexpected: {type(error).__name__}",
        "text": text,
        "details": "".join(traceback.format_exception(error)),
    }


def error_card(error: BaseException, names: Mapping[str, str] | None = None) -> str:
    """The same as HTML, its details in a fold; `names` are what a page calls the fields that an error may name."""
    title, text, details = error_state(error).values()
    title, text, details = map(escape, (title, as_called(text, names or {}, throughout=True), details))
    fold = f"<details><summary>details</summary><pre>{details}</pre></details>" if details else ""
    return f'<div class="eet-error" role="alert"><b>{title}</b><p>{text}</p>{fold}</div>'
