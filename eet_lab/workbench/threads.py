"""The threads of a page of widgets: the ui thread, which alone writes widgets, and the one for work in the background.

The first takes a turn ten times a second. The second does what is too slow for it, and not worth the engine thread's
queue; of each asker only the newest question counts: a slider that is dragged asks many times and is answered once.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, TypeVar

import ipywidgets as W
from IPython.display import display

from eet_lab.errors import EETError, check_known
from eet_lab.figures.script import all_widgets
from eet_lab.progress import Cancel
from eet_lab.words import plain
from eet_lab.workbench.page_recovery import RUN_AGAIN, PageRecovery

TICK_S = 0.1
STOP = "stop"
"""The action that ends another."""


class UiThread:
    """Turns a page of widgets until it is closed. Of each kind one is open: opening another closes it.

    A kind gives what a turn does, what ends its other threads, whether nothing is left to do, and in words what is.
    """

    _opened: ClassVar[Any] = None
    _turn: Callable[[], None]
    _end: Callable[[], None]
    _is_idle: Callable[[], bool]
    _told: Callable[[], str]

    @property
    def busy(self) -> bool:
        """Whether something runs or is still to be done."""
        return not self._closing.is_set() and not self._is_idle()

    def start(self) -> None:
        """Start the ui thread, if it does not run yet. Displaying the page does it."""
        if not self._ui.is_alive() and not self._closing.is_set():
            self._ui.start()

    def close(self) -> None:
        """End what runs and all threads, and take the widgets off the page. May be called twice."""
        if self._closing.is_set():
            return
        self._end_threads()
        for widget in [*all_widgets(self._box), *all_widgets(self._recovery)]:
            widget.close()

    def _end_threads(self) -> None:
        """End what runs and all threads; what the page shows stays."""
        self._closing.set()
        if self._ui.is_alive():
            self._ui.join()  # first: a turn may start a thread
        self._end()
        if type(self)._opened is self:
            type(self)._opened = None

    @classmethod
    def _make_room(cls) -> None:
        """Close the one that is open: before threads of another begin, once nothing asked for it can be wrong."""
        if cls._opened is not None:
            cls._opened.close()

    def _open(self, box: W.DOMWidget) -> None:
        """Take its place, with all there is to turn."""
        self._box, self._closing = box, threading.Event()
        self._recovery = PageRecovery()
        self._ui = threading.Thread(target=self._loop, name="eet-ui", daemon=True)
        type(self)._opened = self

    def _loop(self) -> None:
        while not self._closing.wait(TICK_S):
            self._turn()

    def _wait(self, timeout_s: float) -> None:
        """Wait until nothing is left to do. EETError after `timeout_s`, and after `close`."""
        self._check_open("wait")
        self.start()
        deadline = time.monotonic() + timeout_s
        while self.busy:
            if time.monotonic() > deadline:
                raise EETError(f"It is not done after {plain(timeout_s)} s: {self._told()}. Give wait() longer.")
            time.sleep(TICK_S / 4)

    def _check_press(self, action: str, actions: Iterable[str], busy: bool) -> None:
        """EETError for what is none of the actions, after `close`, and, but for STOP, while something runs."""
        check_known(EETError, "action", action, actions)
        self._check_open(action)
        if action != STOP and busy:
            raise EETError(f"{action} cannot start while something runs. Wait for it with wait(), or press('stop').")

    def _check_open(self, action: str) -> None:
        """EETError after `close`."""
        if self._closing.is_set():
            name = type(self).__name__
            raise EETError(f"This {name} is closed, so {action} does nothing. Open another: eet_lab.{name}().")

    def _ipython_display_(self) -> None:
        outputs = {"text/html": RUN_AGAIN}, {**self._box._repr_mimebundle_(), "text/plain": "(a page of widgets)"}
        for data in outputs:
            display(data, raw=True)
        self._recovery.displayed(self._box.model_id or "", outputs)
        self.start()


@atexit.register
def _end_all() -> None:
    """A script that ends ends its threads: torch aborts where a thread of Python's ends in the middle of it.

    Widgets that were closed would leave an open page with nothing of what it showed.
    """
    kinds = [UiThread]
    for kind in kinds:
        if kind._opened is not None:
            kind._opened._end_threads()
        kinds += kind.__subclasses__()


LOOK_S = 0.02
"""How often who waits for quiet looks whether to give up."""


@dataclass(frozen=True)
class Answer:
    """What came of a question, for `to`, who asked it: a value, or the error that it ended in."""

    to: Receiver
    key: Any
    value: Any
    error: BaseException | None = None
    seconds: float = 0.0


Receiver = Callable[[Answer], None]


@dataclass(frozen=True)
class _Question:
    to: Receiver
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

    PATIENCE_S: ClassVar[float] = 5.0
    """How long its last work is waited for at the end."""

    def __init__(self, name: str = "eet-background") -> None:
        self._asked: dict[Receiver, _Question] = {}
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._changed = threading.Condition()
        self._at_work = self._held = self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self, to: Receiver, key: Any, work: Callable[[], Any], after_s: float = 0.0) -> None:
        """Do `work` once `after_s` have passed without another question of `to`, which the answer is for.

        `key` comes back with the answer.
        """
        with self._changed:
            self._asked[to] = _Question(to, key, work, time.monotonic() + after_s)
            self._changed.notify_all()

    def take(self) -> list[Any]:
        """All answers since the last call, and what else a kind tells, in the order in which it was told."""
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
        self._thread.join(self.PATIENCE_S)

    def _run(self) -> None:
        while (question := self._next()) is not None:
            begun, value, error = time.perf_counter(), None, None
            try:
                value = question.work()
            except BaseException as caught:  # noqa: BLE001  told to the user by the ui thread; this one must live on
                error = caught
            with self._changed:
                self._answers.put(Answer(question.to, question.key, value, error, time.perf_counter() - begun))
                self._at_work = False
                self._changed.notify_all()
            del question, value, error  # they hold a model, and the next question may be long in coming

    def _next(self) -> _Question | None:
        """The question that is due first, once it is and may be begun; None at the end."""
        with self._changed:
            while not self._closing:
                allowed = () if self._held else self._asked.values()
                first = min(allowed, key=lambda each: each.due, default=None)
                wait_s = None if first is None else first.due - time.monotonic()
                if first is not None and wait_s is not None and wait_s <= 0:
                    self._at_work = True
                    return self._asked.pop(first.to)
                self._changed.wait(wait_s)
        return None
