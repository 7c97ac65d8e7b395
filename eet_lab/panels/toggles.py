"""One card a technique: a switch, one line of what it does, its knobs, and its whole card in a fold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from threading import get_ident
from typing import Any

import ipywidgets as W

from eet_lab.panels import theme
from eet_lab.panels.state import State
from eet_lab.technique import Technique, registry

Put = Callable[..., None]

NUMERICS = {
    "exact": ("exact", "good", "The same numbers, bit by bit."),
    "reordered": ("reordered", "plain", "The same sums in another order: equal up to rounding."),
    "lossy": ("lossy", "warn", "Changes the numbers, within a stated bound."),
}


class Toggles:
    """All cards, in canonical order. Built from the registry alone, so a technique registered in a cell appears."""

    def __init__(self, state: State, put: Put) -> None:
        self._state, self._put = state, put
        self._known: dict[str, type[Technique]] = {}
        self._cards: dict[str, Card] = {}
        self.headline = W.Box(layout={"display": "grid"}).add_class("eet-cards")
        self.more = W.Box(layout={"display": "grid"}).add_class("eet-cards")
        self.box = W.VBox(
            [
                W.HTML('<div class="eet-section">Techniques <span>switch one, compare with the baseline</span></div>'),
                self.headline,
                W.HTML('<div class="eet-section eet-section-minor">Go further</div>'),
                self.more,
            ]
        )

    def update(self) -> None:
        """Show the state; make new cards where the registry has changed."""
        now = dict(registry())
        if now != self._known:
            self._rebuild(now)
        for name, card in self._cards.items():
            card.update(self._state, name)

    def _rebuild(self, techniques: Mapping[str, type[Technique]]) -> None:
        kept = {n: c for n, c in self._cards.items() if techniques.get(n) is self._known.get(n)}
        self._cards = {n: kept.get(n) or Card(technique(), self._put) for n, technique in techniques.items()}
        self._known = dict(techniques)
        self.headline.children = [c.box for n, c in self._cards.items() if techniques[n].headline]
        self.more.children = [c.box for n, c in self._cards.items() if not techniques[n].headline]

    def __getitem__(self, name: str) -> Card:
        return self._cards[name]


class Card:
    """One technique's card."""

    def __init__(self, technique: Technique, put: Put) -> None:
        name = technique.name
        self.switch = W.ToggleButton(description=technique.title, tooltip=technique.summary)
        self.switch.add_class("eet-switch")
        self.switch.observe(self._clicked(partial(put, "toggle", name)), "value")
        self.knobs = {knob: _knob_widget(knob, technique, limits) for knob, limits in technique.knobs.items()}
        for knob, widget in self.knobs.items():
            widget.observe(self._clicked(partial(put, "knob", name, knob)), "value")
        self._why = W.HTML()
        self._updated_by: int | None = None  # the thread that shows the state at present
        self.box = W.VBox(
            [self.switch, W.HTML(_summary(technique)), *self.knobs.values(), self._why, W.HTML(_fold(technique))]
        )
        self.box.add_class("eet-card").add_class(f"eet-technique-{name}")

    def update(self, state: State, name: str) -> None:
        """Show whether it is on, what its knobs say, and why it cannot be on, if so."""
        self._updated_by = get_ident()
        try:
            self._show(state, name)
        finally:
            self._updated_by = None

    def _clicked(self, told: Callable[[Any], None]) -> Callable[[Any], None]:
        """`told` of a value that the user gives; what `update` shows is no wish of the user's."""
        return lambda change: None if get_ident() == self._updated_by else told(change.new)

    def _show(self, state: State, name: str) -> None:
        why, on = state.blocked(name), state.is_on(name)
        self.switch.value = on
        self.switch.disabled = bool(why) and not on
        self._why.value = f'<div class="eet-why">{escape(why)}</div>' if why else ""
        technique = state.technique(name)
        for knob, widget in self.knobs.items():
            widget.value = getattr(technique, knob)
            widget.disabled = bool(why)
        _mark(self.box, "eet-on", on)
        _mark(self.box, "eet-off", bool(why) and not on)


def _summary(technique: Technique) -> str:
    label, kind, tip = NUMERICS[technique.numerics]
    return f'<div class="eet-summary">{_with_code(technique.summary)}</div>{theme.badge(label, kind, tip)}'


def _fold(technique: Technique) -> str:
    paragraphs = technique.card.split("\n\n")[1:]
    if not paragraphs:
        return ""
    text = "".join(f"<p>{_with_code(paragraph)}</p>" for paragraph in paragraphs)
    return f"<details class='eet-fold'><summary>how it works</summary>{text}</details>"


def _with_code(text: str) -> str:
    """Escaped, with what stands in `backticks` as code."""
    return re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(text))


def _knob_widget(name: str, technique: Technique, limits: Mapping[str, Any]) -> W.DOMWidget:
    """The control that suits a knob: a list for choices, a bounded number, a check box, else a text."""
    value = getattr(technique, name)
    common = {"description": name, "tooltip": limits.get("help", ""), "style": {"description_width": "auto"}}
    low, high = limits.get("low"), limits.get("high")
    if limits.get("choices"):
        return W.Dropdown(options=list(limits["choices"]), value=value, **common).add_class("eet-knob")
    if isinstance(value, bool):
        return W.Checkbox(value=value, indent=False, **common).add_class("eet-knob")
    if isinstance(value, (int, float)):
        if low is None or high is None:
            return (W.IntText if isinstance(value, int) else W.FloatText)(value=value, **common).add_class("eet-knob")
        kind = W.BoundedIntText if isinstance(value, int) else W.BoundedFloatText
        return kind(value=value, min=low, max=high, **common).add_class("eet-knob")
    return W.Text(value=str(value), continuous_update=False, **common).add_class("eet-knob")


def _mark(widget: W.DOMWidget, name: str, wanted: bool) -> None:
    if wanted != (name in widget._dom_classes):
        (widget.add_class if wanted else widget.remove_class)(name)
