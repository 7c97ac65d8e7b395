"""Lessons: predictions come first, exercises tell what is wrong, and what is counted is right."""

from __future__ import annotations

import ipywidgets as W
import pytest
import torch

from eet_lab.memory import Plan
from eet_lab.panels.lessons import (
    Prediction,
    Shown,
    attend,
    left_pad,
    mask_removal,
    memory_reuse,
    planner,
    source,
    start,
)
from eet_lab.panels.lessons.exercise import Exercise, ask
from eet_lab.panels.lessons.show import after, table
from eet_lab.technique import Recipe
from eet_lab.techniques import PrePadding


@pytest.fixture
def words(tiny):
    """The tiny model with a tokenizer of sorts: each word is a token."""
    from dataclasses import replace

    from eet_lab.models.tokenizer import Tokenizer

    def encode(text):
        return [1 + sum(word.encode()) % 480 for word in text.split()]

    return replace(tiny, tokenizer=Tokenizer(encode, lambda ids: " ".join(map(str, ids)), 499))


def hint(exercise: Exercise, answer) -> str:
    verdict = exercise.check(answer)
    assert verdict.ok is False
    with pytest.raises(AssertionError):
        verdict.require()
    return verdict.message


@pytest.mark.parametrize(("unit", "said"), [("ms", "ms, from 0 to 1,000"), ("", "from 0 to 1,000")])
def test_a_number_is_asked_for_with_its_limits(unit, said):
    """What lies outside becomes the nearest limit: the reader should see which one."""
    guess = Prediction("?", number=(0, 1000), unit=unit)
    box, words, _ = next(row for row in guess.box.children if isinstance(row, W.HBox)).children
    assert words.value == said
    for typed, taken in ((-5, 0), (1e9, 1000), (2.5, 2.5)):
        box.value = typed
        assert box.value == taken
    chosen = Prediction("?", choices=["slower", "faster"])
    assert next(row for row in chosen.box.children if isinstance(row, W.HBox)).children[1].value == ""


def test_nothing_is_shown_before_the_prediction():
    guess, shown = Prediction("?", number=(0, 10), unit="MiB", reveal="so it is"), []

    def show():
        shown.append(guess.value)
        return Shown("42")

    pending = after(guess, show)
    [place] = pending.things
    assert not shown and "Predict first" in str(place.outputs)
    guess.answer(7.0)
    guess.wait(10)
    assert shown == [7.0] and "42" in str(place.outputs) and str(guess) == "7 MiB"
    assert after(guess, show).things == ("42",)


def test_an_unanswered_exercise_is_neither_right_nor_wrong(words, monkeypatch):
    def stub(*args): ...

    monkeypatch.delenv("EET_LAB_FAST", raising=False)
    for exercise in (left_pad.exercise(words), attend.exercise(), planner.exercise(words)):
        assert exercise.check(stub).ok is None
    monkeypatch.setenv("EET_LAB_FAST", "1")
    for exercise in (left_pad.exercise(words), attend.exercise(), planner.exercise(words)):
        assert exercise.check(stub).ok is True


def test_a_failing_solution_fails_a_test_run(monkeypatch):
    def judge(answer):
        return ask(answer).no_such_thing, ()

    monkeypatch.setenv("EET_LAB_FAST", "1")
    with pytest.raises(AttributeError):
        Exercise(judge, lambda: 1).check(lambda: None)


def test_left_pad_hints(words):
    exercise = left_pad.exercise(words)

    def padded(prompts, on_left=True, shifted=True):
        longest = max(map(len, prompts))
        pads = [[0] * (longest - len(p)) for p in prompts]
        tokens = [pad + p if on_left else p + pad for pad, p in zip(pads, prompts, strict=True)]
        places = [[max(c - len(pad) * shifted, 0) for c in range(longest)] for pad in pads]
        return tokens, places

    assert exercise.check(padded).ok
    assert "on the left" in hint(exercise, lambda p: padded(p, on_left=False))
    assert "own first token" in hint(exercise, lambda p: padded(p, shifted=False))
    assert "two things" in hint(exercise, lambda p: padded(p)[0])
    assert "both must be 3" in hint(exercise, lambda p: (padded(p)[0], p[::-1]))
    assert "ZeroDivisionError" in hint(exercise, lambda p: 1 / 0)


def test_attend_hints():
    exercise = attend.exercise()

    def over(first, last, scale=True):
        def answer(q, keys, values, num_pad, column):
            seen = slice(num_pad * first, column + last)
            scores = keys[seen] @ q / (len(q) ** 0.5 if scale else 1)
            return scores.softmax(0) @ values[seen]

        return answer

    def hiding(q, keys, values, num_pad, column):
        at = torch.arange(len(keys))
        scores = (keys @ q / len(q) ** 0.5).masked_fill((at < num_pad) | (at > column), -torch.inf)
        return scores.softmax(0) @ values

    assert exercise.check(over(1, 1)).ok
    assert "sees the pads" in hint(exercise, over(0, 1))
    assert "future" in hint(exercise, over(1, 99))
    assert "own column" in hint(exercise, over(1, 0))
    assert "√D" in hint(exercise, over(1, 1, scale=False))
    assert "slice" in hint(exercise, hiding)
    assert "[8]" in hint(exercise, lambda *args: torch.zeros(3))


def test_planner_hints(words):
    exercise = planner.exercise(words)

    def climbing(lifetimes):
        ends = [0]
        for life in lifetimes:
            ends.append(ends[-1] + life.num_bytes)
        return ends[:-1]

    assert exercise.check(planner.plan).ok
    assert "alive at once" in hint(exercise, climbing)
    assert "a (requests 0 to 1" in hint(exercise, lambda lives: [0] * len(lives))
    assert "offsets" in hint(exercise, lambda lives: [0])
    assert "multiple of 256" in hint(exercise, lambda lives: [1.5] * len(lives))


def test_the_learners_planner_is_no_worse_than_first_fit(words):
    lifetimes = planner.trace(words).lifetimes
    mine = Plan(lifetimes, tuple(planner.plan(lifetimes)))
    assert mine.lower_bound_bytes <= mine.footprint_bytes <= planner.ROOMY * mine.lower_bound_bytes


def test_what_is_counted(words):
    seen, whole = mask_removal.scores(words)
    mask = torch.stack([_visible(len(row), max(_lengths(words))) for row in _rows(words)])
    assert (seen, whole) == (int(mask.sum()), mask.numel())


def test_kv_copies_agree_with_a_cache_that_grows(words, monkeypatch):
    from eet_lab.engine.engine import Engine
    from eet_lab.engine.kv_cache import GrowingKV
    from eet_lab.engine.settings import Settings

    monkeypatch.setattr(memory_reuse, "NEW_TOKENS", 5)
    copied = []

    class Counting(GrowingKV):
        def room(self, layer, step):
            copied.append(sum(part[layer].numel() * part[layer].element_size() for part in (self.keys, self.values)))
            return super().room(layer, step)

    from dataclasses import replace

    parts = replace(Recipe.parse(planner.BASE).parts, kv_cache=Counting)
    engine = Engine(words.decoder, parts)
    engine.generate(_rows(words), Settings(max_new_tokens=5))
    assert (sum(copied), engine.kv_bytes) == memory_reuse.kv_copies(words)


def test_poison_reaches_only_who_reads_it(words):
    [shown, _] = mask_removal.poisoned(words).things
    assert shown.data.count("destroyed") == len(_rows(words)) - 1  # the longest row has no pads
    assert shown.data.count("as before") == len(_rows(words)) + 1


def test_parts_table_marks_what_changed():
    [shown] = start.parts_table("pre_padding", "memory_reuse").things
    assert "★ right_aligned" in shown.data and "★ StaticKV" in shown.data and shown.data.count("★") == 3


def test_tables_escape_and_align():
    html = table(["a", "b"], [["<x>", "1"], ["y", "-2.5 ms"]]).data
    assert "<x>" not in html and html.count("eet-number") == 3 + 1 * html.count(".eet-number")


def test_source_shows_methods_without_their_indent():
    assert source(PrePadding.apply).data.startswith("def apply(")
    assert source("pre_padding").data == source(PrePadding()).data


def _rows(model):
    from eet_lab.panels.lessons.batch import rows

    return rows(model)


def _lengths(model):
    return [len(row) for row in _rows(model)]


def _visible(count, longest):
    at = torch.arange(longest)
    real = at >= longest - count
    return real[:, None] & real & (at[:, None] >= at)
