"""A prediction that is taken before anything is shown, and what waits for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from html import escape
from typing import Any, Concatenate, ParamSpec

import ipywidgets as W
import torch
from IPython.display import HTML, display

from eet_lab.figures import theme
from eet_lab.figures.outputs import FigureBox
from eet_lab.figures.script import style
from eet_lab.lessons.show import Shown, note
from eet_lab.words import plain

P = ParamSpec("P")


class Prediction:
    """Takes the reader's prediction, and only then reveals what is so.

    `choices` are words to choose from, or give `number=(low, high)` and a `unit`. `reveal` is what to show: a text, a
    figure, anything that a notebook can display, or a function of the prediction that returns it (run in a thread of
    its own, so that it may measure). `value` is the prediction, None until there is one. With EET_LAB_FAST=1 in the
    environment it answers itself with the first choice, so that a notebook runs without a reader.
    """

    def __init__(
        self,
        question: str,
        choices: Sequence[str] | None = None,
        reveal: Any = "",
        *,
        number: tuple[float, float] | None = None,
        unit: str = "",
    ) -> None:
        if (choices is None) == (number is None):
            raise ValueError("Give either choices=[...] or number=(low, high), and not both.")
        self.value: Any = None
        self.unit = unit
        self._reveal = reveal
        self._waiting: list[Callable[[], None]] = []
        self._is_asked_again = False
        self._thread: threading.Thread | None = None
        if choices is not None:
            self._guess = W.RadioButtons(options=list(choices), value=None, layout={"width": "max-content"})
        elif number is not None:
            low, high = number
            self._guess = W.BoundedFloatText(value=low, min=low, max=high, layout={"width": "110px"})
        self._button = W.Button(description="Reveal", button_style="primary", tooltip="Submit and see the answer")
        self._said = W.HTML()
        self._shown = FigureBox()
        self._button.on_click(lambda _: self._submit())
        ask = W.HTML(f'<div class="eet-question">{escape(question)}</div>')
        look = W.HTML(f"<style>{style('Say', 'Prediction')}</style>")
        answer = W.HBox([self._guess, W.Label(_limits(number, unit)), self._button])
        self.box = W.VBox([look, ask, answer, self._said, self._shown])
        self.box.add_class("eet-prediction")

    def answer(self, value: Any) -> None:
        """Take `value` as the prediction and reveal; the first one counts. Nothing happens without one."""
        if value is None or self.value is not None:
            return
        self.value = value
        self._thread = threading.Thread(target=self._show, name="eet-reveal", daemon=True)
        self._thread.start()

    def _submit(self) -> None:
        """Take what stands in the box. The first one counts, so a reader who has chosen nothing is asked once more."""
        value, number = self._guess.value, isinstance(self._guess, W.BoundedFloatText)
        if value is None:
            self._say("Choose one first.", "eet-warn")
        elif number and value == self._guess.min and not self._is_asked_again:
            self._is_asked_again, stood = True, plain(value)
            self._say(
                f"{stood} stood there from the start: type your guess, or press Reveal again for {stood}.", "eet-warn"
            )
        else:
            self.answer(value)

    def then(self, do: Callable[[], None]) -> None:
        """Call `do` once the prediction is made and what it revealed is shown, on the thread that showed it."""
        self._waiting.append(do)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait until what was being revealed is shown; the prediction."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.value

    def __str__(self) -> str:
        """The prediction in words: "20 ×", "slower"; "none" until there is one."""
        if self.value is None:
            return "none"
        value = plain(self.value) if isinstance(self.value, float) else str(self.value)
        return f"{value} {self.unit}".strip()

    def _show(self) -> None:
        """The only writer of these widgets once the reader has answered."""
        self._button.disabled = self._guess.disabled = True
        self._say(f"Your prediction: <b>{escape(str(self))}</b>")
        try:
            shown = self._reveal(self.value) if callable(self._reveal) else self._reveal
        except Exception as error:  # noqa: BLE001  whatever the lesson's own code raises is shown to the reader
            shown = _failed(error)
        self._shown.show(shown)
        for do in self._waiting:
            do()

    def _say(self, html: str, kind: str = "") -> None:
        self._said.value = f'<div class="eet-say {kind}">{html}</div>'

    def _ipython_display_(self) -> None:
        display(self.box)
        if os.environ.get("EET_LAB_FAST"):
            first = self._guess.options[0] if isinstance(self._guess, W.RadioButtons) else self._guess.min
            self.answer(first)
            self.wait()


def _failed(error: Exception) -> HTML:
    return HTML(theme.stylesheet() + theme.error_card(error))


def _limits(number: tuple[float, float] | None, unit: str) -> str:
    """What stands beside the box, which turns a number beyond its limits into the nearest one and says nothing."""
    between = [f"from {plain(number[0])} to {plain(number[1])}"] if number else []
    return ", ".join([*([unit] if unit else []), *between])


def after(guess: Prediction, made: Callable[[], Shown]) -> Shown:
    """What `made` gives, once the reader has made a prediction; until then a reminder in its place."""
    if guess.value is not None:
        return made()
    place, num_threads = FigureBox(), torch.get_num_threads()
    place.show(*Shown(note("Predict first (above), then look here.", "warn")).outputs())

    def fill() -> None:
        torch.set_num_threads(num_threads)  # each thread has a setting of its own
        try:
            shown = made().outputs()
        except Exception as error:  # noqa: BLE001  shown in its own place, and the parts that wait behind it go on
            shown = [_failed(error)]
        place.show(*shown)

    guess.then(fill)
    return Shown(place)


def measured(guess: Prediction, result: Any) -> Shown:
    """What was measured, which gives the answer away: once the reader has made a prediction."""
    return after(guess, lambda: Shown(result))


def after_prediction(made: Callable[Concatenate[Prediction, P], Shown]) -> Callable[Concatenate[Prediction, P], Shown]:
    """A part of a lesson that shows nothing before the reader has made the prediction that it is given first."""

    @wraps(made)
    def waiting(guess: Prediction, *args: P.args, **kwargs: P.kwargs) -> Shown:
        return after(guess, lambda: made(guess, *args, **kwargs))

    return waiting
