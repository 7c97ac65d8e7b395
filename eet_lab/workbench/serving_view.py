"""The serving view: choose traffic and policies, and watch batches form on a simulator in warped time.

Threads: callbacks only put a word into an inbox; the ui thread (10 Hz) is the only writer of widgets; the background
thread simulates; the page plays the film by itself.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import plotly.graph_objects as go
from IPython.display import display

from eet_lab.errors import Cancelled, EETError, did_you_mean
from eet_lab.figures.served_batches import batches
from eet_lab.figures.serving_curves import latency_against_load
from eet_lab.scheduling.cost import CostTable, DecoderCost, EncoderCost
from eet_lab.scheduling.cost_files import load_cost
from eet_lab.scheduling.served import Served
from eet_lab.words import plain
from eet_lab.workbench.background import Answer, Background, drained
from eet_lab.workbench.serving_choices import Asked, against_load, simulated, usual_policies
from eet_lab.workbench.serving_page import Page

TICK_S = 0.1
WORK = {"simulate": simulated, "loads": against_load}
ACTIONS = (*WORK, "stop")
SHOWN_PASSES = 60
"""Passes that the kept figure has in view, around the longest queue: boxes of more are too narrow to read."""
LOOKS = 2000

_open: ServingView | None = None


class ServingView:
    """Choose when requests come and how long they are, and two policies; watch queues and percentiles side by side.

    `table` is an example ("demo-cpu", a decoder, or "bert-base-cpu", an encoder), a file, or a cost table. `policies`
    are words such as "dynamic_program:trigger=lazy". `rate` requests come a second (None: nine tenths of what can be
    served one by one), `cv` is their burstiness (1: Poisson), `lengths` and `new_tokens` are words such as "5-250" or
    "lognormal:40:0.8". `results` has what was simulated last, and `figures` what is drawn of it: static, so that a
    cell that shows one keeps it.

    Opening another view closes this one. `close()` ends its threads. Errors: CostError, ScheduleError, TrafficError.
    """

    def __init__(
        self,
        table: str | Path | CostTable = "demo-cpu",
        policies: Sequence[str] | None = None,
        *,
        rate: float | None = None,
        cv: float = 1.0,
        lengths: str = "",
        new_tokens: str = "",
        requests: int = 300,
        seed: int = 0,
    ) -> None:
        global _open
        self.table = table if isinstance(table, EncoderCost | DecoderCost) else load_cost(table)
        named = (policies,) if isinstance(policies, str) else policies
        words = tuple(usual_policies(self.table) if named is None else named)
        asked = Asked(words, rate, cv, lengths, new_tokens, requests, seed)
        asked.chosen(self.table, asked.traffic(self.table))  # told now rather than when a button is pressed
        self.results: dict[str, Served] = {}
        self.figures: dict[str, go.Figure] = {}
        self._inbox: SimpleQueue[str] = SimpleQueue()
        self._page = Page(asked, self.table, self._inbox.put)
        self._cancel, self._closing = threading.Event(), threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._number = self._done = 0
        self._said = ""
        if _open is not None:
            _open.close()  # once nothing that was asked for can be wrong
        self._background = Background()
        self._ui = threading.Thread(target=self._loop, name="eet-serving-ui", daemon=True)
        _open = self

    @property
    def busy(self) -> bool:
        """Whether something is simulated, or still to be."""
        return not self._closing.is_set() and not (self._idle.is_set() and self._inbox.empty())

    def press(self, action: str) -> None:
        """Press "simulate", "loads" or "stop"; returns at once. EETError for another action, and after `close`."""
        if action not in ACTIONS:
            raise EETError(
                f"There is no action {action!r}.{did_you_mean(action, ACTIONS)} Actions are {', '.join(ACTIONS)}."
            )
        if self._closing.is_set():
            raise EETError(f"This view is closed, so {action} does nothing. Open another: eet_lab.ServingView().")
        self._idle.clear()
        self._inbox.put(action)

    def wait(self, timeout_s: float = 60.0) -> dict[str, Served]:
        """Wait until nothing is left to do; `results`. For scripts and tests. EETError after `timeout_s`."""
        self.start()
        deadline = time.monotonic() + timeout_s
        while self.busy:
            if time.monotonic() > deadline:
                raise EETError(f"It is not done after {plain(timeout_s)} s. Give wait() longer, or press('stop').")
            time.sleep(TICK_S / 4)
        return self.results

    def start(self) -> None:
        """Start the ui thread, if it does not run yet. Displaying the view does it."""
        if not self._ui.is_alive() and not self._closing.is_set():
            self._ui.start()

    def close(self) -> None:
        """End the threads and take the widgets off the page. May be called twice."""
        global _open
        if self._closing.is_set():
            return
        self._closing.set()
        self._cancel.set()
        if self._ui.is_alive():
            self._ui.join()
        self._background.close()
        self._page.close()
        if _open is self:
            _open = None

    def _loop(self) -> None:
        while not self._closing.wait(TICK_S):
            try:
                self._tick()
            except Exception as error:  # noqa: BLE001  told to the reader; this thread must live on
                self._page.tell_error(error)

    def _tick(self) -> None:
        for action in drained(self._inbox):
            self._idle.clear()
            self._stop() if action == "stop" else self._begin(action)
        for answer in self._background.take():
            self._take(answer)
        if self._done < self._number:
            self._page.tell(self._said)
        else:
            self._idle.set()

    def _begin(self, action: str) -> None:
        self._cancel.set()  # what runs is no longer asked for
        cancel = self._cancel = threading.Event()
        asked, work, self._said = self._page.asked(), WORK[action], "Simulating …"
        self._number += 1  # each question has a name of its own, so that each is answered
        name = f"{action} {self._number}"
        self._background.ask(name, (action, asked), lambda: work(asked, self.table, self._progress, cancel))
        self._page.set_busy(True)

    def _stop(self) -> None:
        self._cancel.set()
        self._page.film.stop()

    def _progress(self, done: int, total: int, what: str) -> None:
        self._said = f"{what}: {done:,} of {total:,}"

    def _take(self, answer: Answer) -> None:
        """Show what came, on the ui thread."""
        self._done += 1  # first: whatever becomes of it, nobody waits for it any more
        self._page.set_busy(self._done < self._number)
        if answer.error is None:
            action, asked = answer.key
            self._show(action, asked, answer.value)
        elif isinstance(answer.error, Cancelled):
            self._page.tell("Stopped.")
        else:
            self._page.tell_error(answer.error)

    def _show(self, action: str, asked: Asked, value: Any) -> None:
        told = asked.in_words(self.table)
        if action == "loads":
            self.figures["loads"] = latency_against_load(value, f"Latency against load (solid p99, dotted p50): {told}")
        else:
            self.results = value
            self.figures["batches"] = batches(value, f"Around the longest queue: {told}", _busiest(value))
            self._page.film.show(value, told)
        self._page.show(self.results, self.figures)

    def _ipython_display_(self) -> None:
        display(self._page.box)
        self.start()


def _busiest(runs: dict[str, Served]) -> tuple[float, float]:
    """The time around the longest queue, in which the run with the most passes has SHOWN_PASSES of them."""
    looks = np.linspace(0.0, max(float(each.passes.end_ms[-1]) for each in runs.values()), LOOKS)
    middle = float(looks[np.argmax(np.max([each.queued(looks) for each in runs.values()], axis=0))])
    passes = max((each.passes for each in runs.values()), key=len)
    last = len(passes) - 1
    first = int(np.clip(np.searchsorted(passes.begin_ms, middle) - SHOWN_PASSES // 2, 0, max(last - SHOWN_PASSES, 0)))
    return float(passes.begin_ms[first]), float(passes.end_ms[min(first + SHOWN_PASSES, last)])


@atexit.register
def _close_open() -> None:
    if _open is not None:
        _open.close()
