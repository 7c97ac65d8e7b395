"""Work in the background: what is too slow for the ui thread, and not worth the engine thread's queue.

One thread. Of each name only the newest question counts: a slider that is dragged asks many times and is answered once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from eet_lab.progress import Cancel

THREAD_NAME = "eet-background"
PATIENCE_S = 5.0
LOOK_S = 0.02
"""How often who waits for quiet looks whether to give up."""


@dataclass(frozen=True)
class Answer:
    """What came of a question: a value, or the error that it ended in."""

    name: str
    key: Any
    value: Any
    error: BaseException | None = None


@dataclass(frozen=True)
class _Question:
    name: str
    key: Any
    work: Callable[[], Any]
    due: float


T = TypeVar("T")


def drained(queue: SimpleQueue[T]) -> list[T]:
    """All that is in it now, without waiting."""
    taken = []
    with suppress(Empty):
        while True:
            taken.append(queue.get_nowait())
    return taken


class Background:
    """Answers questions in a thread of its own. All but `wait_quiet` is for the ui thread, and none of it waits."""

    def __init__(self) -> None:
        self._asked: dict[str, _Question] = {}
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._changed = threading.Condition()
        self._at_work = self._held = self._closing = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def ask(self, name: str, key: Any, work: Callable[[], Any], after_s: float = 0.0) -> None:
        """Do `work` once `after_s` have passed without another question of that name.

        `key` comes back with the answer.
        """
        with self._changed:
            self._asked[name] = _Question(name, key, work, time.monotonic() + after_s)
            self._changed.notify_all()

    def take(self) -> list[Answer]:
        """All answers since the last call."""
        return drained(self._answers)

    def hold(self) -> None:
        """Begin nothing more until `resume`; what is asked meanwhile is kept, what is being done goes on."""
        with self._changed:
            self._held = True

    def resume(self) -> None:
        """Go on after `hold`."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def wait_quiet(self, cancel: Cancel) -> bool:
        """Wait on any other thread, after `hold`, until nothing is being done; False if `cancel` was set before."""
        with self._changed:
            while self._at_work and not cancel.is_set():
                self._changed.wait(LOOK_S)
            return not self._at_work

    @property
    def idle(self) -> bool:
        """Nothing is asked for that has not been answered and taken."""
        with self._changed:
            return not self._asked and not self._at_work and self._answers.empty()

    def close(self) -> None:
        """End the thread; what it is doing is waited for a while."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while (question := self._next()) is not None:
            try:
                answer = Answer(question.name, question.key, question.work())
            except Exception as error:  # noqa: BLE001  told to the user by the ui thread; this one must live on
                answer = Answer(question.name, question.key, None, error)
            with self._changed:
                self._answers.put(answer)
                self._at_work = False
                self._changed.notify_all()
            del question, answer  # they hold a model, and the next question may be long in coming

    def _next(self) -> _Question | None:
        """The question that is due first, once it is and may be begun; None at the end."""
        with self._changed:
            while not self._closing:
                allowed = () if self._held else self._asked.values()
                first = min(allowed, key=lambda each: each.due, default=None)
                wait_s = None if first is None else first.due - time.monotonic()
                if first is not None and wait_s is not None and wait_s <= 0:
                    self._at_work = True
                    return self._asked.pop(first.name)
                self._changed.wait(wait_s)
        return None
