"""The workbench's page for serving: the same as a ServingView's, over the model that is loaded here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eet_lab.figures.script import all_widgets
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.cost_files import load_cost
from eet_lab.workbench.background import Answer, Background
from eet_lab.workbench.engine_thread import Finished
from eet_lab.workbench.page import Page
from eet_lab.workbench.serving_choices import Asked, usual_policies
from eet_lab.workbench.serving_controller import ServingController
from eet_lab.workbench.serving_model import RunOnModel

EXAMPLE = "demo-cpu"
"""The table until the model is measured: of a decoder, as all models of a workbench are."""
LENGTHS, ANSWERS, REQUESTS = "8-64", "4-32", 60
"""Requests that any model here has room for; a CPU serves so many in seconds."""
JOBS = {"measure": "cost_table", "serve": "serving"}
"""What the engine thread calls them."""


@dataclass(frozen=True)
class Either:
    """Set once one of the two is."""

    first: Cancel
    second: Cancel

    def is_set(self) -> bool:
        return self.first.is_set() or self.second.is_set()


class ServingTab:
    """Made when it is first shown, since few ask for it and a page is to open soon. For the ui thread."""

    def __init__(self, page: Page, put: Callable[[str], None], background: Background, on_model: RunOnModel) -> None:
        self._page, self._put, self._background, self._on_model = page, put, background, on_model
        self.controller: ServingController | None = None
        self.shown = False

    @property
    def busy(self) -> bool:
        """Whether something of it goes on."""
        return self.controller is not None and self.controller.busy

    def show(self, on: bool) -> None:
        """Show it in place of runs and results, or take it away; what goes on goes on."""
        if on and self.controller is None:
            table = load_cost(EXAMPLE)
            asked = Asked(usual_policies(table), lengths=LENGTHS, new_tokens=ANSWERS, requests=REQUESTS)
            self.controller = ServingController(asked, table, self._put, self._background, self._on_model)
            self._page.put_serving(self.controller.page.box)
        self.shown = on
        self._page.serving(on)

    def press(self, action: str) -> None:
        """What a button of it asks for. EETError for what is none."""
        if self.controller is not None:
            self.controller.press(action)

    def progress(self, told: Progress) -> Progress:
        """Progress that the bar and this page show."""
        assert self.controller is not None
        own = self.controller.progress

        def both(done: int, total: int, what: str = "") -> None:
            told(done, total, what)
            own(done, total, what)

        return both

    def turn(self) -> None:
        """Show how far it is."""
        if self.controller is not None:
            self.controller.tick()

    def answered(self, answer: Answer) -> None:
        """A simulation is done."""
        if self.controller is not None:
            self.controller.take(answer)

    def finished(self, event: Finished) -> bool:
        """Take what the engine thread did for this page; whether it was that."""
        if event.name not in JOBS.values() or self.controller is None:
            return False
        self.controller.finish(event.value, event.error)
        return True

    def close(self) -> None:
        """Take the widgets down."""
        if self.controller is not None:
            self.controller.stop()
            for widget in all_widgets(self.controller.page.box):
                widget.close()
