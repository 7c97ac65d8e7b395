"""A page of buttons, whose work is done in the background: one thing at a time, which Stop ends.

Threads: callbacks only put a word into an inbox; the ui thread (10 Hz) is the only writer of widgets; the background
thread works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from html import escape
from queue import SimpleQueue
from typing import Any, ClassVar

import ipywidgets as W

from eet_lab.errors import Cancelled, EETError
from eet_lab.figures.theme import error_card
from eet_lab.workbench.threads import STOP, Answer, Background, UiThread, drained


class ActionPage:
    """The widgets of such a page, for the ui thread alone: `buttons` by their action, `form` and `fields` by name.

    `fields` are given with the words above them, and a line of help. `put` is called with an action from whatever
    thread a callback comes on. A kind makes `box`, and tells what its fields say now (`asked`).
    """

    ACTIONS: ClassVar[Mapping[str, tuple[str, str, str]]]
    """The words and tooltip of each action's button, and what is said when the action begins."""
    CALLED: ClassVar[Mapping[str, str]] = {}
    """What the page calls the fields that an error may name."""
    box: W.Box
    asked: Callable[[], Any]

    def __init__(
        self, fields: Mapping[str, tuple[str, Any, str]], put: Callable[[str], None], **button_layout: str
    ) -> None:
        self.form = {name: field(*each) for name, each in fields.items()}
        self.fields = {name: widget for name, (_, widget, _) in fields.items()}
        self.buttons: dict[str, W.Button] = {}
        for action, (words, tip, _) in self.ACTIONS.items():
            self.buttons[action] = W.Button(description=words, tooltip=tip or None, layout=button_layout)
            self.buttons[action].on_click(lambda _, action=action: put(action))
        self.set_busy(False)
        first, *_ = self.buttons.values()
        first.button_style = "primary"
        self.status, self.error = W.HTML(said_words(f"Press {first.description}.")), W.HTML()

    def said(self) -> dict[str, Any]:
        """What each field says now, a text without the blanks around it."""
        values = {name: widget.value for name, widget in self.fields.items()}
        return {name: value.strip() if isinstance(value, str) else value for name, value in values.items()}

    def set_busy(self, busy: bool) -> None:
        """Say what may be pressed: Stop while something goes on, and all else while nothing does."""
        for action, button in self.buttons.items():
            button.disabled = busy != (action == STOP)

    def tell(self, words: str) -> None:
        """What goes on."""
        if self.status.value != (said := said_words(words)):
            self.status.value = said

    def tell_error(self, error: BaseException) -> None:
        """What went wrong; what was shown before stays."""
        self.tell("")
        self.error.value = error_card(error, self.CALLED)


class ActionController:
    """Begins what a button asks for, one thing at a time, and shows what came of it.

    `inbox` takes actions from any thread; all else is for the ui thread. A kind has its work done, or raises EETError
    (`_ask`), and shows its value (`_show`).
    """

    page: Any
    _ask: Callable[[str, Any, threading.Event], None]
    _show: Callable[[str, Any, Any], None]

    def __init__(self, background: Background) -> None:
        self._background = background
        self.inbox: SimpleQueue[str] = SimpleQueue()
        self._cancel = threading.Event()
        self.action = ""
        """What is being done; "" for nothing."""
        self._asked: Any = None  # what the fields said when it began
        self._said = ""

    @property
    def busy(self) -> bool:
        """Whether something is asked for that was not answered."""
        return bool(self.action)

    def turn(self) -> bool:
        """Do what buttons ask for, and show how far it is; whether there was anything to do."""
        pressed = drained(self.inbox)
        for action in pressed:
            self._press(action)
        self.tick()
        return bool(pressed)

    def _press(self, action: str) -> None:
        """Begin what a button asks for, or stop what goes on: nothing begins beside it. Errors are told on the page."""
        if action == STOP:
            self.stop()
        if action == STOP or self.busy:
            return
        cancel = threading.Event()
        try:
            asked = self.page.asked()
            self._ask(action, asked, cancel)
        except EETError as error:
            self.page.tell_error(error)
            return
        self.action, self._asked, self._cancel, self._said = action, asked, cancel, self.page.ACTIONS[action][2]
        self.page.error.value = ""
        self.page.set_busy(True)

    def stop(self) -> None:
        """Let what goes on end."""
        self._cancel.set()

    def tick(self) -> None:
        """Show how far it is."""
        if self.busy:
            self.page.tell(self._said)

    def take(self, answer: Answer) -> None:
        """Show what came of it; nothing that nobody waits for."""
        if not self.busy:
            return
        action, self.action = self.action, ""  # first: whatever becomes of it, nobody waits for it
        self.page.set_busy(False)
        if answer.error is None and answer.value is not None:
            try:
                self._show(action, self._asked, answer.value)
            except Exception as error:  # noqa: BLE001  told where it was asked for, also on a page within another
                self.page.tell_error(error)
        elif answer.error is None or isinstance(answer.error, Cancelled):
            self.page.tell("Stopped.")
        else:
            self.page.tell_error(answer.error)

    def progress(self, done: int, total: int, what: str = "") -> None:
        """How far it is; from any thread."""
        self._said = f"{what}: {done:,} of {total:,}"


class ActionView(UiThread):
    """The page with its threads. A kind calls `_show_page` once nothing asked for can be wrong."""

    controller: Any

    def _show_page(self, make: Callable[[Background], Any]) -> None:
        """Take the place of the one that is open, with the controller that `make` makes."""
        self._turning = False
        self._make_room()
        self._background = Background()
        self.controller = make(self._background)
        self._open(self.controller.page.box.add_class("eet-bench"))

    def press(self, action: str) -> None:
        """Press a button by its action, such as "stop"; returns at once.

        EETError for another action, after `close`, and while something else runs.
        """
        self._check_press(action, self.controller.page.ACTIONS, self.busy)
        self.controller.inbox.put(action)

    def _is_idle(self) -> bool:
        # In this order: an action leaves the inbox within a turn, and what it begins is known at the turn's end.
        return self.controller.inbox.empty() and not self._turning and not self.controller.busy

    def _told(self) -> str:
        return self.controller.action

    def _turn(self) -> None:
        self._turning = True
        try:
            for answer in self._background.take():
                answer.to(answer)
            self.controller.turn()
        except Exception as error:  # noqa: BLE001  told to the reader; this thread must live on
            self.controller.page.tell_error(error)
        self._turning = False

    def _end(self) -> None:
        self.controller.stop()
        self._background.close()


def said_words(words: str) -> str:
    """What stands beside the buttons."""
    return f'<span class="eet-dim" role="status">{escape(words)}</span>'


def help_line(words: str) -> W.HTML:
    """A line of help beside or below a field."""
    return W.HTML(f'<div class="eet-help" title="{escape(words)}">{escape(words)}</div>')


def field(name: str, widget: W.Widget, help: str = "") -> W.VBox:
    """A field with its name above it, and a line of help below."""
    above = W.HTML(f'<div class="eet-dim" style="line-height:1.4">{escape(name)}</div>')
    return W.VBox([above, widget, *([help_line(help)] if help else [])])
