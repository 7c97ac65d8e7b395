"""Live views that cost little: the page gets what is new, and a snapshot once a second, from which a reload starts."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as W
import numpy as np
import traitlets as T

from eet_lab.figures.script import BaseScript, Shared, compact, script, style
from eet_lab.models.transcript import Decode, Transcript

HERE = Path(__file__).parent
CAPACITY = 600
"""Points that one series keeps."""

Point = tuple[int, float, float]
"""(series, x, y)"""

SCRIPT = script("Words", "Canvas", "Make", module=compact(HERE / "strip_chart.js"))


def chart_script() -> BaseScript:
    """The script of strip charts, for those that stand on one page."""
    return BaseScript(source=SCRIPT, _css=style("StripChart"))


class StripChart(Shared):
    """Lines over time on one canvas. `push` new points; `snapshot_now` about once a second.

    `series` are {"name", "color"}, and may say what their newest value is ("value_of"). `unit` stands beside values,
    `scale` is "linear" or "log" (the reader can switch), `window` is how many units of x stay in view (0: all), `note`
    is a remark under the title, such as why a line ended. Points of one series must come in order of x. Charts of one
    page are given one `base`.
    """

    title = T.Unicode().tag(sync=True)
    unit = T.Unicode().tag(sync=True)
    x_unit = T.Unicode("s").tag(sync=True)
    series = T.List(T.Dict()).tag(sync=True)
    scale = T.Unicode("linear").tag(sync=True)
    window = T.Float(0.0).tag(sync=True)
    note = T.Unicode().tag(sync=True)
    snapshot = T.Bytes(b"").tag(sync=True)

    def __init__(self, base: BaseScript | None = None, **traits: Any) -> None:
        super().__init__(base=base or chart_script(), **traits)
        self._points: defaultdict[int, deque[Point]] = defaultdict(lambda: deque(maxlen=CAPACITY))
        self._fresh = False

    def push(self, points: Iterable[Point]) -> None:
        """Show more points."""
        new = list(points)
        if new:
            for point in new:
                self._points[point[0]].append(point)
            self._fresh = True
            self.send({"kind": "points"}, buffers=[packed(new)])

    def break_lines(self) -> None:
        """End each line: what comes next is not joined to it. The break is a point whose y is no number."""
        self.push([(*points[-1][:2], math.nan) for points in self._points.values() if not math.isnan(points[-1][2])])

    def clear(self) -> None:
        """Forget all points."""
        self._points.clear()
        self._fresh = False
        self.snapshot = b""
        self.send({"kind": "clear"})

    def snapshot_now(self) -> None:
        """Bring the snapshot up to date, if anything is new."""
        if self._fresh:
            self._fresh = False
            self.snapshot = packed(self.points)

    @property
    def points(self) -> list[Point]:
        """What is in view, one series after the other."""
        return [point for index in sorted(self._points) for point in self._points[index]]


def packed(values: Sequence[Point] | np.ndarray) -> bytes:
    """Numbers as float32, as scripts read them."""
    return np.asarray(values, dtype="<f4").tobytes()


class StripCharts:
    """Strip charts side by side, for the ui thread alone.

    `lines` are the title, the unit and the lines of each, by its name. `scales` are those of
    charts that begin with another one than "linear".
    """

    def __init__(
        self, lines: Mapping[str, tuple[str, str, Mapping[str, str]]], *, height: str, x_unit: str = "s",
        scales: Mapping[str, str] | None = None, **layout: str,
    ) -> None:  # fmt: skip
        base, size = chart_script(), {"height": height, "min_width": "0"}
        self.charts = {
            name: StripChart(
                base, title=title, unit=unit, layout=size, x_unit=x_unit, scale=(scales or {}).get(name, "linear"),
                series=[{"name": line, "color": color} for line, color in series.items()],
            )
            for name, (title, unit, series) in lines.items()
        }  # fmt: skip
        columns = "repeat(auto-fit, minmax(220px, 1fr))"
        grid = {"grid_template_columns": columns, "grid_gap": "12px", "margin": "6px 0", **layout}
        self.box = W.GridBox([*self.charts.values()], layout=grid)

    def clear(self) -> None:
        """Forget all points."""
        for chart in self.charts.values():
            chart.clear()

    def show(self, points: Mapping[str, Iterable[Point]]) -> None:
        """Show more points of some charts."""
        for name, new in points.items():
            self.charts[name].push(new)
            self.charts[name].snapshot_now()


class TokenStream(anywidget.AnyWidget):
    """Panes of streamed text. Text is set as text, never as HTML, so a model cannot write markup into the page."""

    _esm = script("Make", "Counted", "Ends", "TokenStream")
    _css = style("TokenStream")
    snapshot = T.Unicode("{}").tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.instead = self.by = ""
        self.prompts: list[str] = []
        self.texts: list[str] = []
        self.counts: list[int] = []
        self._transcripts: list[Transcript] = []
        self._fresh = False

    def begin(self, prompts: Sequence[str], decode: Decode, instead: str = "", by: str = "") -> None:
        """Empty panes for these prompts; `instead`: what stands there where there are none, `by`: what generates."""
        self.instead, self.by = instead, by
        self.prompts, self.texts = list(prompts), [""] * len(prompts)
        self.counts = [0] * len(prompts)
        self._transcripts = [Transcript(decode) for _ in prompts]
        self._fresh = True
        self.snapshot_now()
        self.send({"kind": "begin", "prompts": self.prompts, "instead": instead, "by": by})

    def push(self, tokens: Iterable[tuple[int, int]]) -> None:
        """More (row, token id) pairs, in order."""
        by_row: dict[int, list[int]] = {}
        for row, token in tokens:
            by_row.setdefault(row, []).append(token)
        for row, ids in by_row.items():
            self.counts[row] += len(ids)
        self._append({row: self._transcripts[row].add(ids) for row, ids in by_row.items()})

    def finish(self) -> None:
        """Nothing more comes: show what still waits for the rest of a character."""
        rest = {row: transcript.finish() for row, transcript in enumerate(self._transcripts)}
        self._append({row: text for row, text in rest.items() if text})

    def _append(self, texts: Mapping[int, str]) -> None:
        for row, text in texts.items():
            self.texts[row] += text
        if texts:
            self._fresh = True
            self.send({"kind": "append", "news": [[row, text, self.counts[row]] for row, text in texts.items()]})

    def snapshot_now(self) -> None:
        """Bring the snapshot up to date, if anything is new."""
        if self._fresh:
            self._fresh = False
            names = ("prompts", "instead", "by", "texts", "counts")
            self.snapshot = json.dumps({name: getattr(self, name) for name in names})
