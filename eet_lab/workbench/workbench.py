"""The workbench: one widget that toggles techniques on a model and shows what each does.

Threads: callbacks only put commands into the controller's inbox; the ui thread (10 Hz) turns the controller and is the
only writer of widgets; the engine thread does the work; the background thread answers what is slow and not timed; the
sampler thread reads the device.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from IPython.display import HTML

from eet_lab import devices
from eet_lab.bench import Comparison, Ladder
from eet_lab.engine.settings import Settings
from eet_lab.errors import EETError, PromptError, did_you_mean
from eet_lab.figures import theme
from eet_lab.models import Model
from eet_lab.texts import RecipeLike, read_recipe
from eet_lab.words import plain
from eet_lab.workbench import commands, export, page
from eet_lab.workbench.choices import State
from eet_lab.workbench.controller import TICK_S, Controller
from eet_lab.workbench.history import FOLDER, History
from eet_lab.workbench.rows import Result

ACTIONS = {name: commands.COMMANDS[name] for name in ("run", "compare", "ladder", "stop")}

_open: Workbench | None = None


class Workbench:
    """Pick a model and prompts, switch techniques, run, compare, and see where the time and the memory go.

    `model` is what `eet_lab.load` takes. `recipe` is what is switched on at first (all that can run here); where it is
    given, Compare begins with the baseline, whatever run is pinned, here or elsewhere. `settings` are those of a
    generation (max_new_tokens, temperature, top_k, top_p, seed). Runs are kept in `folder`. `result` is the last one,
    and `report()` shows it as a cell's own output, which still shows when the kernel is gone.

    A page that is reloaded shows what was saved with the notebook: where that was before the cell ran, run the cell
    again. Kept runs come back, and a run under way goes on.

    Opening another workbench closes this one, unless it is busy and the new one is asked for with the same words: then
    the same workbench is shown again, as after a reload of the page. `close()` ends its threads. Errors: RecipeError,
    PromptError, ModelError (no such device).
    """

    _asked_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **options: Any) -> Workbench:
        """A new one; or the one that is busy, when the cell that made it is run again."""
        if _open is not None and _open.busy and _open._asked_with == (args, options):
            return _open
        new = super().__new__(cls)
        new._asked_with = args, options
        return new

    def __init__(
        self,
        model: Any = "demo",
        prompts: str | Sequence[str] | None = None,
        recipe: RecipeLike | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        folder: str | Path = FOLDER,
        **settings: Any,
    ) -> None:
        global _open
        if self is _open:
            return
        Settings.of(**settings)  # told now rather than when Run is pressed
        state = State(model=model, device=devices.chosen(device), dtype=dtype or "auto")
        if prompts is not None:
            state.prompts = _texts(prompts)
        state.generation = {**state.generation, **settings}
        with devices.present(state.device):
            state.choose(read_recipe("all" if recipe is None else recipe, state.kind))
        state.settle()
        history = History(folder)
        if recipe is not None:
            history.set_pins_aside()
        if _open is not None:
            _open.close()  # once nothing that was asked for can be wrong
        self.controller = Controller(state, devices.choices(), history)
        self._closing = threading.Event()
        self._ui = threading.Thread(target=self._loop, name="eet-ui", daemon=True)
        _open = self

    @property
    def result(self) -> Result | None:
        """The last result; None before the first."""
        return self.controller.results.latest

    @property
    def model(self) -> Model | None:
        """The model that is loaded; None until one is."""
        return self.controller.model

    @property
    def busy(self) -> bool:
        """Whether something runs or is still to be done."""
        return not self._closing.is_set() and not self.controller.idle

    def start(self) -> None:
        """Start the ui thread, if it does not run yet. Displaying the workbench does it."""
        if not self._ui.is_alive() and not self._closing.is_set():
            self._ui.start()

    def press(self, action: str) -> None:
        """Press "run", "compare", "ladder" or "stop". Returns at once; the ui thread does it.

        While the model is still loading, the action waits for it. EETError for another action, after `close`, and
        while something else runs.
        """
        if action not in ACTIONS:
            known = f"{', '.join(list(ACTIONS)[:-1])} and {list(ACTIONS)[-1]}"
            raise EETError(f"There is no action {action!r}.{did_you_mean(action, ACTIONS)} Actions are {known}.")
        if self._closing.is_set():
            raise EETError(f"This workbench is closed, so {action} does nothing. Open another: eet_lab.Workbench().")
        if action != "stop" and self.controller.busy and self.controller.model is not None:
            raise EETError(f"{action} cannot start while something runs. Wait for it with wait(), or press('stop').")
        self.controller.put(ACTIONS[action]())

    def wait(self, timeout_s: float = 600.0) -> Result | None:
        """Wait until nothing is left to do, and return the last result; Ctrl+C stops the run.

        For scripts and tests: in a notebook, a cell that waits keeps the page's clicks waiting as well. It starts a
        workbench that is not displayed. EETError when `timeout_s` have passed, and after `close`.
        """
        if self._closing.is_set():
            raise EETError("This workbench is closed: there is nothing to wait for. Open another: eet_lab.Workbench().")
        self.start()
        deadline = time.monotonic() + timeout_s
        try:
            while not self.controller.idle:
                if time.monotonic() > deadline:
                    raise EETError(
                        f"It is not done after {plain(timeout_s)} s: {self.controller.status}. Give wait() longer."
                    )
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
            self._ui.join()  # first: a turn may start a sampler
        self.controller.close()
        if _open is self:
            _open = None

    def _loop(self) -> None:
        while not self._closing.wait(TICK_S):
            self.controller.tick()

    def _ipython_display_(self) -> None:
        page.show(self.controller.page.box)
        self.start()


def _texts(prompts: str | Sequence[str]) -> list[str]:
    """Prompts as everywhere: one text is one prompt; PromptError for what is none."""
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    if wrong := [each for each in given if not isinstance(each, str)]:
        raise PromptError(f"A prompt of a workbench is {wrong[0]!r}, but it must be a text.")
    return given


@atexit.register
def _close_open() -> None:
    """A script that ends closes its workbench: torch aborts where a thread of Python's ends in the middle of it."""
    if _open is not None:
        _open.close()
