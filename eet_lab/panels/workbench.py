"""The workbench: one widget that toggles techniques on a model and shows what each does.

Threads: callbacks only put commands into the desk's inbox; the ui thread (10 Hz) turns the desk and is the only writer
of widgets; the engine thread (`worker`) does the work; the sampler thread reads the device.
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path
from typing import Any

import torch
from IPython.display import HTML, display

from eet_lab.bench import Comparison, Ladder
from eet_lab.engine.settings import Settings
from eet_lab.errors import EETError, did_you_mean
from eet_lab.models import Model
from eet_lab.models.load import checked_device
from eet_lab.panels import export, recordings, theme
from eet_lab.panels.desk import TICK_S, Desk
from eet_lab.panels.jobs import RunReport
from eet_lab.panels.refresh import all_widgets
from eet_lab.panels.state import State
from eet_lab.texts import RecipeLike, read_recipe

ACTIONS = ("run", "compare", "ladder", "stop")

_open: Workbench | None = None


class Workbench:
    """Pick a model and prompts, switch techniques, run, compare, and see where the time and the memory go.

    `model` is what `eet_lab.load` takes. `recipe` is what is switched on at first (all that can run here). `settings`
    are those of a generation (max_new_tokens, temperature, top_k, top_p, seed). Results are in `result`; `report()`
    shows the last one as a cell's own output, which still shows when the kernel is gone; saved ones go to `folder`.
    Opening another workbench closes this one; `close()` ends its threads. Errors: RecipeError, PromptError,
    ModelError (no such device).
    """

    def __init__(
        self,
        model: Any = "demo",
        prompts: list[str] | None = None,
        recipe: RecipeLike = "all",
        *,
        device: str | None = None,
        dtype: str | None = None,
        folder: str | Path = recordings.FOLDER,
        **settings: Any,
    ) -> None:
        global _open
        Settings.of(**settings)  # told now rather than when Run is pressed
        state = State(model=model, device=checked_device(device), dtype=dtype or "auto")
        if prompts is not None:
            state.prompts = list(prompts)
        state.generation = {**state.generation, **settings}
        state.choose(read_recipe(recipe, state.device))
        state.settle()
        if _open is not None:
            _open.close()
        self.desk = Desk(state, ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"], Path(folder))
        self._closing = threading.Event()
        self._ui = threading.Thread(target=self._loop, name="eet-ui", daemon=True)
        _open = self

    @property
    def result(self) -> Comparison | Ladder | RunReport | None:
        """The last result; None before the first."""
        return self.desk.shelf.result

    @property
    def model(self) -> Model | None:
        """The model that is loaded; None until one is."""
        return self.desk.model

    def start(self) -> None:
        """Start the ui thread, if it does not run yet. Displaying the workbench does it."""
        if not self._ui.is_alive() and not self._closing.is_set():
            self._ui.start()

    def press(self, action: str) -> None:
        """As if "run", "compare", "ladder" or "stop" had been pressed. Returns at once; EETError for another."""
        if action not in ACTIONS:
            known = f"{', '.join(ACTIONS[:-1])} and {ACTIONS[-1]}"
            raise EETError(f"There is no action {action!r}.{did_you_mean(action, ACTIONS)} Actions are {known}.")
        self.desk.put(action)

    def wait(self, timeout_s: float = 600.0) -> Comparison | Ladder | RunReport | None:
        """Wait until nothing is left to do, and return the last result; Ctrl+C stops the run.

        For scripts and tests: in a notebook, a cell that waits keeps the page's clicks waiting as well.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not self.desk.idle and time.monotonic() < deadline:
                time.sleep(TICK_S / 2)
        except KeyboardInterrupt:
            self.press("stop")
        return self.result

    def report(self) -> Any:
        """The last result as a cell's own output: its table, and its figures."""
        if not isinstance(self.result, (Comparison, Ladder)):
            return HTML(theme.stylesheet() + theme.note("There is no result yet: press Compare or Ladder first."))
        return export.Report(self.result)

    def close(self) -> None:
        """End the run and all threads, and take the widgets off the page. May be called twice."""
        global _open
        if self._closing.is_set():
            return
        self._closing.set()
        if self._ui.is_alive():
            self._ui.join()  # first: a turn of the desk may start a sampler
        self.desk.close()
        for widget in all_widgets(self.desk.box):
            widget.close()
        if _open is self:
            _open = None

    def _loop(self) -> None:
        while not self._closing.wait(TICK_S):
            self.desk.tick()

    def _ipython_display_(self) -> None:
        display(self.desk.box)
        self.start()


@atexit.register
def _close_open() -> None:
    """A script that ends closes its workbench: torch aborts where a thread of Python's ends in the middle of it."""
    if _open is not None:
        _open.close()
