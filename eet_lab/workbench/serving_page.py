"""The widgets of the serving page: fields for traffic and policies, buttons, charts, the film, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from typing import Any

import ipywidgets as W
import plotly.graph_objects as go

from eet_lab.errors import EETError
from eet_lab.figures import theme
from eet_lab.figures.live import StripCharts
from eet_lab.figures.outputs import FigureBox
from eet_lab.figures.players import ServingFilm
from eet_lab.figures.script import all_widgets
from eet_lab.figures.serving import agreement_table, in_words, told_table
from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.served import Served
from eet_lab.serving.live import Look
from eet_lab.words import brief
from eet_lab.workbench.actions import ActionPage, field, said_words
from eet_lab.workbench.serving_jobs import MOST_REQUESTS, Asked, Measured, names_for

LINES = {
    "requests": ("requests", "", {"wait": theme.SERIES[1], "run": theme.SELECTION}),
    "ttft": ("time to first token", "ms", {"p50": theme.BASELINE, "p99": theme.SELECTION}),
    "tpot": ("time per token", "ms", {"p50": theme.BASELINE, "p99": theme.SELECTION}),
}
"""Title, unit and lines of each chart."""


class ServingLive(StripCharts):
    """Three strip charts over the seconds that a model serves; hidden until it does."""

    def __init__(self) -> None:
        super().__init__(LINES, height="195px", display="none")

    def clear(self) -> None:
        """Another serving begins."""
        self.box.layout.display = "grid"
        super().clear()

    def push(self, look: Look) -> None:
        """One more look."""
        values = {
            "requests": (look.waiting, look.running),
            "ttft": tuple(look.ttft_ms.get(name) for name in ("p50", "p99")),
            "tpot": tuple(look.tpot_ms.get(name) for name in ("p50", "p99")),
        }
        self.show(
            {
                name: [(number, look.at_s, float(y)) for number, y in enumerate(each) if y is not None]
                for name, each in values.items()
            }
        )


BURSTS = {"like clockwork": 0.0, "at random (Poisson)": 1.0, "in bursts (cv 2)": 2.0, "in great bursts (cv 4)": 4.0}
WIDE, NARROW = {"width": "230px"}, {"width": "110px"}
EXAMPLE = "Simulated in warped time; no model runs. What a pass takes comes from an example table, measured elsewhere: "
MEASURED_HERE = "What a pass takes was measured on this machine, with this model: "
ON_A_CPU = " A CPU's times say nothing of a GPU's."
FLOW = {"flex_flow": "row wrap", "display": "flex", "grid_gap": "4px 14px"}
TRACE = "CSV or JSONL with time (s), length and new_tokens: these requests, as they came, in place of what is drawn"
DISTRIBUTIONS = "128; 5-250 (uniform); lognormal:MEDIAN:SIGMA; or a file of whole numbers"


class ServingPage(ActionPage):
    """All widgets. `put` is called with the action from whatever thread a callback comes on.

    `with_model`: there is a model to measure and to serve. Everything else is for the ui thread alone.
    """

    def __init__(self, asked: Asked, table: CostTable, put: Callable[[str], None], with_model: bool = False) -> None:
        self._decodes, names = table.kind == "decoder", names_for(table)
        bursts = BURSTS if asked.cv in BURSTS.values() else {**BURSTS, f"cv {brief(asked.cv)}": asked.cv}
        lengths, answers = asked.drawn(table)
        self._rate = W.FloatText(value=replace(asked, trace="").rate_on(table), layout=NARROW)
        self._cv = W.Dropdown(options=list(bursts.items()), value=asked.cv, layout=WIDE)
        self._lengths = W.Text(value=asked.lengths or _words(lengths), layout=WIDE, tooltip=DISTRIBUTIONS)
        self._answers = W.Text(value=asked.new_tokens or _words(answers), layout=WIDE, tooltip=DISTRIBUTIONS)
        self._requests = W.BoundedIntText(value=asked.requests, min=1, max=MOST_REQUESTS, layout=NARROW)
        self._seed = W.BoundedIntText(value=asked.seed, min=0, max=2**53, layout=NARROW)
        self._trace = W.Text(value=asked.trace, placeholder="none", layout=WIDE, tooltip=TRACE)
        self._policies = [
            W.Combobox(value=words, options=names, layout=WIDE, continuous_update=False) for words in asked.policies
        ]
        fields = {"requests a second": self._rate, "they come": self._cv, "tokens of each": self._lengths}
        if self._decodes:
            fields["tokens of an answer"] = self._answers
        else:
            self._answers.layout.display = "none"
        fields |= {"requests": self._requests, "seed": self._seed, "or a trace, a file": self._trace}
        policies = {f"policy {number}": box for number, box in enumerate(self._policies, 1)}
        self.buttons = {
            "simulate": W.Button(description="Simulate", button_style="primary"),
            "loads": W.Button(description="Against load", tooltip="The same requests at several rates"),
            "measure": W.Button(description="Measure this model", tooltip="Its own cost table: seconds to a minute"),
            "serve": W.Button(description="Serve it", tooltip="The same requests in real time, on the model itself"),
            "stop": W.Button(description="Stop", disabled=True, tooltip="Stop the simulation, and the film"),
        }
        for action in () if with_model else ("measure", "serve"):
            for widget in all_widgets(self.buttons.pop(action)):
                widget.close()
        for action, button in self.buttons.items():
            button.on_click(lambda _, action=action: put(action))
        self.status = W.HTML(said_words("Press Simulate."))
        self.film, self.live = ServingFilm(), ServingLive()
        self._table = W.HTML()
        self._kept = FigureBox()
        self._where = W.HTML(_where(table, is_example=True))
        forms = [W.Box([field(name, widget) for name, widget in of.items()], layout=FLOW) for of in (fields, policies)]
        buttons = W.HBox(
            [*self.buttons.values(), self.status], layout={**FLOW, "align_items": "center", "margin": "6px 0"}
        )
        parts = [W.HTML(theme.stylesheet()), self._where, *forms, buttons, self.live.box, self.film, self._table]
        self.box = W.VBox([*parts, self._kept, *([] if self._decodes else [self._answers])])

    def asked(self) -> Asked:
        """What the fields say now."""
        words = tuple(box.value.strip() for box in self._policies if box.value.strip())
        answers = self._answers.value.strip()
        return Asked(
            words, self._rate.value, self._cv.value, self._lengths.value.strip(), answers, self._requests.value,
            self._seed.value, self._trace.value.strip(),
        )  # fmt: skip

    def put_table(self, table: CostTable) -> None:
        """Say what a pass takes by now; the rate becomes one that suits it, as do lengths beyond it."""
        self._where.value = _where(table, is_example=False)
        asked = self.asked()
        try:
            asked.chosen(table, asked.traffic(table))
        except EETError:
            lengths, answers = Asked(asked.policies).drawn(table)
            self._lengths.value, self._answers.value = _words(lengths), _words(answers)
        self._rate.value = replace(self.asked(), rate=None, trace="").rate_on(table)

    def tell_error(self, error: BaseException) -> None:
        """What went wrong; what was shown before stays."""
        self.tell("")
        self._table.value = theme.error_card(error)

    def show(
        self, runs: Mapping[str, Served], figures: Mapping[str, go.Figure], measured: Mapping[str, Measured]
    ) -> None:
        """Results of the last simulation and of what was served, and all figures that are kept."""
        self.tell("Done. The film plays in the page; what is below stays." if self.film.film else "Done.")
        compared = "".join(agreement_table(each.compared) for each in measured.values())
        self._table.value = results_table(runs) + compared
        self._kept.show(*figures.values())


def _where(table: CostTable, is_example: bool) -> str:
    """Where the times come from."""
    told = f"{EXAMPLE if is_example else MEASURED_HERE}{told_table(table)}."
    told += ON_A_CPU if table.source.driver is None else ""  # only a GPU's table has a driver
    return f'<div class="eet-dim" style="line-height:1.45">{escape(told)}</div>'


def results_table(runs: Mapping[str, Served]) -> str:
    """Runs side by side; empty of none. A model that generates has a time to the first token of its own."""
    if not runs:
        return ""
    generates = any(run.traffic.new_tokens.max() > 1 for run in runs.values())
    first = ["TTFT p99 ms"] * generates
    head = ["", "requests/s", "busy", "p50 ms", "p95 ms", "p99 ms", *first, ""]
    rows = []
    for name, run in runs.items():
        ends, firsts = run.percentiles["e2e_ms"], [brief(run.percentiles["ttft_ms"]["p99"])] * generates
        cells = [brief(run.requests_per_s), f"{100 * run.busy:.0f} %", *map(brief, ends.values()), *firsts]
        rows.append([name, *cells, in_words(run).partition(", p50")[0]])
    return theme.table(head, rows)


def _words(lengths: Any) -> str:
    """A uniform distribution as `read_lengths` reads it."""
    return f"{lengths.low}-{lengths.high}"
