"""Exercises judge whatever they are given: they never raise, and they say what is wrong with it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from eet_lab.models.tokenizer import Tokenizer
from eet_lab.panels.lessons import attend, floor_exercise, holding, left_pad, planner
from eet_lab.panels.lessons.exercise import Exercise

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

    model = replace(tiny, tokenizer=Tokenizer(encode, lambda ids: " ".join(map(str, ids)), 499))
    return {
        "left_pad": left_pad.exercise(model),
        "attend": attend.exercise(),
        "planner": planner.exercise(model),
        "floor": floor_exercise.exercise(),
        "hold": holding.exercise(),
    }


NAMES = ("left_pad", "attend", "planner", "floor", "hold")


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
        if not args:
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
        value = holding.hold(*args)
        return kind([value])[0] if kind is torch.DoubleTensor else kind(value)

    assert exercises["hold"].check(hold).ok


def test_offsets_come_in_any_sequence(exercises: dict[str, Exercise]) -> None:
    for kind in (np.array, torch.tensor, iter, tuple, lambda offsets: [np.int64(each) for each in offsets]):
        assert exercises["planner"].check(lambda lives, kind=kind: kind(planner.plan(lives))).ok, kind


def test_what_is_refused_is_named(exercises: dict[str, Exercise]) -> None:
    def told(name: str, value: Any) -> str:
        return exercises[name].check(lambda *args: value).message

    assert "inf" in told("hold", INF) and "nan" in told("hold", NAN) and "'words' (str)" in told("hold", "words")
    assert "5 (int)" in told("planner", 5) and "None" in told("planner", [None] * 4)
    assert "float64" in told("attend", torch.zeros(8, dtype=torch.float64))
