"""The widgets of the serving page: fields for traffic and policies, buttons, charts, the film, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import chain
from typing import ClassVar

import ipywidgets as W
import plotly.graph_objects as go

from eet_lab.errors import EETError
from eet_lab.figures import theme
from eet_lab.figures.live import StripCharts
from eet_lab.figures.outputs import FigureBox
from eet_lab.figures.players import ServingFilm
from eet_lab.figures.serving import agreement_table, in_words, told_table
from eet_lab.scheduling.agreement import Compared
from eet_lab.scheduling.choices import usual_lengths
from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.policies import NoBatching
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.simulator import check_fits
from eet_lab.serving.live import Look
from eet_lab.words import brief
from eet_lab.workbench.actions import ActionPage, field
from eet_lab.workbench.serving_jobs import MOST_REQUESTS, MOST_SEED, Asked, names_for

LINES = {
    "requests": ("requests", "", {"wait": theme.SERIES[1], "run": theme.SELECTION}),
    "ttft": ("time to first token", "ms", {"p50": theme.BASELINE, "p99": theme.SELECTION}),
    "tpot": ("time per token", "ms", {"p50": theme.BASELINE, "p99": theme.SELECTION}),
}
"""Title, unit and lines of each chart."""


class ServingLive(StripCharts):
    """Three strip charts over the seconds that a model serves, and what they show; hidden until it tells of itself."""

    def __init__(self) -> None:
        super().__init__(LINES, height="195px", display="none")
        self.caption = W.HTML()

    def clear(self) -> None:
        """Nothing is served by now: what was drawn goes, and the charts with it."""
        self.box.layout.display = "none"
        self.caption.value = ""
        super().clear()

    @property
    def shown(self) -> bool:
        """Whether there is something in the charts."""
        return self.box.layout.display != "none"

    def say(self, words: str) -> None:
        """What the charts show."""
        self.caption.value = caption(words)

    def push(self, look: Look) -> None:
        """One more look."""
        self.box.layout.display = "grid"
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
WIDER, WIDE, NARROW = {"width": "330px", "max_width": "100%"}, {"width": "230px"}, {"width": "110px"}
GIVEN = "Simulated in warped time; no model runs. What a pass takes is read from a table, not measured here: "
MEASURED_HERE = "What a pass takes was measured on this machine: "
ON_A_CPU = " A CPU's times say nothing of a GPU's."
FLOW = {"flex_flow": "row wrap", "display": "flex", "grid_gap": "4px 14px"}
SIDE_BY_SIDE = "Simulated beside measured"
TRACE = "CSV or JSONL with time (s), length and new_tokens: these requests, as they came, in place of what is drawn"
DISTRIBUTIONS = "128; 5-250 (uniform); lognormal:MEDIAN:SIGMA; or a file of whole numbers"


class ServingPage(ActionPage):
    """All widgets. `with_model`: there is a model to measure and to serve."""

    ACTIONS: ClassVar[Mapping[str, tuple[str, str, str]]] = {
        "simulate": ("Simulate", "", "Simulating …"),
        "loads": ("Against load", "The same requests at several rates", "Simulating …"),
        "measure": ("Measure this model", "Its own cost table: seconds to minutes", "Measuring …"),
        "serve": ("Serve it", "The same requests in real time, on the model itself", "Serving …"),
        "stop": ("Stop", "Stop what runs, and the film", ""),
    }

    def __init__(self, asked: Asked, table: CostTable, put: Callable[[str], None], with_model: bool = False) -> None:
        bursts = BURSTS if asked.cv in BURSTS.values() else {**BURSTS, f"cv {brief(asked.cv)}": asked.cv}
        rate, drawn = replace(asked, trace="").rate_on(table), {"layout": WIDE, "tooltip": DISTRIBUTIONS}
        self._usual_rate = rate if asked.rate is None else None  # what stands there as long as nobody types another
        fields = {
            "rate": ("arrival rate (requests/s)", W.FloatText(rate, layout=NARROW)),
            "cv": ("arrivals", W.Dropdown(options=list(bursts.items()), value=asked.cv, layout=WIDE)),
            "lengths": ("input tokens per request", W.Text(asked.lengths or usual_lengths(table), **drawn)),
            "new_tokens": ("output tokens per request", W.Text(asked.new_tokens, **drawn)),
            "requests": ("requests", W.BoundedIntText(asked.requests, min=1, max=MOST_REQUESTS, layout=NARROW)),
            "seed": ("seed", W.BoundedIntText(asked.seed, min=0, max=MOST_SEED, layout=NARROW)),
            "trace": ("or a trace, a file", W.Text(asked.trace, placeholder="none", layout=WIDE, tooltip=TRACE)),
        }
        self.film, self.live = ServingFilm(), ServingLive()
        super().__init__({name: (*each, "") for name, each in fields.items()}, put)
        for action in ("measure", "serve"):
            self.buttons[action].layout.display = None if with_model else "none"
        self._policies = [W.Combobox(value=each, layout=WIDER, continuous_update=False) for each in asked.policies]
        self._suit(table)
        policies = [field(f"policy {number}", box) for number, box in enumerate(self._policies, 1)]
        self._table, self._kept = W.HTML(), FigureBox()
        self._where = W.HTML(_where(table, is_given=True))
        row = W.HBox([*self.buttons.values(), self.status], layout={**FLOW, "align_items": "center", "margin": "6px 0"})
        self.box = W.VBox(
            [
                W.HTML(theme.stylesheet()), self._where, W.Box([*self.form.values()], layout=FLOW),
                W.Box(policies, layout=FLOW), row, self.error, self.live.caption, self.live.box, self.film, self._table,
                self._kept,
            ]
        )  # fmt: skip

    def asked(self) -> Asked:
        """What the fields say now."""
        return Asked(tuple(words for box in self._policies if (words := box.value.strip())), **self.said())

    def _suit(self, table: CostTable) -> None:
        """Offer what there is for such a model; one that generates nothing has no answers."""
        decodes, answers = table.kind == "decoder", self.fields["new_tokens"]
        self.form["new_tokens"].layout.display = None if decodes else "none"
        answers.value = answers.value or (usual_lengths(table) if decodes else "")
        for box in self._policies:
            box.options = names_for(table)

    def set_busy(self, busy: bool) -> None:
        """Stop takes a film down, too."""
        super().set_busy(busy)
        self.buttons["stop"].disabled = not (busy or self.film.film)

    def put_table(self, table: CostTable) -> None:
        """Say what a pass takes by now. A rate that nobody typed becomes one that suits it, as do lengths beyond it."""
        self._where.value = _where(table, is_given=False)
        self._suit(table)
        asked = replace(self.asked(), rate=None, trace="")
        try:
            check_fits(asked.traffic(table), NoBatching(), table)
        except EETError:
            self.fields["lengths"].value = self.fields["new_tokens"].value = usual_lengths(table)
            asked = replace(self.asked(), rate=None, trace="")
        if self.fields["rate"].value == self._usual_rate:
            self.fields["rate"].value = self._usual_rate = asked.rate_on(table)

    def show(
        self,
        runs: Mapping[str, Mapping[str, Served]],
        figures: Mapping[str, go.Figure],
        compared: Mapping[str, Sequence[Compared]],
    ) -> None:
        """Results and all figures that are kept: `runs` by the words of their traffic, `compared` by those of a run."""
        self.tell("Done. The film plays in the page; what is below stays." if self.film.film else "Done.")
        tables = [caption(words) + results_table(each) for words, each in runs.items()]
        tables += [caption(f"{SIDE_BY_SIDE}, {words}") + agreement_table(each) for words, each in compared.items()]
        self._table.value = "".join(tables)
        self._kept.show(*chain.from_iterable(map(theme.title_apart, figures.values())))
        self.set_busy(False)  # by now the film is there, or gone


def caption(words: str) -> str:
    """What a table or charts are of."""
    return f'<div class="eet-dim" style="line-height:1.45">{escape(words)}</div>'


def _where(table: CostTable, is_given: bool) -> str:
    """Where the times come from."""
    told = f"{GIVEN if is_given else MEASURED_HERE}{told_table(table)}."
    told += ON_A_CPU if table.source.driver is None else ""  # only a GPU's table has a driver
    return caption(told)


def results_table(runs: Mapping[str, Served]) -> str:
    """Runs side by side; empty of none. A model that generates has a time to the first token of its own."""
    if not runs:
        return ""
    generates = any(run.traffic.new_tokens.max() > 1 for run in runs.values())
    first = ["TTFT p99 ms"] * generates
    head = ["", "requests/s", "busy", "end to end p50 ms", "p95 ms", "p99 ms", *first, ""]
    rows = []
    for name, run in runs.items():
        ends, firsts = run.percentiles["e2e_ms"], [brief(run.percentiles["ttft_ms"]["p99"])] * generates
        cells = [brief(run.requests_per_s), f"{100 * run.busy:.0f} %", *map(brief, ends.values()), *firsts]
        rows.append([name, *cells, in_words(run).partition(", p50")[0]])
    return theme.table(head, rows)
