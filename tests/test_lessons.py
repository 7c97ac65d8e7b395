"""Lessons: predictions come first, exercises tell what is wrong, and what is counted is right."""

from __future__ import annotations

import dataclasses
import json

import ipywidgets as W
import pytest
import torch

from eet_lab.bench import Change
from eet_lab.bench.measured import tokens_by_step
from eet_lab.figures import batch_steps, theme
from eet_lab.figures.outputs import PLOTLY, rendered
from eet_lab.lessons import (
    Prediction,
    Shown,
    mask_removal,
    memory_exercises,
    memory_reuse,
    pre_padding,
    recorded,
)
from eet_lab.lessons.exercise import Exercise, ask
from eet_lab.lessons.prediction import after, measured
from eet_lab.memory import Plan
from eet_lab.technique import Recipe


@pytest.fixture
def words(tiny):
    """The tiny model with a tokenizer of sorts: each word is a token."""
    from dataclasses import replace

    from eet_lab.models.tokenizer import Tokenizer

    def encode(text):
        return [1 + sum(word.encode()) % 480 for word in text.split()]

    return replace(tiny, tokenizer=Tokenizer(encode, lambda ids, **options: " ".join(map(str, ids)), 499))


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
    [place] = measured(Prediction("?", number=(0, 10)), "9 x sooner").things
    assert "Predict first" in str(place.outputs) and "sooner" not in str(place.outputs)


def test_a_part_that_fails_says_so_and_keeps_no_other_from_its_reader():
    guess = Prediction("?", number=(0, 10))
    [failing] = after(guess, lambda: Shown(1 // 0)).things
    [behind] = after(guess, lambda: Shown("42")).things
    guess.answer(7.0)
    guess.wait(10)
    assert "ZeroDivisionError" in str(failing.outputs) and "Predict first" not in str(failing.outputs)
    assert "42" in str(behind.outputs)


def test_an_unanswered_exercise_is_neither_right_nor_wrong(words, monkeypatch):
    def stub(*args): ...

    monkeypatch.delenv("EET_LAB_FAST", raising=False)
    for exercise in (pre_padding.padding(words), mask_removal.attention, memory_exercises.planning(words)):
        assert exercise.check(stub).ok is None
    monkeypatch.setenv("EET_LAB_FAST", "1")
    for exercise in (pre_padding.padding(words), mask_removal.attention, memory_exercises.planning(words)):
        assert exercise.check(stub).ok is True


def test_a_failing_solution_fails_a_test_run(monkeypatch):
    def judge(answer):
        return ask(answer).no_such_thing, ()

    monkeypatch.setenv("EET_LAB_FAST", "1")
    with pytest.raises(AttributeError):
        Exercise(judge, lambda: 1).check(lambda: None)


def test_left_pad_hints(words):
    exercise = pre_padding.padding(words)

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
    exercise = mask_removal.attention

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
    exercise = memory_exercises.planning(words)

    def climbing(lifetimes):
        ends = [0]
        for life in lifetimes:
            ends.append(ends[-1] + life.num_bytes)
        return ends[:-1]

    assert exercise.check(memory_exercises.plan).ok
    assert "alive at once" in hint(exercise, climbing)
    assert "a (requests 0 to 1" in hint(exercise, lambda lives: [0] * len(lives))
    assert "offsets" in hint(exercise, lambda lives: [0])
    assert "multiple of 256" in hint(exercise, lambda lives: [1.5] * len(lives))


def test_the_learners_planner_is_no_worse_than_first_fit(words):
    lifetimes = memory_reuse.trace(words).lifetimes
    mine = Plan(lifetimes, tuple(memory_exercises.plan(lifetimes)))
    assert mine.lower_bound_bytes <= mine.footprint_bytes <= memory_exercises.ROOMY_PLAN * mine.lower_bound_bytes


def test_what_is_counted(words):
    whole, seen = mask_removal.first_pass_scores(_lengths(words))
    mask = torch.stack([_visible(len(row), max(_lengths(words))) for row in _rows(words)])
    assert (seen, whole) == (int(mask.sum()), mask.numel())


def test_kv_copies_agree_with_a_cache_that_grows(words, monkeypatch):
    from dataclasses import replace

    from eet_lab.engine.engine import Engine
    from eet_lab.engine.settings import Settings
    from eet_lab.parts.kv_cache import GrowingKV

    monkeypatch.setattr(memory_reuse, "NEW_TOKENS", 5)
    small, copied = memory_reuse.small_model(words), []

    class Counting(GrowingKV):
        def layer(self, number, batch):
            copied.append(sum(part[number].numel() * part[number].element_size() for part in (self.keys, self.values)))
            return super().layer(number, batch)

    parts = replace(Recipe.parse(memory_reuse.BASE).parts, kv_cache=Counting)
    engine = Engine(small.decoder, parts)
    engine.generate(memory_reuse.prompts(small), Settings(max_new_tokens=5))
    assert (sum(copied), engine.kv_bytes) == memory_reuse.kv_copies(small)


def test_copies_are_most_of_what_a_growing_cache_costs_in_its_lesson(words):
    """By bytes: a step of the lesson's workload copies far more than it reads of weights."""
    small = memory_reuse.small_model(words)
    copied, _ = memory_reuse.kv_copies(small)
    assert 2 * copied / (memory_reuse.NEW_TOKENS - 1) > 5 * small.decoder.weight_bytes
    assert "random weights" in small.label


def test_poison_reaches_only_who_reads_it(words):
    [shown, _] = mask_removal.poisoned(words).things
    assert shown.data.count("destroyed") == len(_rows(words)) - 1  # the longest row has no pads
    assert shown.data.count("as before") == len(_rows(words)) + 1


# --- step by step


def test_each_step_reads_what_the_layout_says(words):
    fig = batch_steps.token_steps(["a b c", "d e f g h"], "baseline", "pre_padding", model=words, num_new=2)
    assert [frame.name for frame in fig.frames] == [str(n) for n in range(1, 7)], (
        "5 steps to read, 1 for the last token"
    )
    assert (fig.layout.xaxis.title.text, fig.layout.xaxis2.title.text) == (None, "column"), "below the last panel"
    token_by_token = [frame.data[0].z.tolist() for frame in fig.frames]
    for step, cells in enumerate(token_by_token, 1):
        assert [row.count(batch_steps.NOW) for row in cells] == [int(step <= 3), int(step <= 5)]
        assert [row.count(batch_steps.NEW) for row in cells] == [min(max(step - 2, 0), 2), min(max(step - 4, 0), 2)]
    padded = [frame.data[1].z.tolist() for frame in fig.frames]
    assert [row.count(batch_steps.NOW) for row in padded[0]] == [3, 5] and [
        row.count(batch_steps.PAD) for row in padded[0]
    ] == [
        2,
        0,
    ]
    assert all([row.count(batch_steps.NEW) for row in cells] == [2, 2] for cells in padded[1:])
    labels = [step.label for step in fig.layout.sliders[0].steps]
    assert "baseline reads column 2, 1 of 2 rows get" in labels[2] and "pre-padding reads columns 0 to 4" in labels[0]
    assert "pre-padding is done" in labels[2]
    assert max(len(line) for label in labels for line in label.split("<br>")) < 80, "a line for each: none is cut"


def test_a_frame_carries_only_what_changes(words):
    shown = (
        batch_steps.token_steps(["a b c", "d e f g h"], "baseline", "pre_padding", model=words),
        batch_steps.mask_steps(["a b c", "d e f g h"], model=words),
    )
    assert rendered(shown[0])["data"]["text/plain"] == "Figure: baseline, pre-padding", "it has no title of its own"
    shown[1].update_layout(title={"text": "<span style='x'>a &lt; b</span><br>and <b>c</b>"})
    assert rendered(shown[1])["data"]["text/plain"] == "Figure: a < b and c", "this is no place for tags"
    for fig in shown:
        for frame in rendered(fig)["data"][PLOTLY]["frames"]:
            assert all(set(trace) == {"type", "z"} and "bdata" in trace["z"] for trace in frame["data"])
            assert len(json.dumps(frame, indent=1)) < 500, "JupyterLab saves it like this"


def test_each_step_has_a_mask_of_its_own(words):
    fig = batch_steps.mask_steps(["a b c", "d e f g h"], model=words, num_new=3)
    first, second, third = ([trace.z.tolist() for trace in frame.data] for frame in fig.frames)
    count = lambda cells, *kinds: sum(row.count(kind) for row in cells for kind in kinds)  # noqa: E731
    assert [count(cells, 6) for cells in first] == [6, 15], "a triangle over each row's own tokens"
    assert [count(cells, 4, 5, 6) for cells in first] == [25, 25]
    assert [count(cells, 6) for cells in second] == [4, 6] and [count(cells, 4) for cells in second] == [2, 0]
    assert [count(cells, 4, 5, 6) for cells in third] == [7, 7]
    assert [count(cells, 1, 2, 3) for cells in third] == [31, 31], "what was computed before is faded"
    label = fig.layout.sliders[0].steps[1].label
    assert "[2, 1, 1, 6]" in label and "10 of 12 scores used" in label and "keys 2 to 5, 0 to 5" in label


# --- what an H200 took


@pytest.mark.parametrize("show", [pre_padding.rows_on_the_h200, mask_removal.on_the_h200, memory_reuse.on_the_h200])
def test_the_gpus_figures_wait_for_the_prediction(show):
    guess = Prediction("?", number=(0, 1000), unit="%")
    [place] = show(guess).things
    assert "Predict first" in str(place.outputs) and "H200" not in str(place.outputs)
    guess.value = 2.0
    assert "Not this machine" in show(guess).things[0].data and "NVIDIA H200" in show(guess).things[0].data


def test_rows_of_the_recording_are_read_off_its_steps():
    """When its last row has its first token, and when its last one: at the medians that the verdict divides."""
    for name in ("", "pre_padding"):
        m = recorded.rung(name).measurement
        rows = pre_padding._recorded_rows(m, recorded.batch().prompt_lengths, name == "")
        lengths, first = recorded.batch().prompt_lengths, {}
        for step, tokens in enumerate(tokens_by_step(m, lengths)):
            for row, _ in tokens:
                first.setdefault(row, step)
        assert max(rows.first_ms) == rows.first_ms[max(first, key=lambda row: first[row])]
        assert max(rows.first_ms) == pytest.approx(m.ttft_ms.p50)
        assert max(rows.last_ms) == pytest.approx(m.total_ms.p50)
        assert all(first < last for first, last in zip(rows.first_ms, rows.last_ms, strict=True))


@pytest.mark.parametrize(
    ("after", "rise", "said"),
    [
        (50.0, lambda at: at / 80, "it grows with the cache, from 1.03 ms in early steps to 1.93 ms in late ones"),
        (50.0, lambda at: 0, "whether it grows cannot be told from noise here"),
        (50.0, lambda at: 3 * (at >= 70), "whether it grows cannot be told from noise here"),  # the machine's pace
        (101.0, lambda at: at / 80, "here it cannot be told from noise, since"),
    ],
)
def test_what_is_said_of_the_gap_follows_what_was_measured(after, rise, said):
    result, _ = recorded.watched()
    change = Change.of([100.0] * 8, [after] * 8)
    gaps = [1 + rise(at) + 0.1 * (at % 3) for at in range(80)]
    grown = dataclasses.replace(result.baseline, step_ms=(9.0, *(1 + gap for gap in gaps)))
    static = dataclasses.replace(result.selection, step_ms=(9.0, *(1.1 for _ in gaps)))
    result = dataclasses.replace(result, baseline=grown, selection=static, changes={"total_ms": change})
    assert memory_reuse._gap_words(result).startswith(said), memory_reuse._gap_words(result)
    saved = memory_reuse.saved_words(result.all_changes["total_ms"], "9 of 10 ms")
    assert (saved == "cannot tell apart") == said.endswith("since")


def test_the_ladders_red_bar_is_explained_by_counted_launches():
    guess = Prediction("?", number=(0, 100))
    guess.value = 50.0
    _, shown, fig, words, _ = mask_removal.on_the_h200(guess).things
    assert "1,600 launches without the mask and 1,127 with it" in words and "8 rows with 8 numbers of pads" in words
    assert shown.data.count("plain PyTorch") == 2
    assert [x < 0 for x in fig.data[0].x] == [True, True, False, False, False], "red in plain PyTorch alone"
    told = [mask_removal.UNTOLD in name for name in fig.data[0].y]
    assert told == [False, False, True, True, False], "noise has no colour, and kernels alone are not paired"
    assert [color == theme.BASELINE for color in fig.data[0].marker.color] == told
    masked, bounded = recorded.masked_and_not(mask_removal.PREFILL)
    assert masked.commit == bounded.commit and masked.total_ms.p50 > 2 * bounded.total_ms.p50


def test_what_memory_reuse_saved_on_the_h200_is_told_only_where_pairs_can_tell(monkeypatch):
    guess = Prediction("?", number=(0, 1000))
    guess.value = 50.0
    _, shown, words = memory_reuse.on_the_h200(guess).things
    assert shown.data.count("cannot tell apart") == 2 and "cannot be told from noise" in words
    ladder = recorded.ladder()
    told = [
        dataclasses.replace(rung, changes={"tpot_ms": Change.of([21.5] * 8, [18.8] * 8)})
        if rung.technique == "memory_reuse"
        else rung
        for rung in ladder.rungs
    ]
    monkeypatch.setattr(recorded, "ladder", lambda: dataclasses.replace(ladder, rungs=tuple(told)))
    _, shown, words = memory_reuse.on_the_h200(guess).things
    assert shown.data.count("cannot tell apart") == 1 and "2.7 ms" in shown.data and "noise" not in words


def test_a_guess_comes_back_in_its_own_unit(words, monkeypatch):
    guess = Prediction("?", number=(0, 100), unit="%")
    guess.value = 2.0
    monkeypatch.setattr(mask_removal, "attention_ms", lambda model: (4.0, 1.0))
    result, _ = recorded.watched()
    result = dataclasses.replace(result, prompt_lengths=tuple(_lengths(words)))
    fig = mask_removal.verdict(guess, result, words).things[2]
    assert fig.data[0].text[0] == "2 %" and fig.data[0].text[2] == "75 %"
    assert "%" in fig.layout.xaxis.title.text


@pytest.mark.parametrize(("after", "untold"), [(101.0, True), (50.0, False)])
def test_what_pairs_cannot_tell_apart_is_named_and_grey(words, monkeypatch, after, untold):
    guess = Prediction("?", number=(0, 100), unit="%")
    guess.value = 2.0
    monkeypatch.setattr(mask_removal, "attention_ms", lambda model: (4.0, 1.0))
    result, _ = recorded.watched()
    change = Change.of([100.0] * 8, [after] * 8)
    changes = dict.fromkeys(("ttft_ms", "total_ms"), change)
    result = dataclasses.replace(result, prompt_lengths=tuple(_lengths(words)), changes=changes)
    _, lines, figure, *_ = mask_removal.verdict(guess, result, words).things
    assert lines.data.count("cannot tell apart") == 2 * untold, "the table says what the bars say"
    [bars] = figure.data
    for name in ("first pass", "whole run"):
        [place] = [i for i, label in enumerate(bars.y) if label.startswith(name)]
        assert (mask_removal.UNTOLD in bars.y[place]) == (bars.marker.color[place] == theme.BASELINE) == untold


def _rows(model):
    from eet_lab.lessons.batch import rows

    return rows(model)


def _lengths(model):
    return [len(row) for row in _rows(model)]


def _visible(count, longest):
    at = torch.arange(longest)
    real = at >= longest - count
    return real[:, None] & real & (at[:, None] >= at)


def test_a_label_of_what_got_slower_stands_clear_of_the_names():
    fig = mask_removal._saved_figure({"scores: counted": 86.0, "whole run (cannot tell apart)": -2.5})
    begin, end = fig.layout.xaxis.range
    assert (-2.5 - begin) / (end - begin) > 0.09, "`-2.5 %` takes 30 of 350 pixels"
    assert mask_removal._saved_figure({"scores: counted": 86.0}).layout.xaxis.range[0] == 0
