"""A prediction's button: what is taken as the reader's guess, and what is asked for again."""

from __future__ import annotations

import ipywidgets as W

from eet_lab.lessons import Prediction


def pressed(guess: Prediction) -> str:
    """What the reader is told after a press of Reveal."""
    button = next(row for row in guess.box.children if isinstance(row, W.HBox)).children[2]
    button.click()
    guess.wait(10)
    return next(each.value for each in guess.box.children[1:] if isinstance(each, W.HTML) and "eet-say" in each.value)


def test_a_press_of_reveal_without_a_guess_takes_none():
    """The first guess counts, and cannot be changed."""
    number = Prediction("?", number=(1, 1000), unit="times sooner")
    assert "1 stood there from the start" in pressed(number) and number.value is None
    assert "<b>1 times sooner</b>" in pressed(number) and number.value == 1, "a reader may mean it"
    typed = Prediction("?", number=(1, 1000))
    next(row for row in typed.box.children if isinstance(row, W.HBox)).children[0].value = 30
    assert "<b>30</b>" in pressed(typed)
    chosen = Prediction("?", choices=["slower", "faster"])
    assert "Choose one first." in pressed(chosen) and chosen.value is None
