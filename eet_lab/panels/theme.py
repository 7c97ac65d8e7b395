"""One look for all panels: colours, the style sheet, and the few pieces of HTML that every panel shares."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from eet_lab.errors import EETError
from eet_lab.words import plain

HERE = Path(__file__).parent

BASELINE = "#8a94a6"
SELECTION = "#3b82f6"
GAIN = "#10b981"
LOSS = "#ef4444"
SERIES = (SELECTION, "#f59e0b", GAIN, "#a855f7", "#ec4899", "#7dd3fc", "#a16207", "#84cc16", "#dc2626")

# Figures are static and do not know the page's theme, so they use what reads well on white and on black.
INK = "#7d8590"
GRID = "rgba(125, 133, 144, 0.22)"
# d3's format: thousands separators, four digits, no exponent.
DIGITS = ",.4~r"

# Clear of the title and of the buttons that come up in the figure's right corner; the plot leaves it the room.
LEGEND_BELOW = {"x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom", "traceorder": "normal"}

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


@cache
def stylesheet() -> str:
    """The panels' style sheet as a <style> element."""
    return f"<style>{(HERE / 'theme.css').read_text(encoding='utf-8')}</style>"


def figure(title: str = "", *, height: int = 340, **layout: Any) -> go.Figure:
    """An empty figure in the house style, legible on a light and on a dark page."""
    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}
    base = go.Layout(
        title={"text": title, "font": {"size": 14}, "x": 0, "xref": "container", "pad": {"l": 12}},
        height=height,
        autosize=True,
        margin={"l": 60, "r": 24, "t": 44 if title else 16, "b": 44},
        font={"family": FONT, "size": 12, "color": INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        colorway=SERIES,
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        hoverlabel={"font": {"family": FONT}},
        xaxis=axis,
        yaxis=axis,
        template="none",
    )
    return go.Figure(layout=base).update_layout(**layout)


def rounded(values: Iterable[float]) -> list[float]:
    """Four digits: a saved notebook need not carry more."""
    return [float(f"{value:.4g}") for value in values]


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
"""Above this ratio of an axis's ends, these places in every decade; no gap between them is as wide as the ratio."""
CLOSE_STEPS = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two: the fewer for each decade, the longer the axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = next((steps for ratio, steps in LOG_STEPS if high > ratio * low), CLOSE_STEPS)
    ticks = (float(f"{step * 10.0**decade:.4g}") for decade in decades for step in steps)
    return [tick for tick in ticks if low <= tick <= high]


def badge(text: str, kind: str = "plain", tip: str = "") -> str:
    """A small label; `kind` is "plain", "good", "warn" or "bad"."""
    return f'<span class="eet-badge eet-{kind}" title="{escape(tip)}">{escape(text)}</span>'


def note(text: str, kind: str = "plain") -> str:
    """A paragraph with a coloured edge."""
    return f'<div class="eet-note eet-{kind}">{escape(text)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, its first column words and the others figures; all of it is escaped."""

    def line(tag: str, row: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>"

    whole = f"<thead>{line('th', head)}</thead><tbody>{''.join(line('td', row) for row in rows)}</tbody>"
    return f'<div class="eet-result eet-facts-table"><table>{whole}</table></div>'


def error_card(error: BaseException) -> str:
    """What went wrong, readable: errors made for users as they are, others with their traceback in a fold."""
    if isinstance(error, EETError):
        detail = _fold("details", _cause(error)) if error.__cause__ else ""
        return f'<div class="eet-error" role="alert"><b>{_words(error)}</b><p>{escape(str(error))}</p>{detail}</div>'
    trace = "".join(traceback.format_exception(error))
    return (
        f'<div class="eet-error" role="alert"><b>Unexpected: {escape(type(error).__name__)}</b>'
        f"<p>{escape(str(error)) or 'It carries no message.'} The session goes on; please report this with the "
        f"details below.</p>{_fold('details', trace)}</div>"
    )


def _fold(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _cause(error: BaseException) -> str:
    return "".join(traceback.format_exception(error.__cause__))


def _words(error: BaseException) -> str:
    """ "PromptError" -> "Prompt error"."""
    name = "".join(f" {c.lower()}" if c.isupper() else c for c in type(error).__name__).strip()
    return escape(name.capitalize())
