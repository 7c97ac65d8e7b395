"""The training panel: choose data, techniques and a few numbers, and watch a model learn.

It trains, goes on from a checkpoint, and compares, one thing at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from eet_lab.bench.train_compare import TrainComparison, TrainLadder
from eet_lab.errors import TrainingError
from eet_lab.labels import with_labels
from eet_lab.models import Model, load
from eet_lab.technique import Recipe, everything
from eet_lab.training import TrainRun
from eet_lab.training.asked import TrainAsked, changed_words
from eet_lab.training.run import Evaluation
from eet_lab.words import counted, told, visible
from eet_lab.workbench.actions import ActionController, ActionView
from eet_lab.workbench.threads import Answer, Background, drained
from eet_lab.workbench.train_jobs import Compared, Look, Trained, compare_recipes, train_model
from eet_lab.workbench.train_page import TrainPage


class TrainController(ActionController):
    """The page, and what came of its last run and of its last comparison."""

    def __init__(self, model: Model, asked: TrainAsked, background: Background) -> None:
        super().__init__(background)
        self.model = model
        self.trained: Trained | None = None
        self.compared: Compared | None = None
        self.page = TrainPage(model, asked, self.inbox.put)
        self._looks: SimpleQueue[Look | Evaluation] = SimpleQueue()
        self._partial: SimpleQueue[Compared] = SimpleQueue()

    def tick(self) -> None:
        super().tick()
        self.page.follow_steps()
        self.page.live.push(drained(self._looks))
        for found in drained(self._partial)[-1:]:
            self._put_comparison(found, is_last=False)
        self.page.offer_resume(self.page.asked().has_checkpoint, self.busy)

    def take(self, answer: Answer) -> None:
        action = self.action
        try:
            self.tick()  # what its last steps told
        finally:
            super().take(answer)
        if isinstance(answer.error, TrainingError) and action in ("train", "resume") and not self.busy:
            self.page.tell(_kept(self._asked))

    def _ask(self, action: str, asked: TrainAsked, cancel: threading.Event) -> None:
        asked.check(self.model)
        work: Callable[..., Any]
        if compares := action in ("compare", "ladder"):
            self._partial = SimpleQueue()
            work = partial(compare_recipes, self.model, asked, action == "ladder", self._partial.put)
        else:
            if action == "train" and asked.has_checkpoint:
                raise TrainingError(
                    f"There is a checkpoint in {visible(asked.folder)}, which a new run would write over. Press Resume "
                    "to go on from it, or name another folder."
                )
            if action == "resume" and not asked.has_checkpoint:
                raise TrainingError(
                    f"There is no checkpoint in {told(asked.folder)}. Name the folder of one, or press Train."
                )
            self._looks = SimpleQueue()
            work = partial(train_model, self.model, asked, action == "resume", self._looks.put)
        self._background.ask(self.take, None, partial(work, self.progress, cancel))
        self.page.begin(compares)

    def _show(self, action: str, asked: TrainAsked, value: Any) -> None:
        if isinstance(value, TrainComparison | TrainLadder):
            self._put_comparison(value, is_last=True)
            stopped = isinstance(value, TrainLadder) and value.partial
            self.page.tell("Stopped." if stopped else "Done.")
        else:
            self.trained = value
            self.page.show_run(value.run, asked.steps, value.mfu)
            end = _kept(asked) or ("Stopped." if value.run.was_stopped else "Done.")
            changed = changed_words(
                value.changed, lambda name: {**self.page.CALLED, "recipe": "techniques"}.get(name, name)
            )
            kept = value.warmup_steps != asked.warmup  # not what its field shows
            warmup = f"The warm-up stayed that of the run before: {counted(value.warmup_steps, 'step')}." * kept
            self.page.tell(" ".join(filter(None, (end, changed, warmup))))

    def _put_comparison(self, found: Compared, is_last: bool) -> None:
        self.compared = found
        self.page.show_comparison(found, is_last)

    def progress(self, done: int, total: int, what: str = "") -> None:
        super().progress(done, total, with_labels(what, self.model.device))


def _kept(asked: TrainAsked) -> str:
    """Where a run's checkpoint is, if there is one: in the folder that it began with, whatever was typed since."""
    return f"The last checkpoint is in {visible(asked.folder)}; Resume goes on from it." * asked.has_checkpoint


class TrainView(ActionView):
    """Train a copy of a model, stop it, go on from its checkpoint, and compare techniques with none, or one by one.

    `model` is a name, or what `eet_lab.load` gave. `task` is "language", "masked", "classes", "token-classes" or
    "seq2seq" (default: what its head is for). `data` is a file, the last tenth of which is held out: text, or JSON
    lines with a "text" each; for classes and answers JSON lines with a "text" or "ids", and "labels". Without one, what
    ships is read: Python's documentation, numbers in words, or drawn digits. `folder` is where the checkpoint is kept.
    `lr` rises over `warmup_steps` (default: five, or all of fewer `steps`). Each of `steps` reads `batch_rows`
    examples, or rows of `row_tokens` tokens (default: 128, or the model's context). `run` is what the last run did,
    `trained` the model after it, and `compared` the last comparison or ladder.

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
        row_tokens: int | None = None,
        warmup_steps: int | None = None,
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
        self._show_page(partial(TrainController, loaded, asked))

    @property
    def run(self) -> TrainRun | None:
        """The steps and held-out losses of the last run that was not refused."""
        return self.controller.trained.run if self.controller.trained else None

    @property
    def trained(self) -> Model | None:
        """The model after that run: generate with it, or `save` it."""
        return self.controller.trained.model if self.controller.trained else None

    @property
    def compared(self) -> Compared | None:
        """The last comparison or ladder, as far as it came."""
        return self.controller.compared

    def wait(self, timeout_s: float = 60.0) -> TrainRun | None:
        """Wait until nothing is left to do; `run`. For scripts and tests. EETError after `timeout_s`."""
        self._wait(timeout_s)
        return self.run
