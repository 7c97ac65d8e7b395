"""What is seen while a model serves: queue and running rows, and percentiles of those that are done."""

from __future__ import annotations

import ipywidgets as W

from eet_lab.figures import theme
from eet_lab.figures.live import StripChart, chart_script
from eet_lab.serving.live import Look

HEIGHT = {"height": "195px", "min_width": "0"}
LINES = {
    "requests": ("requests", "", {"wait": theme.SERIES[1], "run": theme.SELECTION}),
    "ttft": ("time to first token", "ms", {"p50": theme.BASELINE, "p99": theme.SELECTION}),
    "tpot": ("time per token", "ms", {"p50": theme.BASELINE, "p99": theme.SELECTION}),
}
"""Title, unit and lines of each chart."""


class ServingLive:
    """Three strip charts over the seconds that a model serves; hidden until it does. For the ui thread alone."""

    def __init__(self) -> None:
        base = chart_script()
        self._charts = {
            name: StripChart(
                base, title=title, unit=unit, layout=HEIGHT,
                series=[{"name": line, "color": color} for line, color in lines.items()],
            )
            for name, (title, unit, lines) in LINES.items()
        }  # fmt: skip
        columns = "repeat(auto-fit, minmax(220px, 1fr))"
        layout = {"grid_template_columns": columns, "grid_gap": "12px", "display": "none", "margin": "4px 0"}
        self.box = W.GridBox(list(self._charts.values()), layout=layout)

    def clear(self) -> None:
        """Another serving begins."""
        self.box.layout.display = "grid"
        for chart in self._charts.values():
            chart.clear()

    def push(self, look: Look) -> None:
        """One more look."""
        at = look.at_s
        values = {
            "requests": (look.waiting, look.running),
            "ttft": tuple(look.ttft_ms.get(name) for name in ("p50", "p99")),
            "tpot": tuple(look.tpot_ms.get(name) for name in ("p50", "p99")),
        }
        for name, chart in self._charts.items():
            chart.push((number, at, float(y)) for number, y in enumerate(values[name]) if y is not None)
            chart.snapshot_now()
