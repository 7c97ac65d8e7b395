"""The training panel: choose data, techniques and a few numbers, and watch a model learn."""

from __future__ import annotations

from pathlib import Path

from eet_lab.bench.training_compare import TrainComparison
from eet_lab.models import Model, load
from eet_lab.technique import Recipe, everything
from eet_lab.training import TrainRun
from eet_lab.workbench.actions import ActionView
from eet_lab.workbench.train_controller import TrainController
from eet_lab.workbench.train_jobs import TrainAsked


class TrainView(ActionView):
    """Train a copy of a model, stop it, go on from its checkpoint, and compare techniques with none.

    `model` is a name, or what `eet_lab.load` gave. `task` is "language", "masked", "classes", "token-classes" or
    "seq2seq" (default: what its head is for). `data` is a file, the last tenth of which is held out: text, or JSON
    lines with a "text" each; for classes and answers JSON lines with a "text" or "ids", and "labels". Without one, what
    ships is read: Python's documentation, numbers in words, or drawn digits. `folder` is where the checkpoint is kept.
    `lr` rises over `warmup_steps`; each of `steps` reads `batch_rows` examples, or rows of `row_tokens` tokens. `run`
    is what the last run did, `trained` the model after it, and `compared` the last comparison.

    Opening another view closes this one. `close()` stops the training and ends its threads. Errors: ModelError,
    TrainingError.
    """

    controller: TrainController

    def __init__(
        self,
        model: str | Model = "demo",
        data: str | Path = "",
        *,
        folder: str | Path = "",
        lr: float = 3e-5,
        steps: int = 40,
        batch_rows: int = 4,
        row_tokens: int = 128,
        warmup_steps: int = 5,
        dropout: float = 0.0,
        task: str | None = None,
        device: str | None = None,
    ) -> None:
        loaded = model if isinstance(model, Model) else load(model, device=device)
        ticked: Recipe = everything(loaded.device, loaded.config.in_training)
        asked = TrainAsked(
            str(data), ticked.names, lr, steps, batch_rows, row_tokens, warmup_steps, dropout, str(folder), task
        )
        asked.check(loaded)  # told now rather than when a button is pressed
        self.model = loaded
        self._show_page(lambda put, background: TrainController(loaded, asked, put, background))

    @property
    def run(self) -> TrainRun | None:
        """The steps and held-out losses of the last run that was not refused."""
        return self.controller.trained.run if self.controller.trained else None

    @property
    def trained(self) -> Model | None:
        """The model after that run: generate with it, or `save` it."""
        return self.controller.trained.model if self.controller.trained else None

    @property
    def compared(self) -> TrainComparison | None:
        """The last comparison, as far as it came."""
        return self.controller.compared

    def wait(self, timeout_s: float = 60.0) -> TrainRun | None:
        """Wait until nothing is left to do; `run`. For scripts and tests. EETError after `timeout_s`."""
        self._wait(timeout_s)
        return self.run
