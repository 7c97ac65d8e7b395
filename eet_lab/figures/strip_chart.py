"""A live strip chart that costs little: the page gets new points only, and a snapshot once a second.

The snapshot is what a reloaded page, or a second view, starts from.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import traitlets as T

from eet_lab.figures.script import BaseScript, Shared, compact

HERE = Path(__file__).parent
CAPACITY = 600
"""Points that one series keeps."""

Point = tuple[int, float, float]
"""(series, x, y)"""

SCRIPT = compact(HERE / "words.js", HERE / "strip_chart.js")
STYLE = compact(HERE / "strip_chart.css")


def chart_script() -> BaseScript:
    """The script of strip charts, for those that stand on one page."""
    return BaseScript(source=SCRIPT, _css=STYLE)


class StripChart(Shared):
    """Lines over time on one canvas. `push` new points; `snapshot_now` about once a second.

    `series` are {"name", "color"}, `unit` stands beside values, `scale` is "linear" or "log" (the reader can switch),
    `window` is how many units of x stay in view (0: all), `note` is a remark under the title, such as why a line ended.
    Points of one series must come in order of x. Charts of one page are given one `base`.
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
            self.send({"kind": "points"}, buffers=[_packed(new)])

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
            self.snapshot = _packed(self.points)

    @property
    def points(self) -> list[Point]:
        """What is in view, one series after the other."""
        return [point for index in sorted(self._points) for point in self._points[index]]


def _packed(points: Iterable[Point]) -> bytes:
    return np.asarray(list(points), dtype="<f4").tobytes()
