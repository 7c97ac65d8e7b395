"""Toggles, knobs, prompts and settings, without a kernel: what a click asks for and what the page shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from eet_lab import technique as techniques
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, Technique, knob
from eet_lab.workbench import Workbench
from eet_lab.workbench.choices import MOST_PROMPTS, State
from workbench.driving import PROMPTS, ask, do, enabled, errors, knobs, row, shown, status, turn


def card(bench: Workbench) -> dict[str, Any]:
    return shown(bench, "techniques")["card"]


def prompts(bench: Workbench) -> dict[str, Any]:
    return shown(bench, "inputs")["prompts"]


def test_switching_a_technique_goes_through_the_inbox_and_back(bench: Workbench) -> None:
    assert row(bench, "mask_removal")["on"]
    bench.controller.put({"command": "toggle", "name": "mask_removal", "on": False})
    assert bench.controller.state.is_on("mask_removal"), "the callback itself must not change anything"
    turn(bench)
    assert bench.controller.state.recipe().names == ("pre_padding", "memory_reuse")
    assert not row(bench, "mask_removal")["on"]
    assert shown(bench, "techniques")["recipe"] == "pre-padding + memory reuse"
    assert card(bench)["title"] == "Mask removal", "what is switched is what is explained"


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
    do(bench, ask.toggle("packed_prefill", True))
    for name in ("pre_padding", "mask_removal"):
        for on in (False, True):
            do(bench, ask.toggle(name, on))
            assert row(bench, "packed_prefill")["on"] == on == bench.controller.state.is_on("packed_prefill")
    do(bench, ask.turn("pre_padding", "read", "shortest"))
    assert "Packed prefill cannot be combined with Pre-padding" in row(bench, "packed_prefill")["blocked"], (
        "in words of the page"
    )
    do(bench, ask.turn("pre_padding", "read", "whole"))
    assert row(bench, "packed_prefill")["on"]


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
    assert "NVIDIA GPU" in row(bench, "cuda_graphs")["blocked"]
    assert shown(bench, "bar")["banner"]["text"].startswith("CPU mode: no NVIDIA GPU")


def test_headline_techniques_come_first_and_cards_tell_their_docstring(bench: Workbench) -> None:
    titles = [each["title"] for each in shown(bench, "techniques")["list"]]
    assert titles[:3] == ["Pre-padding", "Mask removal", "Memory reuse"]
    do(bench, ask.select("memory_reuse"))
    pieces = [piece for paragraph in card(bench)["paragraphs"] for piece in paragraph]
    assert any(piece["code"] for piece in pieces)
    assert not any("`" in piece["text"] for piece in pieces)
    assert "class MemoryReuse" in card(bench)["source"]
    assert card(bench)["lesson"]["href"] == "03_memory_reuse.ipynb"


def test_a_cards_lesson_is_found_from_the_working_copy(
    bench: Workbench, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "03_memory_reuse.ipynb").touch()
    (tmp_path / "eet-lab-results").mkdir()
    monkeypatch.chdir(tmp_path / "eet-lab-results")
    do(bench, ask.select("memory_reuse"))
    assert card(bench)["lesson"]["href"] == "../notebooks/03_memory_reuse.ipynb"


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
        turn(bench, 11)
        assert row(bench, "mine")["blocked"] is None
        do(bench, ask.toggle("mine", True))
        assert card(bench)["summary"] == "Do it my way <b>boldly</b>.", "text: the page makes no markup of it"
        assert knobs(bench)["strength"]["kind"] == "number"
        do(bench, ask.toggle("memory_reuse", False))
        assert not bench.controller.state.is_on("mine"), "it goes off with what it requires"
        assert "Memory reuse" in row(bench, "mine")["blocked"]
    finally:
        del techniques._REGISTRY["mine"]
    turn(bench, 11)
    assert "mine" not in [each["name"] for each in shown(bench, "techniques")["list"]]


def test_a_cell_that_runs_again_with_other_knobs_leaves_a_page_that_works(bench: Workbench) -> None:
    def register(**knobs: Any) -> None:
        told = {name: ClassVar[str] for name in ("name", "title")} | {name: int for name in knobs}
        kind = type("Mine", (Technique,), {
            "__doc__": "Mine.", "__annotations__": told, "name": "mine", "title": "Mine",
            "apply": lambda self, parts: replace(parts, weights=(*parts.weights, lambda model: model)), **knobs,
        })  # fmt: skip
        techniques.register(dataclass(frozen=True)(kind))

    register(strength=knob(3, "How much.", low=1, high=9))
    try:
        do(bench, ask.toggle("mine", True), ask.turn("mine", "strength", 7))
        assert knobs(bench)["strength"]["value"] == 7
        do(bench, ask.turn("mine", "strenth", 1))
        assert "no knob 'strenth'. Did you mean 'strength'" in errors(bench)
        register(force=knob(2, "How much.", low=1, high=4))
        do(bench, ask.turn("mine", "force", 4))
        assert errors(bench) == "" and [*knobs(bench)] == ["force"] and knobs(bench)["force"]["value"] == 4
        register(force=knob(1, "How much.", low=1, high=3))
        do(bench, ask.select("mine"))
        assert errors(bench) == "" and knobs(bench)["force"]["value"] == 1, "4 is none of its values now"
    finally:
        del techniques._REGISTRY["mine"]


def test_prompts_are_added_edited_and_removed(bench: Workbench) -> None:
    do(bench, ask.add_prompts([""]), ask.add_prompts(["1 2", "3 4 5"]))
    assert bench.controller.state.prompts == [*PROMPTS, "", "1 2", "3 4 5"]
    do(bench, ask.remove_prompt(0), ask.edit_prompt(2, "9"), ask.edit_prompt(99, "late"), ask.edit_prompt(-1, "no"))
    assert [each["text"] for each in prompts(bench)["rows"]] == [PROMPTS[1], "", "9", "3 4 5"]
    assert [each["tokens"] for each in prompts(bench)["rows"]] == [6, 1, 1, 3], "an empty prompt counts as BOS"
    assert prompts(bench)["summary"] == "4, 1 to 6 tokens, 13 pads to equal length"


def test_only_the_present_prompts_are_kept_as_tokens(bench: Workbench) -> None:
    do(bench, *(ask.edit_prompt(0, "5 " * length) for length in range(1, 6)))
    assert len(bench.controller.choices._tokens) == len(PROMPTS)


def test_more_prompts_than_the_page_can_show_are_refused(bench: Workbench) -> None:
    do(bench, ask.add_prompts(["1"] * MOST_PROMPTS))
    assert bench.controller.state.prompts == PROMPTS
    assert f"at most {MOST_PROMPTS}" in errors(bench)
    do(bench, ask.add_prompts(["1"] * (MOST_PROMPTS - len(PROMPTS))))
    assert len(bench.controller.state.prompts) == MOST_PROMPTS
    do(bench, ask.add_prompts([""]))
    assert len(bench.controller.state.prompts) == MOST_PROMPTS


def test_the_sum_is_checked_against_the_context_while_typing(bench: Workbench) -> None:
    do(bench, ask.edit_prompt(0, " ".join(["7"] * 121)))
    assert prompts(bench)["rows"][0]["over"] and prompts(bench)["kind"] == "bad"
    assert "past the context of 128" in status(bench)
    assert not enabled(bench)["run"]
    do(bench, ask.setting("max_new_tokens", 5000))
    assert "with 5,000 new ones that is 5,121, past the context of 128" in status(bench)
    assert shown(bench, "inputs")["generation"]["summary"].startswith("5,000 new")
    do(bench, ask.setting("max_new_tokens", 8))
    do(bench, ask.edit_prompt(0, " ".join(["7"] * 500)))
    assert "Shorten the prompt." in status(bench), "no number of new tokens would help"
    do(bench, ask.edit_prompt(0, " ".join(["7"] * 120)))
    assert enabled(bench)["run"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_new_tokens", 0, "New tokens is 0"),
        ("max_new_tokens", 2.5, "New tokens is 2.5"),
        ("max_new_tokens", "many", "New tokens is 'many'"),
        ("temperature", -1, "Temperature is -1"),
        ("temperature", "", "Temperature is ''"),
        ("top_p", 2, "Top-p is 2"),
        ("seed", "9" * 24, f"Seed is {'9' * 24},"),
        ("seed", "9" * 5000, "Seed is '999"),
        ("repeats", -1, "Pairs of runs is -1"),
        ("repeats", 1.5, "Pairs of runs is 1.5"),
    ],
)
def test_a_number_that_cannot_be_is_told_with_its_limit(bench: Workbench, name: str, value: Any, words: str) -> None:
    fields = {each["name"]: each["value"] for each in shown(bench, "inputs")["generation"]["fields"]}
    do(bench, ask.setting(name, value))
    assert words in status(bench)
    assert "must be" in status(bench)
    generation = shown(bench, "inputs")["generation"]
    assert {each["name"]: each["wrong"] for each in generation["fields"] if each["wrong"]} == {name: status(bench)}
    assert generation["kind"] == "bad"
    assert not enabled(bench)["run"]
    assert errors(bench) == "", "a field that is being filled in is no error of the page"
    do(bench, ask.setting(name, fields[name]))
    assert enabled(bench)["run"]


def test_a_seed_that_a_float_would_round_stays_as_it_was_typed(bench: Workbench) -> None:
    do(bench, ask.setting("seed", str(2**62 - 1)))
    generation = shown(bench, "inputs")["generation"]
    assert bench.controller.state.generation["seed"] == 2**62 - 1 and enabled(bench)["run"]
    assert {each["name"]: each["value"] for each in generation["fields"]}["seed"] == str(2**62 - 1)
    do(bench, ask.setting("seed", 7.0))
    assert bench.controller.state.generation["seed"] == 7


def test_a_setting_that_does_not_exist_is_told(bench: Workbench) -> None:
    do(bench, ask.setting("temprature", 1))
    assert "Did you mean 'temperature'" in errors(bench)


@pytest.mark.parametrize(
    ("new", "length", "whose"),
    [
        (100_000, 6, ["max_new_tokens"]),
        (100, 40, ["max_new_tokens", "prompt"]),
        (8, 200, ["prompt"]),
        (128, 128, ["max_new_tokens", "prompt"]),
        (8, 120, []),
    ],
)
def test_what_is_past_the_context_marks_what_is_at_fault(
    bench: Workbench, new: int, length: int, whose: list[str]
) -> None:
    do(bench, ask.edit_prompt(0, "7 " * length), ask.setting("max_new_tokens", new))
    generation = shown(bench, "inputs")["generation"]
    wrong = {each["name"]: each["wrong"] for each in generation["fields"] if each["wrong"]}
    over = [each["over"] for each in prompts(bench)["rows"]]
    assert [*wrong, *["prompt"] * over[0]] == whose and not over[1]
    assert [generation["kind"], prompts(bench)["kind"]] == [
        "bad" if each in whose else "plain" for each in ("max_new_tokens", "prompt")
    ]
    assert prompts(bench)["over"] == bool(whose) and set(wrong.values()) <= {status(bench)}
    assert enabled(bench)["run"] == (not whose)


def test_no_prompts_means_nothing_to_run(bench: Workbench) -> None:
    do(bench, ask.remove_prompt(0), ask.remove_prompt(0))
    assert not enabled(bench)["compare"]
    assert "add one" in status(bench)


def test_larger_type_is_a_class_of_the_page(bench: Workbench) -> None:
    do(bench, ask.larger_type(True))
    assert "eet-large" in bench.controller.page.box._dom_classes and shown(bench, "bar")["large"]
    do(bench, ask.larger_type(False))
    assert "eet-large" not in bench.controller.page.box._dom_classes
