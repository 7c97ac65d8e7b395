"""Toggles, knobs, prompts and settings, without a kernel: what a click asks for and what the page shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from eet_lab import technique as techniques
from eet_lab.panels import Workbench
from eet_lab.panels.choices import MOST_PROMPTS
from eet_lab.panels.state import State
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, Technique, knob
from panels.driving import PROMPTS, do


def test_switching_a_technique_goes_through_the_inbox_and_back(bench: Workbench) -> None:
    card = bench.desk.toggles["mask_removal"]
    assert card.switch.value
    card.switch.value = False
    assert bench.desk.state.is_on("mask_removal"), "the callback itself must not change anything"
    bench.desk.tick()
    assert bench.desk.state.recipe().names == ("pre_padding", "memory_reuse")
    assert "eet-on" not in card.box._dom_classes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device "cuda" that can do everything, beside a CPU that can do what it can."""
    for each in techniques.registry().values():
        can = each.unavailable
        monkeypatch.setattr(
            each, "unavailable", lambda self, device, can=can: can(self, device) if device == "cpu" else None
        )


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_goes_off_with_another_comes_back_with_it(device: str) -> None:
    state = State(device=device)
    state.choose(Recipe.parse("all,int8_weights", device))
    before = state.recipe()
    for name in before.names:
        state.toggle(name, False)
        assert state.recipe() == before.without(name)[0], "only what needs it goes off with it"
        state.toggle(name, True)
        assert state.recipe() == before, name


def test_on_the_page_it_comes_back_too(bench: Workbench) -> None:
    """What a card shows is no click."""
    cards = bench.desk.toggles
    if not cards["packed_prefill"].switch.value:
        cards["packed_prefill"].switch.value = True
    for name in ("pre_padding", "mask_removal"):
        for on in (False, True):
            cards[name].switch.value = on
            for _ in range(3):
                bench.desk.tick()
            assert cards["packed_prefill"].switch.value == on == bench.desk.state.is_on("packed_prefill")
    cards["pre_padding"].knobs["read"].value = "shortest"
    bench.desk.tick()
    assert "Packed prefill leaves the pads out" in cards["packed_prefill"]._why.value, "in words of the page"
    cards["pre_padding"].knobs["read"].value = "whole"
    bench.desk.tick()
    assert cards["packed_prefill"].switch.value


def test_it_waits_for_all_that_it_needs_and_stays_off_where_someone_wants_that() -> None:
    state = State(device="cpu")
    state.choose(Recipe.parse("all", "cpu"))
    everything = state.recipe().names
    for name in ("pre_padding", "mask_removal"):
        state.toggle(name, False)
    state.toggle("pre_padding", True)
    assert "packed_prefill" not in state.recipe().names, "it needs the other one too"
    state.toggle("mask_removal", True)
    assert state.recipe().names == everything
    state.toggle("packed_prefill", False)
    state.toggle("pre_padding", False)
    state.toggle("pre_padding", True)
    assert "packed_prefill" not in state.recipe().names


@pytest.mark.usefixtures("gpu")
def test_what_a_device_or_a_knob_keeps_off_comes_back() -> None:
    state = State(device="cuda")
    state.choose(Recipe.parse("all", "cuda"))
    before = state.recipe()
    state.move_to("cpu")
    assert state.recipe() == Recipe.parse("all", "cpu")
    state.move_to("cuda")
    assert state.recipe() == before
    state.turn("pre_padding", "read", "shortest")
    assert set(before.names) - set(state.recipe().names) == {"packed_prefill"}
    state.turn("pre_padding", "read", "whole")
    assert state.recipe() == before


def test_what_cannot_run_here_is_greyed_with_its_reason(bench: Workbench) -> None:
    card = bench.desk.toggles["cuda_graphs"]
    assert card.switch.disabled
    assert "NVIDIA GPU" in card._why.value
    assert bench.desk.mode.value.count("CPU mode: no NVIDIA GPU") == 1


def test_headline_techniques_come_first_and_cards_tell_their_docstring(bench: Workbench) -> None:
    titles = [box.children[0].description for box in bench.desk.toggles.headline.children]
    assert titles == ["Pre-padding", "Mask removal", "Memory reuse"]
    assert "EET" in bench.desk.toggles["pre_padding"].box.children[-1].value
    folds = [card.box.children[-1].value for card in bench.desk.toggles._cards.values()]
    assert any("<code>" in fold for fold in folds)
    assert not any("`" in fold for fold in folds)


def test_a_knob_turns_the_recipe(bench: Workbench) -> None:
    bench.desk.toggles["memory_reuse"].knobs["planner"].value = "first_fit"
    bench.desk.tick()
    assert "memory_reuse:planner=first_fit" in str(bench.desk.state.recipe())


def test_a_technique_registered_in_a_cell_appears_and_what_it_requires_is_told(bench: Workbench) -> None:
    @dataclass(frozen=True)
    class Mine(Technique):
        """Do it my way <b>boldly</b>.

        And more of it.
        """

        name: ClassVar[str] = "mine"
        title: ClassVar[str] = "Mine"
        requires: ClassVar[tuple[str, ...]] = ("memory_reuse",)
        strength: int = knob(3, "How much.", low=1, high=9)

        def apply(self, parts: Parts) -> Parts:
            return replace(parts, weights=(*parts.weights, lambda model: model))

    techniques.register(Mine)
    try:
        for _ in range(11):
            bench.desk.tick()
        card = bench.desk.toggles["mine"]
        assert not card.switch.disabled
        assert "&lt;b&gt;" in card.box.children[1].value, "the card is text, not markup"
        card.switch.value = True
        bench.desk.toggles["memory_reuse"].switch.value = False
        bench.desk.tick()
        assert not bench.desk.state.is_on("mine"), "it goes off with what it requires"
        assert card.switch.disabled
        assert "Memory reuse" in card._why.value
    finally:
        del techniques._REGISTRY["mine"]
    for _ in range(11):
        bench.desk.tick()
    assert "mine" not in bench.desk.toggles._cards


def test_prompts_are_added_pasted_and_removed(bench: Workbench) -> None:
    editor = bench.desk.prompts
    editor.add.click()
    bench.desk.tick()
    assert bench.desk.state.prompts == [*PROMPTS, ""]
    editor.pasted.value = "1 2\n\n  \n3 4 5\n"
    editor.take.click()
    bench.desk.tick()
    assert bench.desk.state.prompts == [*PROMPTS, "", "1 2", "3 4 5"]
    assert editor.pasted.value == ""
    editor.rows[0].remove.click()
    bench.desk.tick()
    assert bench.desk.state.prompts == [PROMPTS[1], "", "1 2", "3 4 5"]
    assert [row.text.value for row in editor.rows] == bench.desk.state.prompts
    assert ">1<" in editor.rows[1].count.value, "an empty prompt counts as BOS"


def test_more_prompts_than_the_page_can_show_are_refused_and_stay_where_they_were_pasted(bench: Workbench) -> None:
    editor = bench.desk.prompts
    editor.pasted.value = "1\n" * MOST_PROMPTS
    editor.take.click()
    bench.desk.tick()
    assert bench.desk.state.prompts == PROMPTS
    assert f"at most {MOST_PROMPTS}" in bench.desk.actions.status.value
    assert editor.pasted.value == "1\n" * MOST_PROMPTS, "nothing is lost"
    editor.pasted.value = "1\n" * (MOST_PROMPTS - len(PROMPTS))
    editor.take.click()
    bench.desk.tick()
    assert len(bench.desk.state.prompts) == MOST_PROMPTS
    editor.add.click()
    bench.desk.tick()
    assert len(bench.desk.state.prompts) == MOST_PROMPTS


def test_the_sum_is_checked_against_the_context_while_typing(bench: Workbench) -> None:
    row = bench.desk.prompts.rows[0]
    row.text.value = " ".join(["7"] * 121)
    bench.desk.tick()
    assert "eet-over" in row.count.value
    assert "past the context of 128" in bench.desk.actions.status.value
    assert bench.desk.actions.run.disabled
    row.text.value = " ".join(["7"] * 500)
    bench.desk.tick()
    assert "Shorten the prompt." in bench.desk.actions.status.value, "no number of new tokens would help"
    row.text.value = " ".join(["7"] * 120)
    bench.desk.tick()
    assert not bench.desk.actions.run.disabled


@pytest.mark.parametrize(
    ("index", "value", "words"),
    [
        (0, 0, "max_new_tokens is 0"),
        (0, 2.5, "max_new_tokens is 2.5"),
        (1, -1, "temperature is -1"),
        (3, 2, "top_p is 2"),
        (5, 0, "repeats is 0"),
        (5, 1.5, "repeats is 1.5"),
    ],
)
def test_a_number_that_cannot_be_is_told_with_its_limit(bench: Workbench, index: int, value: float, words: str) -> None:
    field = bench.desk.generating.box.children[1].children[index].children[1]
    before, field.value = field.value, value
    bench.desk.tick()
    assert words in bench.desk.actions.status.value
    assert "must be" in bench.desk.actions.status.value
    assert bench.desk.actions.run.disabled
    field.value = before
    bench.desk.tick()
    assert not bench.desk.actions.run.disabled


def test_no_prompts_means_nothing_to_run(bench: Workbench) -> None:
    do(bench, "remove_prompt", 0)
    do(bench, "remove_prompt", 0)
    assert bench.desk.actions.compare.disabled
    assert "add one" in bench.desk.actions.status.value
