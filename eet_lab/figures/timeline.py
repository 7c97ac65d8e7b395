"""A decode step as a timeline: what the host hands over, and what the device does, the baseline above the selection."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go

from eet_lab.bench.timeline import Span, Timeline, Timelines
from eet_lab.figures import theme
from eet_lab.technique import short_form
from eet_lab.words import counted, ms_words, sized

KINDS = {
    "op": ("op of the engine", "rgba(125, 133, 144, 0.35)"),
    "call": ("call of PyTorch", theme.SERIES[1]),
    "launch": ("launch", theme.SERIES[1]),
    "wait": ("wait for the device", theme.SERIES[4]),
    "memory": ("memory from the driver", theme.LOSS),
    "own kernel": ("our kernel", theme.GAIN),
    "gemm": ("cuBLAS kernel", theme.SERIES[0]),
    "torch kernel": ("PyTorch kernel", theme.SERIES[3]),
    "copy": ("copy or fill", theme.SERIES[6]),
    "other kernel": ("other kernel", theme.SERIES[5]),
}
"""Kinds of spans, in the order of the legend: what each is called there, and its colour."""
LANES = {"host": 2.6, "device": 1.6, "busy": 0.4}
OP_WIDTH, WIDTH = 0.86, 0.56
"""Heights of a bar in its lane: what runs within an op is drawn on it."""
BUSY_HEIGHT, BUSY_BINS = 0.8, 120

HEIGHT, TOP, BOTTOM = 520, 100, 84
LOW, LOW_TOP, LOW_BOTTOM = 400, 42, 62
"""A figure lower than the first has no title of its own, and the margins that follow."""
LONGEST_LINE = 72
CAPTION_WIDTH, CAPTION_LINE = 96, 15
"""Characters and pixels of a line below the title."""
ONE_EACH = "One step of each, and no measure of the difference: how long steps take is in Latency."
SLOWED = 1.05
"""The least ratio of a step under the profiler to one without it that the headline tells."""


def timeline_figure(timelines: Timelines, height: int | None = None) -> go.Figure:
    """The baseline above the selection on one clock, or each at its own width; zoom and pan go along time alone.

    A bar is at least a pixel wide, so far out the device looks busy all the time: a third lane tells its share.
    A trace is all spans that share a name, so that a hover's words are written once. With a low `height`, title and
    caption are left to the page: see `caption`.
    """
    low = height is not None and height < LOW
    said = [f'<span style="font-size:11px">{_text(line)}</span>' for line in _caption(timelines)]
    taller = CAPTION_LINE * len(said)
    title = "" if low else "<br>".join([_title(timelines.selection), *said])
    top, bottom = (LOW_TOP, LOW_BOTTOM) if low else (TOP + taller, BOTTOM)
    fig = theme.subplots(
        2, 1, title, height=(height or HEIGHT) + (0 if low else taller), layout={"barmode": "overlay"},
        vertical_spacing=0.24 if low else 0.2, subplot_titles=[headline(timeline) for timeline in timelines],
    )  # fmt: skip
    kinds: set[str] = set()
    for row, timeline in enumerate(timelines, 1):
        for spans in _alike(timeline.spans):
            fig.add_trace(_bars(spans, in_legend=spans[0].kind not in kinds), row=row, col=1)
            kinds.add(spans[0].kind)
        lanes = LANES
        if timeline.device_busy_us is None:
            lanes = {"host": LANES["host"]}
        else:
            for trace in _busy(timeline):
                fig.add_trace(trace, row=row, col=1)
        fig.update_yaxes(
            row=row, col=1, tickvals=list(lanes.values()), ticktext=list(lanes), fixedrange=True, showgrid=False,
            zeroline=False, range=[min(lanes.values()) - 0.5, LANES["host"] + 0.5],
        )  # fmt: skip
    fig.update_xaxes(zeroline=False, tickformat=theme.DIGITS, minallowed=0)
    fig.update_annotations(x=0, xanchor="left", font={"size": 12})
    fig.update_layout(legend=theme.LEGEND_BELOW, margin={"t": top, "b": bottom})
    fig.update_layout(title={"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 14, "l": 12}})
    fig = _with_clocks(fig, [timeline.step_us for timeline in timelines])
    return _lowered(fig) if low else fig


def _lowered(fig: go.Figure) -> go.Figure:
    """Small letters, the buttons at the right, and marks of time below the lower step alone."""
    fig.update_layout(legend={"y": -0.42, "font": {"size": 10}})
    menu = {"font": {"size": 10}, "x": 1, "xanchor": "right", "y": 1.03, "yanchor": "bottom", "pad": {"t": 0, "b": 0}}
    fig.update_layout(updatemenus=[menu])
    fig.update_xaxes(tickfont={"size": 10}, title={"font": {"size": 11}, "standoff": 2})
    fig.update_yaxes(tickfont={"size": 10})
    return fig


def caption(timelines: Timelines) -> str:
    """What the step is, where it was taken, and what could not be seen: a low figure's title."""
    said = " ".join(_remarks(timelines))
    return f"{_title(timelines.selection, plain_text=True)}. {said}"


def short_caption(timelines: Timelines) -> str:
    """The same in a line."""
    return f"{_title(timelines.selection, plain_text=True)}."


def headline(timeline: Timeline) -> str:
    """The point of a step in a line: "baseline: 1,127 launches, device busy 31 % of 26.9 ms"."""
    name = _text(short_form(timeline.recipe, timeline.device_kind))
    ms = ms_words(timeline.unprofiled_us / 1e3)
    if timeline.busy_share is None:
        point = f"{counted(timeline.num_launches, 'call')} of PyTorch in {ms}"
    else:
        busy = f"device busy {100 * timeline.busy_share:.0f} % of {ms}"
        point = f"{timeline.num_launches:,} launch{'' if timeline.num_launches == 1 else 'es'}, {busy}"
    slowed = timeline.step_us > SLOWED * timeline.unprofiled_us
    return f"<b>{name}</b>: {point}" + (f"; {ms_words(timeline.step_us / 1e3)} while watched" if slowed else "")


def _caption(timelines: Timelines) -> list[str]:
    """Lines below the title."""
    return textwrap.wrap(" ".join(_remarks(timelines)), CAPTION_WIDTH)


def _remarks(timelines: Timelines) -> list[str]:
    """What it does not say, where it was taken, and what could not be seen."""
    each = (text for timeline in timelines for text in (f"Taken on {timeline.origin}.", timeline.remark))
    return [ONE_EACH, *dict.fromkeys(text for text in each if text)]


def _title(timeline: Timeline, plain_text: bool = False) -> str:
    rows, source = counted(timeline.num_rows, "row"), timeline.source if plain_text else _text(timeline.source)
    return f"One decode step: {rows}, {timeline.num_columns:,} columns of the KV cache; by {source}"


def _busy(timeline: Timeline) -> tuple[go.Bar, go.Scatter]:
    """The device's share of each part of the step as an area, on a bar as high as all of it."""
    shares, width = busy_shares(timeline, BUSY_BINS), timeline.step_us / BUSY_BINS
    whole = go.Bar(
        x=_tenths([timeline.step_us]), base=0, y=[LANES["busy"]], width=BUSY_HEIGHT, orientation="h",
        marker={"color": theme.GRID, "line": {"width": 0}}, hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    area = go.Scatter(
        x=_tenths(width * (place + 0.5) for place in range(BUSY_BINS)),
        y=[round(BUSY_HEIGHT * share, 3) for share in shares],
        customdata=[round(100 * share) for share in shares],
        mode="lines", line={"shape": "hvh", "width": 0, "color": theme.INK}, fill="tozeroy", fillcolor=theme.INK,
        showlegend=False, hovertemplate="device busy %{customdata} % of the time here<extra></extra>",
    )  # fmt: skip
    return whole, area


def busy_shares(timeline: Timeline, bins: int) -> list[float]:
    """How much of each of so many equal parts of the step the device has something to do."""
    width = timeline.step_us / bins
    covered = [0.0] * bins
    until = 0.0
    for span in sorted((s for s in timeline.spans if s.lane == "device"), key=lambda s: s.start_us):
        start, until = max(span.start_us, until), max(span.end_us, until)
        place = int(start / width) if width else bins
        while start < until and place < bins:
            end = min(until, (place + 1) * width)
            covered[place] += max(0.0, end - start)
            start, place = max(start, end), place + 1
    return [min(1.0, us / width) for us in covered] if width else covered


def _alike(spans: Iterable[Span]) -> list[list[Span]]:
    """Those that share all but their times, in the order of the legend."""
    found: dict[tuple, list[Span]] = {}
    for span in spans:
        found.setdefault((span.kind, span.name, span.full, span.op, span.num_bytes), []).append(span)
    return [found[key] for key in sorted(found, key=lambda key: list(KINDS).index(key[0]))]


def _bars(spans: list[Span], in_legend: bool) -> go.Bar:
    one = spans[0]
    name, color = KINDS[one.kind]
    return go.Bar(
        x=_tenths(span.dur_us for span in spans),
        base=_tenths(span.start_us for span in spans),
        y=[LANES[one.lane]] * len(spans),
        width=OP_WIDTH if one.kind == "op" else WIDTH,
        orientation="h",
        marker={"color": color, "line": {"width": 0}},
        name=name,
        legendgroup=one.kind,
        showlegend=in_legend,
        customdata=_tenths(span.dur_us for span in spans),  # a bar's own x is where it ends
        hovertemplate=f"<b>{_text(one.name)}</b>, %{{customdata:,}} µs, from %{{base:,}} µs<br>{_details(one)}"
        "<extra></extra>",
    )


def _details(span: Span) -> str:
    """What a hover says below the name."""
    lines = [KINDS[span.kind][0] + (f" of {span.op}" if span.op not in ("", span.name) else "")]
    lines += [f"{sized(span.num_bytes)} to move"] if span.num_bytes else []
    lines += textwrap.wrap(span.full, LONGEST_LINE) if span.full != span.name else []
    return "<br>".join(map(_text, lines))


def _text(text: str) -> str:
    """As plotly shows it letter by letter: it takes tags for markup, and %{...} for a value."""
    return escape(text, quote=False).replace("%{", "&#37;{")


def _tenths(values: Iterable[float]) -> list[float]:
    return [round(value, 1) for value in values]


def _with_clocks(fig: go.Figure, widths: Sequence[float]) -> go.Figure:
    """Two buttons above the plot: both steps on the longer one's clock, or each over the whole width."""
    longest = max(widths)
    same = {"xaxis.range": [0, longest], "xaxis2.range": [0, longest], "xaxis2.matches": "x"}
    own = {"xaxis2.matches": None, "xaxis.range": [0, widths[0]], "xaxis2.range": [0, widths[1]]}
    titles = {"same clock": "microseconds, both on the same clock", "own width": "microseconds, each at its own width"}
    buttons = [
        {"label": label, "method": "relayout", "args": [how | {"xaxis2.title.text": titles[label]}]}
        for label, how in (("same clock", same), ("own width", own))
    ]
    fig.update_xaxes(range=[0, longest])
    fig.update_xaxes(row=2, col=1, matches="x", title=titles["same clock"])
    plot = HEIGHT - TOP - BOTTOM
    menu = {
        "type": "buttons", "direction": "right", "showactive": False, "buttons": buttons, "font": {"color": theme.INK},
        "x": 0, "xanchor": "left", "y": 1 + 28 / plot, "yanchor": "bottom", "pad": {"t": 0, "b": 0},
        "bgcolor": "rgba(0,0,0,0)", "bordercolor": theme.GRID,
    }  # fmt: skip
    return fig.update_layout(updatemenus=[menu])
