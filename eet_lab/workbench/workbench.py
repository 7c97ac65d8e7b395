"""The workbench: one widget that toggles techniques on a model and shows what each does.

Threads: callbacks only put messages into the controller's inbox; the ui thread (10 Hz) turns the controller and is the
only writer of widgets; the engine thread does the work; the background thread answers what is slow and not timed; the
sampler thread reads the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from IPython.display import HTML

from eet_lab import devices
from eet_lab.bench import Comparison, Ladder
from eet_lab.engine.settings import Settings
from eet_lab.errors import PromptError, ResultError, check_known
from eet_lab.figures import theme
from eet_lab.files import folder_path
from eet_lab.models import Model
from eet_lab.models.loading import checked_dtype
from eet_lab.texts import RecipeLike, read_recipe
from eet_lab.workbench import export
from eet_lab.workbench.choices import State
from eet_lab.workbench.controller import Controller
from eet_lab.workbench.history import FOLDER, History
from eet_lab.workbench.rows import Result
from eet_lab.workbench.threads import UiThread

ACTIONS = ("run", "compare", "ladder", "stop")


class Workbench(UiThread):
    """Pick a model and prompts, switch techniques, run, compare, and see where the time and the memory go.

    `model` is what `eet_lab.load` takes. `recipe` is switched on at first (default: all that can run here). If you give
    one, Compare measures against the baseline until you pin a run here. `settings` are those of a generation
    (max_new_tokens, temperature, top_k, top_p, seed). Runs are kept in `folder`. `result` is the last one, and
    `report()` shows it as a cell's own output, which still shows when the kernel is gone.

    After a reload the cell shows it again, with what runs, whether or not the notebook was saved since. A cell that was
    never saved is gone; if it is written and run again, kept runs come back, and a run under way goes on.

    Opening another workbench closes this one, unless it is busy and the new one is asked for with the same words: then
    the same workbench is shown again, as after a reload of the page. `close()` ends its threads. Errors: RecipeError,
    PromptError, ModelError (no such device or dtype), ResultError (no path of a folder).
    """

    _asked_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **options: Any) -> Workbench:
        """A new one; or the one that is busy, when the cell that made it is run again."""
        before: Workbench | None = cls._opened
        if before is not None and before.busy and before._asked_with == (args, options):
            return before
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
        dtype: str | torch.dtype | None = None,
        folder: str | Path = FOLDER,
        **settings: Any,
    ) -> None:
        if self is self._opened:
            return
        chosen, path = devices.chosen(device), folder_path(folder, ResultError)
        state = State(model=model, device=chosen, dtype=_dtype(dtype, chosen))
        if prompts is not None:
            state.prompts = []
            state.add_prompts(_texts(prompts))
        for name in settings:
            check_known(PromptError, "setting", name, state.generation)
        state.generation = {**state.generation, **settings}
        Settings.of(**state.generation)  # told now rather than when Run is pressed
        with devices.present(state.device):
            state.choose(read_recipe("all" if recipe is None else recipe, state.kind))
        state.settle()
        history = History(path)
        if recipe is not None:
            history.set_pins_aside()
        self._make_room()
        self.controller = Controller(state, devices.choices(), history)
        self._turn, self._end = self.controller.tick, self.controller.close
        self._is_idle, self._told = lambda: self.controller.idle, lambda: self.controller.status.text
        self._open(self.controller.page.box)

    @property
    def result(self) -> Result | None:
        """The last result; None before the first."""
        return self.controller.results.latest

    @property
    def model(self) -> Model | None:
        """The model that is loaded; None until one is."""
        return self.controller.model

    def press(self, action: str) -> None:
        """Press "run", "compare", "ladder" or "stop". Returns at once; the ui thread does it.

        While the model is still loading, the action waits for it. EETError for another action, after `close`, and
        while something else runs.
        """
        self._check_press(action, ACTIONS, self.controller.busy and self.controller.model is not None)
        self.controller.put({"command": action})

    def wait(self, timeout_s: float = 600.0) -> Result | None:
        """Wait until nothing is left to do, and return the last result; Ctrl+C stops the run.

        For scripts and tests: in a notebook, a cell that waits keeps the page's clicks waiting as well. It starts a
        workbench that is not displayed. EETError when `timeout_s` have passed, and after `close`.
        """
        try:
            self._wait(timeout_s)
        except KeyboardInterrupt:
            self.press("stop")
        return self.result

    def report(self) -> Any:
        """The last result as a cell's own output: its table, and its figures."""
        if not isinstance(self.result, (Comparison, Ladder)):
            return HTML(theme.stylesheet() + theme.note("There is no comparison yet: press Compare or Ladder first."))
        return export.Report(self.result)


def _dtype(dtype: str | torch.dtype | None, device: str) -> str:
    """The page's word for a dtype; ModelError for what is none."""
    return "auto" if dtype in (None, "auto") else str(checked_dtype(dtype, device)).removeprefix("torch.")


def _texts(prompts: str | Sequence[str]) -> list[str]:
    """Prompts as everywhere: one text is one prompt; PromptError for what is none."""
    given = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, str) else [prompts]
    if wrong := [each for each in given if not isinstance(each, str)]:
        raise PromptError(f"A prompt of a workbench is {wrong[0]!r}, but it must be a text.")
    return given
