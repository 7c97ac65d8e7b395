"""What the training panel does: it trains, goes on from a checkpoint, and compares, one thing at a time.

Only the ui thread calls it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar

from eet_lab.bench.training_compare import TrainComparison
from eet_lab.errors import TrainingError
from eet_lab.models import Model
from eet_lab.training.run import Evaluation
from eet_lab.words import told, visible
from eet_lab.workbench.actions import ActionController
from eet_lab.workbench.background import Answer, Background, drained
from eet_lab.workbench.train_jobs import Look, TrainAsked, Trained, compare_recipes, train_model
from eet_lab.workbench.train_page import TrainPage


class TrainController(ActionController):
    """The page, and what came of its last run and of its last comparison."""

    BEGUN: ClassVar[Mapping[str, str]] = {
        "train": "Reading the data …", "resume": "Reading the checkpoint …", "compare": "Reading the data …"
    }  # fmt: skip
    QUESTION: ClassVar[str] = "training"

    def __init__(self, model: Model, asked: TrainAsked, put: Callable[[str], None], background: Background) -> None:
        super().__init__(background)
        self.model = model
        self.trained: Trained | None = None
        self.compared: TrainComparison | None = None
        self.page = TrainPage(model, asked, put)
        self._looks: SimpleQueue[Look | Evaluation] = SimpleQueue()
        self._partial: SimpleQueue[TrainComparison] = SimpleQueue()

    def tick(self) -> None:
        super().tick()
        self.page.live.push(drained(self._looks))
        for found in drained(self._partial)[-1:]:
            self._put_comparison(found)
        self.page.offer_resume(self.page.asked().has_checkpoint, self.busy)

    def take(self, answer: Answer) -> None:
        action = self.action
        self.tick()  # what its last steps told
        super().take(answer)
        if isinstance(answer.error, TrainingError) and action in ("train", "resume") and not self.busy:
            self.page.tell(self._kept())

    def _ask(self, action: str, number: int, asked: TrainAsked, cancel: threading.Event) -> None:
        asked.check(self.model)
        work: Callable[..., Any]
        if action == "compare":
            self._partial = SimpleQueue()
            work = partial(compare_recipes, self.model, asked, self._partial.put)
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
        self._background.ask(self.QUESTION, number, partial(work, self.progress, cancel))
        self.page.begin(action == "compare")

    def _show(self, action: str, asked: TrainAsked, value: Any) -> None:
        if isinstance(value, TrainComparison):
            self._put_comparison(value)
            self.page.tell("Done.")
        else:
            self.trained = value
            self.page.show_run(value.run, asked.steps, value.mfu)
            self.page.tell(self._kept() or "Done.")

    def _put_comparison(self, found: TrainComparison) -> None:
        self.compared = found
        self.page.show_comparison(found)

    def _kept(self) -> str:
        asked = self.page.asked()
        return f"The last checkpoint is in {visible(asked.folder)}; Resume goes on from it." * asked.has_checkpoint
