"""The widgets of the serving view: fields for traffic and policies, buttons, the film, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets as W
import plotly.graph_objects as go

from eet_lab.figures import theme
from eet_lab.figures.outputs import FigureBox
from eet_lab.figures.script import all_widgets
from eet_lab.figures.served_batches import in_words
from eet_lab.figures.serving_curves import told_table
from eet_lab.figures.serving_film import ServingFilm
from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.served import Served
from eet_lab.words import brief
from eet_lab.workbench.serving_choices import MOST_REQUESTS, Asked, names_for

BURSTS = {"like clockwork": 0.0, "at random (Poisson)": 1.0, "in bursts (cv 2)": 2.0, "in great bursts (cv 4)": 4.0}
WIDE, NARROW = {"width": "230px"}, {"width": "110px"}
DISTRIBUTIONS = "128; 5-250 (uniform); lognormal:MEDIAN:SIGMA; or a file of whole numbers"


class Page:
    """All widgets. `put` is called with the action from whatever thread a callback comes on.

    Everything else is for the ui thread alone.
    """

    def __init__(self, asked: Asked, table: CostTable, put: Callable[[str], None]) -> None:
        self._decodes, names = table.kind == "decoder", names_for(table)
        bursts = BURSTS if asked.cv in BURSTS.values() else {**BURSTS, f"cv {brief(asked.cv)}": asked.cv}
        lengths, answers = asked.drawn(table)
        self._rate = W.FloatText(value=asked.rate_on(table), layout=NARROW)
        self._cv = W.Dropdown(options=list(bursts.items()), value=asked.cv, layout=WIDE)
        self._lengths = W.Text(value=asked.lengths or _words(lengths), layout=WIDE, tooltip=DISTRIBUTIONS)
        self._answers = W.Text(value=asked.new_tokens or _words(answers), layout=WIDE, tooltip=DISTRIBUTIONS)
        self._requests = W.BoundedIntText(value=asked.requests, min=1, max=MOST_REQUESTS, layout=NARROW)
        self._seed = W.BoundedIntText(value=asked.seed, min=0, max=2**53, layout=NARROW)
        self._policies = [
            W.Combobox(value=words, options=names, layout=WIDE, continuous_update=False) for words in asked.policies
        ]
        fields = {"requests a second": self._rate, "they come": self._cv, "tokens of each": self._lengths}
        fields |= {"tokens of an answer": self._answers} if self._decodes else {}
        fields |= {"requests": self._requests, "seed": self._seed}
        policies = {f"policy {number}": box for number, box in enumerate(self._policies, 1)}
        self._buttons = {
            "simulate": W.Button(description="Simulate", button_style="primary"),
            "loads": W.Button(description="Against load", tooltip="The same requests at several rates"),
            "stop": W.Button(description="Stop", disabled=True, tooltip="Stop the simulation, and the film"),
        }
        for action, button in self._buttons.items():
            button.on_click(lambda _, action=action: put(action))
        self._status = W.HTML(_said("Press Simulate."))
        self.film = ServingFilm()
        self._table = W.HTML()
        self._kept = FigureBox()
        where = W.HTML(
            f'{theme.stylesheet()}<div class="eet-dim">Simulated in warped time; no model runs. What a pass takes was '
            f"measured: {escape(told_table(table))}.</div>"
        )
        forms = [W.Box([_field(name, widget) for name, widget in of.items()], layout=FLOW) for of in (fields, policies)]
        buttons = W.HBox([*self._buttons.values(), self._status], layout={"align_items": "center", "margin": "6px 0"})
        self.box = W.VBox([where, *forms, buttons, self.film, self._table, self._kept]).add_class("eet-bench")

    def asked(self) -> Asked:
        """What the fields say now."""
        words = tuple(box.value.strip() for box in self._policies if box.value.strip())
        answers = self._answers.value.strip()
        return Asked(
            words, self._rate.value, self._cv.value, self._lengths.value.strip(), answers, self._requests.value,
            self._seed.value,
        )  # fmt: skip

    def set_busy(self, busy: bool) -> None:
        """Say what may be pressed."""
        for action, button in self._buttons.items():
            button.disabled = busy and action != "stop"

    def tell(self, words: str) -> None:
        """What goes on."""
        if self._status.value != (said := _said(words)):
            self._status.value = said

    def tell_error(self, error: BaseException) -> None:
        """What went wrong; what was shown before stays."""
        self.tell("")
        self._table.value = theme.error_card(error)

    def show(self, runs: Mapping[str, Served], figures: Mapping[str, go.Figure]) -> None:
        """Results of the last simulation, and all figures that are kept."""
        self.tell("Done. The film plays in the page; what is below stays.")
        self._table.value = results_table(runs)
        self._kept.show(*figures.values())

    def close(self) -> None:
        """Take everything off the page."""
        for widget in all_widgets(self.box):
            widget.close()


FLOW = {"flex_flow": "row wrap", "display": "flex", "grid_gap": "4px 14px"}


def results_table(runs: Mapping[str, Served]) -> str:
    """Runs side by side; empty of none. A model that generates has a time to the first token of its own."""
    if not runs:
        return ""
    generates = any(run.traffic.new_tokens.max() > 1 for run in runs.values())
    first = ["TTFT p99 ms"] * generates
    head = "".join(f"<th>{each}</th>" for each in ["", "requests/s", "busy", "p50 ms", "p95 ms", "p99 ms", *first, ""])
    rows = []
    for name, run in runs.items():
        ends, firsts = run.percentiles["e2e_ms"], [brief(run.percentiles["ttft_ms"]["p99"])] * generates
        cells = [brief(run.requests_per_s), f"{100 * run.busy:.0f} %", *map(brief, ends.values()), *firsts]
        told = "".join(f"<td>{escape(cell)}</td>" for cell in [*cells, in_words(run).partition(", p50")[0]])
        rows.append(f"<tr><th>{escape(name)}</th>{told}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="eet-result">{table}</div>'


def _field(name: str, widget: Any) -> W.VBox:
    return W.VBox([W.HTML(f'<span class="eet-dim">{escape(name)}</span>'), widget])


def _said(words: str) -> str:
    return f'<span class="eet-dim" role="status">{escape(words)}</span>'


def _words(lengths: Any) -> str:
    """A uniform distribution as `read_lengths` reads it."""
    return f"{lengths.low}-{lengths.high}"
