"""What the user has chosen, and what follows from it. Only the ui thread calls it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

import traitlets as T

from eet_lab.bench.workloads import DEMO_PROMPTS
from eet_lab.devices import kind_of, present
from eet_lab.engine.settings import Settings
from eet_lab.errors import EETError, PromptError, RecipeError, check_known
from eet_lab.knobs import read_knobs
from eet_lab.labels import short_form
from eet_lab.models import Config, Model
from eet_lab.technique import Recipe, Technique, is_ours, known, obstacle, registry
from eet_lab.words import counted
from eet_lab.workbench import jobs
from eet_lab.workbench.commands import as_knob, as_whole, command
from eet_lab.workbench.engine_thread import Work
from eet_lab.workbench.problems import Problem, misfits, problem_of

DEMO, OTHER, LIVE = "demo", "other", "live"
"""Values of the list of models beside the names of shapes."""
OTHER_SETTINGS = ("stop_at_eos", "repeats")
MOST_RECIPES = 1024
"""That are remembered."""
MOST_PROMPTS = 256
"""Prompts of one page: each has an editor and an output of its own, and a browser is slow with thousands of them."""
DEFAULT_PROMPTS = DEMO_PROMPTS[1::2]


class State(T.HasTraits):
    """The choices of one workbench. `chosen` and `knobs` go by technique name; `generation` is what Settings takes.

    `knobs` holds values that fit together; `typed` what was typed since and does not fit, or not yet.
    """

    model: Any = T.Any("demo")
    device = T.Unicode()
    dtype = T.Unicode("auto")
    prompts = T.List(T.Unicode(), list(DEFAULT_PROMPTS))
    chosen = T.Dict()
    knobs = T.Dict()
    typed = T.Dict()
    generation = T.Dict({"max_new_tokens": 64, "temperature": 0.6, "top_k": 0, "top_p": 1.0, "seed": 0})
    stop_at_eos = T.Bool(False)
    repeats: Any = T.Any(0)

    def __init__(self, **choices: Any) -> None:
        super().__init__(**choices)
        self._unavailable: dict[tuple[type[Technique], str, Config | None], str | None] = {}
        self._recipes: dict[tuple[Technique, ...], Recipe | RecipeError] = {}
        self._config: Config | None = None  # of the model that is loaded
        self._dropped: set[str] = set()  # that went off because they could not stay on

    def choose(self, recipe: Recipe) -> None:
        """Switch exactly these techniques on, with their knobs."""
        self._dropped.clear()
        self.chosen, self.typed = {t.name: True for t in recipe}, {}
        self.knobs = {t.name: {name: getattr(t, name) for name in t.knobs} for t in recipe}

    def show_only(self, recipe: str) -> None:
        """Switch on what a recipe names, as far as it is known here; for looking at, since it need not run here."""
        words = [word.split(":") for word in recipe.split(",")]
        self.chosen = {name: True for name, *_ in words if name in registry()}
        for name, *turns in words:
            with suppress(RecipeError):
                self.knobs = {**self.knobs, name: read_knobs(known(name)(), turns)}

    def toggle(self, name: str, on: bool) -> None:
        """Switch a technique; what needs it goes off with it, and comes back with it."""
        self._dropped.discard(name)
        self.chosen = {**self.chosen, name: on}
        self.settle()

    def move_to(self, device: str) -> None:
        """Take another device; what that cannot do goes off, and what the one before could not do comes back."""
        self.device = device
        self.settle()

    def fit_to(self, config: Config) -> None:
        """Another model is there; what that cannot do goes off, and what the one before could not do comes back."""
        self._config = config
        self.settle()

    def settle(self) -> None:
        """Switch off what cannot be on, and on again what went off so and now can be.

        A technique cannot be on without its device or what it requires, nor where those before it leave it no part.
        """
        wanted = [name for name in registry() if self.is_on(name)]
        wanted += [name for name in registry() if name in self._dropped]
        waiting = [self.technique(name) for name in wanted if not self._reason(registry()[name])]
        kept: list[Technique] = []
        while joins := next((t for t in waiting if self._fit(*kept, t)), None):
            waiting.remove(joins)
            kept.append(joins)
        names = {t.name for t in kept}
        self._dropped = set(wanted) - names
        self.chosen = {**self.chosen, **{name: name in names for name in wanted}}

    @command
    def turn(self, name: str, knob: str, value: Any) -> None:
        """Set a knob; what can no longer be on goes off, and comes back once it can be.

        A value that does not fit is kept as `typed`, until it does or another is. RecipeError for an unknown knob.
        """
        check_known(RecipeError, "knob", knob, known(name)().knobs)
        value = as_knob(getattr(known(name)(), knob), value)
        self.typed = {**self.typed, name: self._typed(name) | {knob: value}}
        waiting = self._typed(name)
        alone = {knob: waiting.pop(knob)}
        if turned := self._turned(name, self._typed(name)):
            waiting = {}  # they fit together
        elif turned := self._turned(name, alone):
            waiting = {each: value for each, value in waiting.items() if turned.matters(each)}
        if turned:
            self.knobs = {**self.knobs, name: {each: getattr(turned, each) for each in turned.knobs}}
            self.typed = {**self.typed, name: waiting}
            self.settle()

    @command
    def edit_prompt(self, index: int, text: str) -> None:
        """Another text for a prompt; one that was removed may still tell of its last key."""
        if 0 <= index < len(self.prompts):
            self.prompts = [*self.prompts[:index], text, *self.prompts[index + 1 :]]

    @command
    def add_prompts(self, lines: list[str]) -> None:
        """More prompts; PromptError where that is more than a page can show."""
        count = len(self.prompts) + len(lines)
        if count > MOST_PROMPTS:
            raise PromptError(
                f"{counted(len(lines), 'prompt')} more would make {count:,}, and this page shows at most "
                f"{MOST_PROMPTS}. Add fewer, or run them in a cell with Engine.generate."
            )
        self.prompts = [*self.prompts, *lines]

    @command
    def remove_prompt(self, index: int) -> None:
        """Leave a prompt out."""
        self.prompts = [text for at, text in enumerate(self.prompts) if at != index]

    @command
    def pick_dtype(self, value: str) -> None:
        """Take another type of numbers."""
        self.dtype = value

    @command
    def setting(self, name: str, value: Any) -> None:
        """Set one setting of a generation, `stop_at_eos` or `repeats`; PromptError where there is no such setting."""
        check_known(PromptError, "setting", name, (*self.generation, *OTHER_SETTINGS))
        value = as_whole(value)
        if name == "repeats":
            self.repeats = value
        elif name == "stop_at_eos":
            self.stop_at_eos = bool(value)
        else:
            self.generation = {**self.generation, name: value}

    def recipe_label(self) -> str:
        """What is switched on, in short."""
        return short_form(",".join(str(self.technique(name)) for name in registry() if self.is_on(name)), self.kind)

    @property
    def kind(self) -> str:
        """The device's: "cpu" or "cuda"."""
        return kind_of(self.device)

    def is_on(self, name: str) -> bool:
        return bool(self.chosen.get(name)) and name in registry()

    def technique(self, name: str) -> Technique:
        """The technique with its knobs as they stand; with its own where a cell that ran again gave it others."""
        return self._turned(name, self._typed(name)) or self._turned(name, {}) or known(name)()

    def field_values(self, name: str) -> dict[str, Any]:
        """What the fields of a technique's knobs hold, right or wrong."""
        technique = self.technique(name)
        return {each: getattr(technique, each) for each in technique.knobs} | self._typed(name)

    def wrong(self, name: str) -> dict[str, str]:
        """Which fields of a technique's knobs hold what does not fit, each with the reason in the page's words."""
        return misfits(known(name), self.field_values(name)) if self._typed(name) else {}

    def _typed(self, name: str) -> dict[str, Any]:
        """What is typed of the knobs that a technique has now."""
        return {each: value for each, value in self.typed.get(name, {}).items() if each in known(name)().knobs}

    def _turned(self, name: str, typed: Mapping[str, Any]) -> Technique | None:
        """The technique with its knobs as they stand and these; None where they do not fit."""
        kind, turned = known(name), {**self.knobs.get(name, {}), **typed}
        with suppress(Exception):  # limits may be narrower now; and whatever another's code raises
            return kind(**{f.name: turned[f.name] for f in fields(kind) if f.name in turned})
        return None

    def blocked(self, name: str) -> str | None:
        """Why a technique cannot be on now, or None: not here, not for this model, lacking another, or in conflict."""
        technique = self.technique(name)
        if reason := self._reason(type(technique)):
            return reason
        if missing := [registry()[other].title for other in technique.requires if not self.is_on(other)]:
            return f"needs {' and '.join(missing)}: switch {'it' if len(missing) == 1 else 'them'} on first"
        others = [self.technique(other) for other in registry() if other != name and self.is_on(other)]
        kept = [t for t in others if name not in t.requires]  # those go, rather than stand in its way
        try:
            self._recipe(*kept, technique)
        except RecipeError as error:
            return _with_titles(str(error))
        return None

    def beyond_device(self, name: str) -> str | None:
        """Why no device of this kind can do it, or None. Of another machine's GPU nothing can be told here."""
        return self._reason(registry()[name]) if self.kind == "cpu" else None

    def recipe(self) -> Recipe:
        """What is switched on; RecipeError where it does not fit together."""
        return self._recipe(*(self.technique(name) for name in registry() if self.is_on(name)))

    def settings(self, model: Model) -> Settings:
        """How to generate; PromptError names a value that cannot be."""
        return Settings(**self.generation, stop=model.config.ends if self.stop_at_eos else ())

    def _recipe(self, *techniques: Technique) -> Recipe:
        """Their recipe; RecipeError where they do not fit together.

        Of ours it is made once, since a page asks with each key. Another's may change with any cell that runs.
        """
        if not all(map(is_ours, techniques)):
            return Recipe(techniques)
        if len(self._recipes) > MOST_RECIPES:
            self._recipes.clear()
        if techniques not in self._recipes:
            try:
                self._recipes[techniques] = Recipe(techniques)
            except RecipeError as error:
                self._recipes[techniques] = error
        found = self._recipes[techniques]
        if isinstance(found, RecipeError):
            raise found.with_traceback(None)
        return found

    def _fit(self, *techniques: Technique) -> bool:
        """Whether they make a recipe."""
        try:
            self._recipe(*techniques)
        except RecipeError:
            return False
        return True

    def _reason(self, technique: type[Technique]) -> str | None:
        """Asking a technique may look for compilers and drivers, so each is asked once a device and model."""
        key = technique, self.device, self._config
        if key not in self._unavailable:
            with present(self.device):
                self._unavailable[key] = obstacle(technique(), self.kind, self._config)
        return self._unavailable[key]


def _with_titles(text: str) -> str:
    """Techniques as the page calls them."""
    return re.sub(rf"\b({'|'.join(registry())})\b", lambda found: registry()[found[1]].title, text)


Wish = tuple[Any, str, str]
"""(model, device, dtype)"""


class Choices:
    """What is chosen of models and techniques, and what follows; `selected` is the technique whose card is open.

    A model, device or type that differs from what was asked for last is loaded next.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.selected = ""
        self.live: Any = None if isinstance(state.model, str) else state.model
        """A model object of the reader's; None where there is none."""
        self._asked: Wish | None = None
        self._there: Wish | None = None
        self.failed: Wish | None = None
        """What was asked for last, if it could not be loaded."""
        self.asking_path = False
        """The reader is yet to name a folder or a hub model."""
        self._tokens: dict[str, list[int]] = {}  # of prompts, as the model that is there encodes them

    @command
    def toggle(self, name: str, on: bool) -> None:
        """Switch a technique, and show its card."""
        self._state.toggle(name, on)
        self.selected = name

    @command
    def select(self, name: str) -> None:
        """Show a technique's card and knobs."""
        self.selected = name

    # The model

    @command
    def pick_model(self, value: str) -> None:
        """A model of the list; `OTHER` asks for a folder or a hub name."""
        if value == OTHER:
            self.asking_path = True
        else:
            self.give_up()
            self._state.model = self.live if value == LIVE else value

    @command
    def type_model(self, value: str) -> None:
        """A folder in Hugging Face format, or a hub name."""
        if value.strip():
            self._state.model, self.asking_path = value.strip(), False

    def give_up(self) -> None:
        """No other model is asked for: neither the one that failed, nor one whose name is yet to come."""
        self.failed, self.asking_path = None, False

    @property
    def failed_name(self) -> str:
        """The name of what could not be loaded; "" for none."""
        model = self.failed[0] if self.failed else ""
        return model if isinstance(model, str) else type(model).__name__

    @command
    def load_again(self) -> None:
        """The same model once more: what was in the way may be gone."""
        if self.failed is not None:
            self._wish = self.failed
        self._asked, self.asking_path = None, False

    @property
    def settled(self) -> bool:
        """What is chosen has been asked for."""
        return self._asked == self._wish

    def load(self) -> Work:
        """The job that loads what is chosen."""
        self._asked = model, device, dtype = self._wish
        self.failed = None
        return partial(jobs.load_model, model, device, None if dtype == "auto" else dtype)

    def loaded(self, model: Model) -> None:
        """What was asked for is there."""
        self._there = self._asked
        self._tokens.clear()
        self._state.fit_to(model.config)

    def back(self) -> bool:
        """What was asked for cannot be had: choose again what is there; whether there is anything."""
        self.failed = self._asked
        if self._there is None:
            return False
        self._asked = self._there
        if self._wish == self.failed:  # else something else was chosen meanwhile, and comes next
            self._wish = self._there
        return True

    @property
    def _wish(self) -> Wish:
        return self._state.model, self._state.device, self._state.dtype

    @_wish.setter
    def _wish(self, wish: Wish) -> None:
        self._state.model, self._state.device, self._state.dtype = wish

    # The prompts

    def tokens(self, model: Model | None) -> tuple[list[list[int]] | None, str | None]:
        """Each prompt's tokens, encoded once for a model; None without one, or with why one cannot be encoded."""
        if model is None:
            return None, None
        try:
            known = self._tokens
            self._tokens = {
                text: known[text] if text in known else jobs.token_ids(model, text) for text in self._state.prompts
            }
        except EETError as error:
            return None, str(error)
        return [self._tokens[prompt] for prompt in self._state.prompts], None

    def problem(self, model: Model | None) -> Problem | None:
        """Why nothing can start with these choices; None when it can."""
        rows, unreadable = self.tokens(model)
        if model is None or rows is None:
            return Problem(unreadable or "No model is loaded yet.")
        return problem_of(self._state, model, rows)
