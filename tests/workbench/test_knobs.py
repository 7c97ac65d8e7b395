"""Knobs: what is typed into a technique's fields, right or wrong, and what the page says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from eet_lab import technique as techniques
from eet_lab.errors import RecipeError
from eet_lab.knobs import knob
from eet_lab.parts import Parts
from eet_lab.technique import Recipe
from eet_lab.techniques.memory_reuse import MemoryReuse
from eet_lab.workbench import Workbench
from eet_lab.workbench.choices import State
from eet_lab.workbench.problems import settled_recipe
from workbench.driving import ask, do, enabled, errors, knobs, row, status


def test_knobs_say_what_they_are_and_only_those_that_matter_are_there(bench: Workbench) -> None:
    do(bench, ask.select("memory_reuse"))
    assert set(knobs(bench)) == {"planner", "kv"}, "no page size without pages, no release without chunks"
    layout = knobs(bench)["kv"]
    assert layout["label"] == "KV layout" and layout["help"]
    assert [option["label"] for option in layout["options"]] == ["one slab", "pages"]
    do(bench, ask.turn("memory_reuse", "kv", "paged"))
    assert knobs(bench)["page"]["unit"] == "columns"
    assert "memory_reuse:kv=paged" in str(bench.controller.state.recipe())
    do(bench, ask.turn("memory_reuse", "planner", "chunked"))
    assert "release" in knobs(bench)
    do(bench, ask.turn("memory_reuse", "planner", "nonsense"))
    assert "Planner is 'nonsense', but it must be one of" in status(bench)


BUDGET = (
    "Budget of a step is 8, but it must be at least Slots, which is 16. Give Budget of a step = 16 or more, or Slots"
)
CONTINUOUS = ("packed_prefill", "continuous_batching")


@pytest.mark.parametrize(
    ("knob", "value", "at_fault", "words"),
    [
        ("budget", 8, ("budget", "rows"), f"{BUDGET} = 8 or less."),
        ("rows", 0, ("rows",), "Slots is 0, but it must be a whole number from 1 to 1024."),
        ("rows", -1, ("rows",), "Slots is -1, but"),
        ("rows", 600, ("budget", "rows"), "Budget of a step is 512, but it must be at least Slots, which is 600."),
        ("rows", "", ("rows",), "Slots is '', but"),
        ("rows", "abc", ("rows",), "Slots is 'abc', but"),
        ("rows", "9" * 24, ("rows",), f"Slots is {'9' * 24}, but"),
        ("rows", 2.5, ("rows",), "Slots is 2.5, but"),
        ("chunk", -7, ("chunk",), "Chunk is -7, but"),
    ],
)
def test_a_knob_keeps_what_does_not_fit_and_says_so(
    bench: Workbench, knob: str, value: Any, at_fault: tuple[str, ...], words: str
) -> None:
    do(bench, *(ask.toggle(name, True) for name in CONTINUOUS))
    before, good = bench.controller.state.recipe(), knobs(bench)[knob]["value"]
    do(bench, ask.turn("continuous_batching", knob, value))
    assert knobs(bench)[knob]["value"] == value, "it stays as it was typed"
    assert {name for name, each in knobs(bench).items() if each["wrong"]} == {*at_fault}
    assert knobs(bench)[knob]["wrong"].startswith(words) and knobs(bench)[knob]["kind"] == "number"
    assert status(bench).startswith(f"Continuous batching: {words}")
    assert row(bench, "continuous_batching")["wrong"] == knobs(bench)[knob]["wrong"]
    assert not any(enabled(bench)[name] for name in ("run", "compare", "ladder"))
    assert bench.controller.state.recipe() == before
    assert errors(bench) == "", "a field that is being filled in is no error of the page"
    with pytest.raises(RecipeError, match="Continuous batching: "):
        settled_recipe(bench.controller.state)
    do(bench, ask.toggle("continuous_batching", False))
    assert enabled(bench)["run"] and row(bench, "continuous_batching")["wrong"] == "", (
        "what is off stands in nobody's way"
    )
    do(bench, ask.toggle("continuous_batching", True), ask.turn("continuous_batching", knob, good))
    assert enabled(bench)["run"] and not any(each["wrong"] for each in knobs(bench).values())
    assert settled_recipe(bench.controller.state) == before


def test_knobs_that_only_fit_together_are_typed_one_after_the_other() -> None:
    state = State(device="cpu")
    state.choose(Recipe.parse("all,continuous_batching:rows=2:budget=2", "cpu"))
    for name, value, words in (
        ("rows", 3, "rows=2:budget=2"),
        ("chunk", 64, "rows=2:chunk=64:budget=2"),
        ("budget", 3, "rows=3:chunk=64:budget=3"),
        ("budget", 1, "rows=3:chunk=64:budget=3"),
        ("rows", 1, "rows=1:chunk=64:budget=1"),
    ):
        state.turn("continuous_batching", name, value)
        assert str(state.technique("continuous_batching")) == f"continuous_batching:{words}"
    assert state.wrong("continuous_batching") == {}


def test_a_wrong_knob_goes_with_what_it_is_for() -> None:
    state = State(device="cpu")
    state.choose(Recipe.parse("memory_reuse:kv=paged"))
    state.turn("memory_reuse", "pages", -1)
    assert [*state.wrong("memory_reuse")] == ["pages"]
    state.turn("memory_reuse", "kv", "static")
    assert state.wrong("memory_reuse") == {} and state.technique("memory_reuse") == MemoryReuse()
    state.turn("memory_reuse", "planner", "wurst")
    state.choose(Recipe.parse("memory_reuse"))
    assert state.wrong("memory_reuse") == {}, "another recipe has its own"


@pytest.mark.usefixtures("forgotten")
def test_a_check_of_anothers_own_may_raise_what_it_likes() -> None:
    """And numbers come as JavaScript has them."""

    @techniques.register
    @dataclass(frozen=True)
    class Even(techniques.Technique):
        """Whatever it does."""

        name: ClassVar[str] = "even"
        title: ClassVar[str] = "Even"
        size: int = knob(16, "How many.")
        scale: float = knob(1.0, "How much.", choices=(0.5, 1.0, 2.0))
        text: str = knob("", "What.")

        def __post_init__(self) -> None:
            if self.size % 2:
                raise ValueError("size must be even")

        def apply(self, parts: Parts) -> Parts:
            return replace(parts, weights=(*parts.weights, made))

    made: Any = abs
    state = State(device="cpu")
    state.toggle("even", True)
    state.turn("even", "size", 7)
    assert state.wrong("even")["size"] == "size must be even" and state.technique("even") == Even()
    for name, value in (("size", 8), ("scale", 2), ("text", "1" * 17)):
        state.turn("even", name, value)
    assert state.technique("even") == Even(8, 2.0, "1" * 17) and state.wrong("even") == {}
    assert state.recipe().parts.weights[-1] is abs
    made = max
    assert state.recipe().parts.weights[-1] is max, "what a cell has replaced since"


def test_every_knob_has_a_label_and_help() -> None:
    for each in techniques.registry().values():
        for name, limits in each().knobs.items():
            assert limits["label"] and limits["help"].endswith("."), (each.name, name)
            assert set(limits["words"]) <= set(limits["choices"])
            for other, values in limits["when"].items():
                assert set(values) <= set(each().knobs[other]["choices"])
