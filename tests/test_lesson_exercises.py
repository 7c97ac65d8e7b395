"""Exercises judge whatever they are given: they never raise, and they say what is wrong with it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from eet_lab.lessons import batching_exercises as batching
from eet_lab.lessons import mask_removal, pre_padding, start
from eet_lab.lessons import memory_exercises as memory
from eet_lab.lessons import training_exercises as training
from eet_lab.lessons.exercise import Exercise, formula
from eet_lab.models.tokenizer import Tokenizer
from eet_lab.parts import Parts
from eet_lab.parts.kv_cache import StaticKV

INF, NAN = float("inf"), float("nan")


class Odd:
    """Neither shown nor compared."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


def generator(*args: Any) -> Any:
    yield 0
    raise KeyError("half-way")


def leaves(*args: Any) -> None:
    raise SystemExit(1)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def fails(*args: Any) -> None:
    raise Unspeakable


NONSENSE = (INF, -INF, NAN, 5, -5, 10**400, 1e300, "words", b"", [], {}, {1, 2}, object(), Odd(), [Odd()], (1, 2), len)
NONSENSE += (torch.zeros(3), torch.tensor(2.5), np.zeros((2, 2)), [[1], [2]], ([[1]], [[1]]), [None], [NAN] * 4, True)
NOT_FUNCTIONS = (5, None, ..., "hold", [], torch.zeros(2))


@pytest.fixture(scope="module")
def exercises(tiny: Any) -> dict[str, Exercise]:
    def encode(text: str) -> list[int]:
        return [1 + sum(word.encode()) % 480 for word in text.split()]

    model = replace(tiny, tokenizer=Tokenizer(encode, lambda ids, **options: " ".join(map(str, ids)), 499))
    return {
        "left_pad": pre_padding.padding(model),
        "attend": mask_removal.attention,
        "planner": memory.planning(model),
        "hold": memory.holding,
        "split": batching.sharing,
        "recipe": start.recipe_words,
        "technique": start.own_technique,
        **FORMULAS,
    }


FORMULAS = {
    "steps": pre_padding.count_steps,
    "pads": pre_padding.share_of_pads,
    "scores": mask_removal.count_scores,
    "cache": memory.size_of_cache,
    "copies": memory.count_copies,
    "growths": memory.count_growths,
    "floor": batching.floor,
    "launches": batching.launches,
    "passes": batching.count_passes,
    "batches": batching.best_batches,
    "queue": batching.count_pads,
    "logits": training.logits_memory,
    "update": training.update,
}
"""Exercises whose answer is a number or two."""

NAMES = ("left_pad", "attend", "planner", "hold", "split", "recipe", "technique", *FORMULAS)


@pytest.mark.parametrize("name", NAMES)
def test_nonsense_is_told_and_never_raised(exercises: dict[str, Exercise], name: str) -> None:
    for value in NONSENSE:
        verdict = exercises[name].check(lambda *args, value=value: value)
        assert verdict.ok is False and len(verdict.message) < 400, verdict.message
    for function in (generator, leaves, fails, functools.partial(generator, 1), lambda: 1, Odd):
        assert exercises[name].check(function).ok is False


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_function_is_refused(exercises: dict[str, Exercise], name: str) -> None:
    for thing in NOT_FUNCTIONS:
        verdict = exercises[name].check(thing)  # type: ignore[arg-type]
        assert verdict.ok is False and "the function itself" in verdict.message
    assert "int" in exercises[name].check(5).message  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_a_forgotten_branch_is_no_stub(
    exercises: dict[str, Exercise], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stub(*args: Any) -> Any:
        """What the notebook has."""
        ...

    def forgot(*args: Any) -> Any:
        if len(args) > 9:
            return args

    monkeypatch.delenv("EET_LAB_FAST", raising=False)
    untouched, forgotten = exercises[name].check(stub), exercises[name].check(forgot)
    assert untouched.ok is None and "replace the ..." in untouched.message
    assert forgotten.ok is False and "returned None" in forgotten.message and "return" in forgotten.message
    assert "..." not in forgotten.message.replace("...)", "").replace("...,", "")


def test_a_function_that_answers_sometimes_is_told_when_it_did_not(exercises: dict[str, Exercise]) -> None:
    def hold(needed: int, held: int, before: Any) -> Any:
        if needed > held:
            return needed

    told = exercises["hold"].check(hold).message
    assert "returned None" in told and "needed=" in told and "held=" in told


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, np.float64, torch.DoubleTensor, float])
def test_numbers_of_every_kind_are_bytes(exercises: dict[str, Exercise], kind: Any) -> None:
    def hold(*args: Any) -> Any:
        value = memory.hold(*args)
        return kind([value])[0] if kind is torch.DoubleTensor else kind(value)

    assert exercises["hold"].check(hold).ok


def test_offsets_come_in_any_sequence(exercises: dict[str, Exercise]) -> None:
    for kind in (np.array, torch.tensor, iter, tuple, lambda offsets: [np.int64(each) for each in offsets]):
        assert exercises["planner"].check(lambda lives, kind=kind: kind(memory.plan(lives))).ok, kind


def test_what_is_refused_is_named(exercises: dict[str, Exercise]) -> None:
    def told(name: str, value: Any) -> str:
        return exercises[name].check(lambda *args: value).message

    assert "inf" in told("hold", INF) and "nan" in told("hold", NAN) and "'words' (str)" in told("hold", "words")
    assert "5 (int)" in told("planner", 5) and "None" in told("planner", [None] * 4)
    assert "float64" in told("attend", torch.zeros(8, dtype=torch.float64))


# --- answers that are numbers: each slip has words of its own


@pytest.mark.parametrize("name", FORMULAS)
def test_the_solution_is_right_and_shown_with_its_cases(exercises: dict[str, Exercise], name: str) -> None:
    verdict = exercises[name].check(exercises[name].answer)
    assert verdict.ok, verdict.message
    [shown] = verdict.shown
    assert shown.data.count("<tr>") >= 4


SLIPS = [
    (name, words) for name, exercise in {"split": batching.sharing, **FORMULAS}.items() for words in exercise.slips
]


@pytest.mark.parametrize(("name", "words"), SLIPS)
def test_each_slip_is_told_in_its_own_words(exercises: dict[str, Exercise], name: str, words: str) -> None:
    exercise = exercises[name]

    def slipped(*args: Any) -> Any:
        wrong, right = exercise.slips[words](*args), exercise.answer(*args)
        if isinstance(wrong, tuple):
            return tuple(mine if mine is not None else ours for mine, ours in zip(wrong, right, strict=True))
        return wrong

    verdict = exercise.check(slipped)
    assert verdict.ok is False and words in verdict.message, verdict.message


@pytest.mark.parametrize("name", FORMULAS)
def test_any_other_wrong_answer_is_told_what_to_do(exercises: dict[str, Exercise], name: str) -> None:
    huge = 10**400  # no float holds it
    for value in (123_457, (123_457, 123_457), huge, (huge, -huge)):
        verdict = exercises[name].check(lambda *args, value=value: value)
        assert verdict.ok is False and not any(words in verdict.message for words in exercises[name].slips)
        assert len(verdict.message.partition("it should be")[2]) > 40 or "; you returned" in verdict.message


def test_whole_numbers_must_be_hit_and_others_nearly() -> None:
    exercise = formula(lambda x: (10**9, x / 3), {"one": (1.0,)}, {}, "yes", names=("a", "b"), otherwise="no")
    assert exercise.check(lambda x: (10**9, 0.33333333)).ok and exercise.check(lambda x: (1e9, 1 / 3)).ok
    assert "you return 1,000,000,001 for a; it should be" in exercise.check(lambda x: (10**9 + 1, 1 / 3)).message
    assert " for b; it should be" in exercise.check(lambda x: (10**9, 0.333)).message
    assert "2 numbers, a and b" in exercise.check(lambda x: (1, 2, 3)).message


def test_a_recipe_is_judged_by_what_it_says(exercises: dict[str, Exercise]) -> None:
    def told(text: Any) -> str:
        return exercises["recipe"].check(lambda: text).message

    assert exercises["recipe"].check(lambda: " memory_reuse:page=32:kv=paged , pre_padding").ok
    assert "pre_padding is not in it" in told("memory_reuse:kv=paged:page=32")
    assert "mask_removal should not" in told("pre_padding,mask_removal,memory_reuse:kv=paged:page=32")
    assert "kv of memory_reuse" in told("pre_padding,memory_reuse")
    assert "page of memory_reuse" in told("pre_padding,memory_reuse:kv=paged")
    assert "no recipe" in told("pre_pading") and "as text" in told(["pre_padding"])


def test_a_technique_is_judged_by_what_it_replaces(exercises: dict[str, Exercise]) -> None:
    def told(apply: Any) -> str:
        return exercises["technique"].check(apply).message

    assert exercises["technique"].check(start.static_cache).ok
    assert "schedule, texts changed" in told(lambda parts: replace(Parts(), kv_cache=StaticKV))
    assert "GrowingKV" in told(lambda parts: parts)
    assert "return the new parts" in told(lambda parts: StaticKV)

    def in_place(parts: Any) -> Any:
        parts.kv_cache = StaticKV
        return parts

    assert "FrozenInstanceError" in told(in_place)
