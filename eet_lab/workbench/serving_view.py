"""The serving view: choose traffic and policies, and watch batches form on a simulator in warped time.

The background thread simulates; the page plays the film by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from eet_lab.models import Model, load
from eet_lab.progress import Cancel
from eet_lab.scheduling.cost import CostTable, DecoderCost, EncoderCost
from eet_lab.scheduling.cost_files import load_cost
from eet_lab.scheduling.served import Served
from eet_lab.technique import Recipe
from eet_lab.texts import as_recipe
from eet_lab.workbench.actions import ActionView
from eet_lab.workbench.serving_controller import ServingController
from eet_lab.workbench.serving_jobs import Asked, Measured, ModelWork, usual_policies

EXAMPLES = {"generate": "demo-cpu", "encode": "bert-base-cpu"}
"""The table of a model that was not measured yet."""


class ServingView(ActionView):
    """Choose when requests come and how long they are, and two policies; watch queues and percentiles side by side.

    `table` is an example ("demo-cpu", a decoder, or "bert-base-cpu", an encoder), a file, or a cost table. `policies`
    are words such as "dynamic_program:trigger=lazy". `rate` requests come a second (None: nine tenths of what can be
    served one by one), `cv` is their burstiness (1: Poisson), `lengths` and `new_tokens` are words such as "5-250" or
    "lognormal:40:0.8". `results` has what was simulated last, and `figures` what is drawn of it: static, so that a
    cell that shows one keeps it. With a `model` (a name, or what `eet_lab.load` gave) its own cost table can be
    measured, and the model served for real: `measured`.

    Opening another view closes this one. `close()` ends its threads. Errors: CostError, ScheduleError, TrafficError.
    """

    controller: ServingController

    def __init__(
        self,
        table: str | Path | CostTable | None = None,
        policies: Sequence[str] | None = None,
        *,
        rate: float | None = None,
        cv: float = 1.0,
        lengths: str = "",
        new_tokens: str = "",
        requests: int = 300,
        seed: int = 0,
        model: str | Model | None = None,
        device: str | None = None,
    ) -> None:
        self.model = model if model is None or isinstance(model, Model) else load(model, device=device)
        self._recipe = Recipe() if self.model is None else as_recipe("all", self.model.device, self.model.config)
        if table is None:
            table = EXAMPLES["generate" if self.model is None else self.model.config.stage]
        self._example = table if isinstance(table, EncoderCost | DecoderCost) else load_cost(table)
        named = (policies,) if isinstance(policies, str) else policies
        words = tuple(usual_policies(self._example) if named is None else named)
        asked = Asked(words, rate, cv, lengths, new_tokens, requests, seed)
        asked.chosen(self._example, asked.traffic(self._example))  # told now rather than when a button is pressed
        on_model = None if self.model is None else self._run_on_model
        self._show_page(lambda put, background: ServingController(asked, self._example, put, background, on_model))

    @property
    def table(self) -> CostTable:
        """What a pass takes: what was given, until the model is measured."""
        return self.controller.table

    @property
    def results(self) -> dict[str, Served]:
        """What was simulated last, by the names of the policies."""
        return self.controller.results

    @property
    def measured(self) -> dict[str, Measured]:
        """What was served for real, with its simulation, by the names of the policies."""
        return self.controller.measured

    @property
    def figures(self) -> dict[str, go.Figure]:
        """What is drawn of all that."""
        return self.controller.figures

    def wait(self, timeout_s: float = 60.0) -> dict[str, Served]:
        """Wait until nothing is left to do; `results`. For scripts and tests. EETError after `timeout_s`."""
        self._wait(timeout_s)
        return self.results

    def _run_on_model(self, name: str, number: int, work: ModelWork, cancel: Cancel) -> None:
        model = self.model
        assert model is not None
        self._background.ask(
            ServingController.QUESTION, number, lambda: work(model, self._recipe, self.controller.progress, cancel)
        )
