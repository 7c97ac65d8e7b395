"""A result as a file of another kind, such as one self-contained HTML page of its tables, texts and figures."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from IPython.display import HTML, display
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from eet_lab.bench.timeline import trace_text
from eet_lab.errors import ResultError
from eet_lab.figures import theme
from eet_lab.figures.outputs import CONFIG, show
from eet_lab.figures.results import plot
from eet_lab.figures.script import style
from eet_lab.paths import write_whole
from eet_lab.words import visible
from eet_lab.workbench.rows import Result
from eet_lab.workbench.views import answer

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>{style}
<script>{plotlyjs}</script></head>
<body class="eet-bench eet-page"><h1>{title}</h1><p>{where}</p>{overview}{figures}<section>{texts}</section></body>
</html>
"""


class Report:
    """A result as a cell's own output: it stays in the notebook, and shows when the kernel is gone."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def _ipython_display_(self) -> None:
        figures = plot(self.result, "all")
        assert isinstance(figures, dict)
        display(HTML(_style() + overview(self.result)))
        for fig in figures.values():
            show(fig)


def overview(result: Result) -> str:
    """The tiles and the table of a result as HTML; whatever came from outside is escaped."""
    tiles = "".join(map(_tile, answer.tiles(result)))
    return f'<div class="eet-overview"><div class="eet-tiles">{tiles}</div>{result._repr_html_()}</div>'


def content(result: Result, beside: Mapping[str, Any], format: str) -> tuple[str, str]:
    """How the file's name ends, and what it holds: a table ("csv"), a page ("html") or the timelines ("trace")."""
    match format:
        case "csv":
            return ".csv", result.to_frame().to_csv()
        case "html":
            return ".html", page(result)
        case "trace" if "timeline" in beside:
            return "-trace.json", trace_text(beside["timeline"])
    raise ResultError(f"There is no {visible(format[:40])} of this run; formats are json, csv and html.")


def page(result: Result) -> str:
    """One page with plotly.js inside: it needs no network."""
    environment = result.environment
    figures = plot(result, "all")
    assert isinstance(figures, dict)
    title = f"EET Lab: {type(result).__name__} of {result.workload}"
    config = {**CONFIG, "responsive": True}
    where = f"{environment.model_label}; {environment.dtype} on {environment.origin}"
    return PAGE.format(
        title=escape(title),
        style=_style(),
        plotlyjs=get_plotlyjs(),
        where=escape(where),
        overview=overview(result),
        figures="".join(
            f"<section>{to_html(fig, full_html=False, include_plotlyjs=False, config=config)}</section>"
            for fig in figures.values()
        ),
        texts=_texts(result),
    )


def write_page(result: Result, path: Path) -> Path:
    """Write the page; ResultError where it cannot be written."""
    try:
        write_whole(path, page(result))
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror}. Choose another place.") from error
    return path


def _style() -> str:
    return f"{theme.stylesheet()}<style>{style('Export')}</style>"


def _tile(tile: Mapping[str, Any]) -> str:
    change = tile["change"]
    return (
        f'<div class="eet-tile"><span>{escape(tile["label"])}</span><b>{escape(tile["value"])}</b> '
        f"{escape(tile['unit'])}<em>{escape(tile['before'])} {theme.badge(change['text'], change['kind'])}</em></div>"
    )


def _texts(result: Result) -> str:
    """What each prompt became, or what an encoder read."""
    rows = (
        f'<div class="eet-text"><span class="eet-dim">{escape(each["heading"])}</span>{escape(each["text"])}</div>'
        for each in answer.words(result, "texts")
    )
    return f"<h3>What was {'read' if result.reads else 'generated'}</h3>{''.join(rows)}"
