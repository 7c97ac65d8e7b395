"""The serving page, alone or in the workbench: it simulates in warped time, measures and serves, one thing at a time.

Only the ui thread calls its controller; the background thread simulates; the page plays the film by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import plotly.graph_objects as go

from eet_lab.errors import Cancelled, CostError, EETError, TrafficError
from eet_lab.figures.serving import batches, cost_surface, latency_against_load, simulated_beside_measured
from eet_lab.models import Model, load
from eet_lab.progress import Progress
from eet_lab.scheduling.cost import CostTable, DecoderCost, EncoderCost
from eet_lab.scheduling.cost_files import load_cost
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.traffic import Gamma
from eet_lab.scheduling.whole import check_whole
from eet_lab.serving.live import Look
from eet_lab.technique import Recipe
from eet_lab.texts import as_recipe
from eet_lab.words import visible
from eet_lab.workbench.actions import ActionController, ActionView
from eet_lab.workbench.page import Page
from eet_lab.workbench.serving_jobs import (
    MOST_SEED,
    Asked,
    Loads,
    Measured,
    ModelWork,
    RunOnModel,
    against_load,
    checked_policies,
    measure,
    serve,
    simulated,
    usual_policies,
)
from eet_lab.workbench.serving_page import SIDE_BY_SIDE, ServingPage
from eet_lab.workbench.threads import Answer, Background, drained

WORK: dict[str, Callable[..., Any]] = {"simulate": simulated, "loads": against_load}
ORDER = ("agreement", "batches", "loads", "table")
"""The order of figures: what was asked for last is rarely the table."""
SIMULATED = ""
"""The name of what was simulated, among those of policies that were measured."""
SHOWN_PASSES = 60
"""Passes that the kept figure has in view, around the longest queue: boxes of more are too narrow to read."""
LOOKS = 2000


class ServingController(ActionController):
    """The page, the cost table, and what came of them.

    Simulations are asked of `background`; `on_model` does what needs the model, and None is a page without one.
    """

    def __init__(
        self, asked: Asked, table: CostTable, background: Background, on_model: RunOnModel | None = None
    ) -> None:
        super().__init__(background)
        self.table = table
        self.results: dict[str, Served] = {}
        self.measured: dict[str, Measured] = {}
        """What was served for real, by the name of the policy."""
        self.figures: dict[str, go.Figure] = {}
        self.page = ServingPage(asked, table, self.inbox.put, with_model=on_model is not None)
        self._on_model = on_model
        self._is_own = False  # the table was measured here, not given
        self._looks: SimpleQueue[Look] = SimpleQueue()  # told on the thread that serves
        self._loads: tuple[str, Loads] | None = None  # with the words of their traffic
        self._words: dict[str, str] = {}  # those of each run's traffic, by the policy that was measured, or SIMULATED

    def stop(self) -> None:
        """Let what goes on end, and the film."""
        super().stop()
        self.page.film.stop()
        self.page.set_busy(self.busy)

    def tick(self) -> None:
        super().tick()
        for look in drained(self._looks):  # the last ones come with the end
            self.page.live.push(look)
            if self.action == "serve":
                self.page.live.say(f"Being served: {self._asked.run_in_words(self.table)}")

    def take(self, answer: Answer) -> None:
        action, asked = self.action, self._asked
        self.tick()  # looks at what has ended are of this run, whatever is pressed next
        super().take(answer)
        if action and answer.value is None and self.figures:
            self.page.tell(f"{'Stopped. ' if _is_stop(answer) else ''}Tables and figures are of earlier runs.")
        if isinstance(answer.value, Loads) and not answer.value.is_whole:
            self.page.tell("Stopped. The curves are what was simulated until then.")
        if action == "serve" and self.page.live.shown:
            ended = "Served" if answer.value is not None else "Stopped" if _is_stop(answer) else "Failed"
            self.page.live.say(f"{ended}: {asked.run_in_words(self.table)}")

    def _ask(self, action: str, asked: Asked, cancel: threading.Event) -> None:
        self._begin(action, asked, cancel)
        self.page.live.clear()  # what was drawn of another run stands beside nothing of this one
        if action in ("simulate", "serve"):
            self.page.film.stop()

    def _begin(self, action: str, asked: Asked, cancel: threading.Event) -> None:
        """Have it done; EETError where it cannot be."""
        if action in WORK:
            work = partial(WORK[action], asked, self.table, self.progress, cancel)
            self._background.ask(self.take, None, work)
            return
        if self._on_model is None:
            raise EETError("There is no model to run. Open the view with one: ServingView(model='demo').")
        if action == "serve" and not self._is_own:
            raise CostError(
                f"The cost table was not measured here: it is of {visible(self.table.source.model)}, and cannot "
                "predict this model on this machine. Press Measure this model first."
            )
        done = measure if action == "measure" else partial(serve, asked, self.table, self._looks.put)
        self._on_model(action, done, cancel)

    def _show(self, action: str, asked: Asked, value: Any) -> None:
        told = "" if action == "measure" else asked.run_in_words(self.table)
        if action == "loads":
            self._loads = asked.in_words(self.table), value
        elif action == "measure":
            self._put_table(value)
        elif action == "serve":
            self.measured[value.policy], self._words[value.policy] = value, told
            title = f"{SIDE_BY_SIDE}, {value.policy} on {value.served.source}: {told}"
            self.figures["agreement"] = simulated_beside_measured(value.compared, title)
        else:
            self.results, self._words[SIMULATED] = value, told
            self.figures["batches"] = batches(value, f"Around the longest queue: {told}", _busiest(value))
            self.page.film.show(value, told)
        if self._loads is not None:
            told, loads = self._loads
            alike = {name: each for name, each in self.measured.items() if _is_of(self._words[name], told)}
            measured = {name: [each.point] for name, each in alike.items()}
            rest = "" if loads.is_whole else ", stopped before the rest"
            title = f"Latency against load (solid p99, dotted p50{rest}): {told}"
            if loads.beyond:
                title += f". After its last point, passes go beyond the table: {', '.join(loads.beyond)}"
            self.figures["loads"] = latency_against_load(loads.points, title, measured, loads.chosen)
        self.figures = {name: self.figures[name] for name in ORDER if name in self.figures}
        compared = {f"{name}: {self._words[name]}": each.compared for name, each in self.measured.items()}
        self.page.show(self._runs(), self.figures, compared)

    def _runs(self) -> dict[str, dict[str, Served]]:
        """What was simulated last and what was served, by the words of their traffic: a table is of one traffic."""
        found = {self._words[SIMULATED]: dict(self.results)} if self.results else {}
        for name, each in self.measured.items():
            found.setdefault(self._words[name], {})[f"{name}, measured"] = each.served
        return found

    def _put_table(self, table: CostTable) -> None:
        """From now on this model's own times count; what was simulated over others is taken down."""
        self.table, self.results, self.measured, self._loads = table, {}, {}, None
        self._is_own = True
        self.page.film.stop()
        self.page.put_table(table)
        surface = cost_surface(table, f"What a pass takes, measured: {table.source.model}")
        self.figures = {"table": surface}


def _is_of(words: str, traffic: str) -> bool:
    """Whether a run's words are of such traffic, at whatever rate."""
    return f"{words},".startswith(f"{traffic},")


def _is_stop(answer: Answer) -> bool:
    return answer.error is None or isinstance(answer.error, Cancelled)


def _busiest(runs: dict[str, Served]) -> tuple[float, float]:
    """The time around the longest queue, in which the run with the most passes has SHOWN_PASSES of them."""
    looks = np.linspace(0.0, max(float(each.passes.end_ms[-1]) for each in runs.values()), LOOKS)
    middle = float(looks[np.argmax(np.max([each.queued(looks) for each in runs.values()], axis=0))])
    passes = max((each.passes for each in runs.values()), key=len)
    last = len(passes) - 1
    first = int(np.clip(np.searchsorted(passes.begin_ms, middle) - SHOWN_PASSES // 2, 0, max(last - SHOWN_PASSES, 0)))
    return float(passes.begin_ms[first]), float(passes.end_ms[min(first + SHOWN_PASSES, last)])


EXAMPLES = {"generate": "demo-cpu", "encode": "bert-base-cpu"}
"""The table of a model that was not measured yet."""
LENGTHS, ANSWERS, REQUESTS = "8-64", "4-32", 60
"""Requests that any model here has room for; a CPU serves so many in seconds."""
JOBS = {"measure": "cost_table", "serve": "serving"}
"""What the engine thread calls them."""


class ServingTab:
    """Made when it is first shown, since few ask for it and a page is to open soon. For the ui thread."""

    def __init__(self, page: Page, background: Background, on_model: RunOnModel) -> None:
        self._page, self._background, self._on_model = page, background, on_model
        self.controller: ServingController | None = None
        self.shown = False

    @property
    def waits(self) -> bool:
        """Whether a button was pressed that is yet to be heard."""
        return self.controller is not None and not self.controller.inbox.empty()

    @property
    def busy(self) -> bool:
        """Whether something of it goes on."""
        return self.controller is not None and self.controller.busy

    def show(self, on: bool) -> None:
        """Show it in place of runs and results, or take it away; what goes on goes on."""
        if on and self.controller is None:
            table = load_cost(EXAMPLES["generate"])  # a decoder, as all models of a workbench are
            asked = Asked(usual_policies(table), lengths=LENGTHS, new_tokens=ANSWERS, requests=REQUESTS)
            self.controller = ServingController(asked, table, self._background, self._on_model)
            self._page.put_serving(self.controller.page.box)
        self.shown = on
        self._page.serving(on)

    def progress(self, told: Progress) -> Progress:
        """Progress that the bar and this page show."""
        assert self.controller is not None
        own = self.controller.progress

        def both(done: int, total: int, what: str = "") -> None:
            told(done, total, what)
            own(done, total, what)

        return both

    def turn(self) -> bool:
        """Do what its buttons ask for, and show how far it is; whether there was anything to do."""
        return self.controller is not None and self.controller.turn()

    def answered(self, answer: Answer) -> None:
        """The engine thread is done with what this page asked of it."""
        if self.controller is not None:
            self.controller.take(answer)

    def close(self) -> None:
        """Let what goes on end."""
        if self.controller is not None:
            self.controller.stop()


class ServingView(ActionView):
    """Choose when requests come and how long they are, and two policies; watch queues and percentiles side by side.

    `table` is an example ("demo-cpu", a decoder, or "bert-base-cpu", an encoder), a file, or a cost table. `policies`
    are words such as "dynamic_program:trigger=lazy". `rate` requests come a second (None: nine tenths of what can be
    served one by one), `cv` is their burstiness (1: Poisson), `lengths` and `new_tokens` are words such as "5-250" or
    "lognormal:40:0.8". `trace` is a file of requests that take the place of all that is drawn. `results` has what was
    simulated last, and `figures` what is drawn of it: static, so that a cell that shows one keeps it. With a `model`
    (a name, or what `eet_lab.load` gave) its own cost table can be measured, and the model served for real: `measured`.

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
        lengths: str | int = "",
        new_tokens: str | int = "",
        requests: int = 300,
        seed: int = 0,
        trace: str | Path = "",
        model: str | Model | None = None,
        device: str | None = None,
    ) -> None:
        self.model = model if model is None or isinstance(model, Model) else load(model, device=device)
        self._recipe = Recipe() if self.model is None else as_recipe("all", self.model.device, self.model.config)
        if table is None:
            table = EXAMPLES["generate" if self.model is None else self.model.config.stage]
        self._example = table if isinstance(table, EncoderCost | DecoderCost) else load_cost(table)
        words = usual_policies(self._example) if policies is None else checked_policies(policies)
        if rate is not None:
            Gamma(rate, cv)
        check_whole(TrafficError, "seed", seed, 0, MOST_SEED)
        asked = Asked(words, rate, cv, str(lengths), str(new_tokens), requests, seed, str(trace))
        asked.chosen(self._example, asked.traffic(self._example))  # told now rather than when a button is pressed
        on_model = None if self.model is None else self._run_on_model
        self._show_page(lambda background: ServingController(asked, self._example, background, on_model))

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

    def _run_on_model(self, name: str, work: ModelWork, cancel: threading.Event) -> None:
        assert self.model is not None
        done = partial(work, self.model, self._recipe, self.controller.progress, cancel)
        self._background.ask(self.controller.take, None, done)
