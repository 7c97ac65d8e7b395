"""Lesson 6: what is drawn and said is what the scheduler plans and the engine does; exercises say what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eet_lab.bench import Change
from eet_lab.errors import PromptError
from eet_lab.figures.slot_lanes import AGAIN, GENERATES, READS, boxes, in_words, lanes
from eet_lab.lessons import batching_exercises as exercises
from eet_lab.lessons import continuous_batching as lesson
from eet_lab.lessons.prediction import Prediction
from eet_lab.scheduling import PageLedger, Schedule, Slab
from eet_lab.scheduling.simulate import Simulated, simulate
from eet_lab.words import percent


def guessed(value: float = 30.0) -> Prediction:
    guess = lesson.predict()
    guess.value = value
    return guess


# --- a stream through the scheduler, by counting


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("policy", [(None, None), (16, None), (5, 12), (1, 64)])
def test_every_request_reads_its_tokens_once_and_is_told_all(joins: bool, policy: tuple) -> None:
    run = simulate(lesson.REQUESTS, Schedule(*policy, 4, joins))
    assert run.read_twice == 0 and run.gave_way == ()
    for number, (_, new) in enumerate(lesson.REQUESTS):
        told = run.told(number)
        assert len(told) == new and told == sorted(set(told))
    assert sum(map(sum, run.tokens)) == sum(prompt + new - 1 for prompt, new in lesson.REQUESTS)
    assert sum(prompts for _, prompts in run.tokens) == sum(prompt for prompt, _ in lesson.REQUESTS)
    assert 0 <= run.idle_share < 1


def test_a_group_lasts_as_long_as_its_longest_request() -> None:
    run = lesson.served(joins=False)
    passes = [-(-prompt // lesson.CHUNK) + new - 1 for prompt, new in lesson.REQUESTS]
    assert len(run.passes) == sum(max(passes[at : at + lesson.SLOTS]) for at in range(0, len(passes), lesson.SLOTS))
    assert run.idle_share == pytest.approx(1 - sum(passes) / (lesson.SLOTS * len(run.passes)))


def test_a_request_comes_when_it_comes() -> None:
    run = simulate(((3, 2), (3, 2)), Schedule(max_rows=2, joins=True), arrivals=(0, 7))
    assert run.told(0) == [0, 1] and run.told(1) == [7, 8]
    assert [len(rows) for rows in run.passes] == [1, 1, 0, 0, 0, 0, 0, 1, 1]
    with pytest.raises(PromptError, match="8 columns"):
        simulate(((9, 9),), Schedule(max_rows=1), Slab(1, 8))


def test_what_gives_way_is_counted_and_read_again() -> None:
    run = lesson.paged(lesson.FEW)
    assert len(run.gave_way) >= 3 and run.read_twice > 100
    for number, at in run.gave_way:
        request = run.requests[number]
        assert request in {row.request for row in run.passes[at - 1]}
        assert request not in {row.request for row in run.passes[at]}
    assert all(len(run.told(number)) == new for number, (_, new) in enumerate(lesson.REQUESTS))


# --- figures


def test_boxes_are_the_rows_of_all_passes() -> None:
    for run in (*lesson.both(2).values(), lesson.paged(lesson.FEW)):
        cells = {(box.slot, at): box for box in boxes(run) for at in range(box.first, box.first + box.num_passes)}
        assert len(cells) == sum(map(len, run.passes)) == sum(box.num_passes for box in boxes(run)), "none overlap"
        for at, rows in enumerate(run.passes):
            for request, slot, start, _, _ in rows:
                box = cells[slot, at]
                assert run.requests[box.request] is request
                assert box.kind != GENERATES or start >= len(request.prompt)
        again = {box.request for box in boxes(run) if box.kind == AGAIN}
        assert again == {number for number, _ in run.gave_way}
        assert {box.request for box in boxes(run) if box.kind == READS} == set(range(len(run.requests)))


def test_the_title_tells_passes_and_idle_share() -> None:
    fig = lanes(lesson.both())
    for note, (name, run) in zip(fig.layout.annotations, lesson.both().items(), strict=True):
        assert note.text == f"{name}: {in_words(run)}"
        assert f"{len(run.passes)} passes" in note.text and f"{100 * run.idle_share:.0f} %" in note.text


def test_the_slider_has_each_number_of_slots_with_its_own_title() -> None:
    fig = lesson.picture(guessed()).things[0]
    assert [frame.name for frame in fig.frames] == ["2", "4", "8"] and fig.layout.sliders[0].active == 1
    for frame in fig.frames:
        runs = lesson.both(int(frame.name))
        assert [note.text.split(": ")[1] for note in frame.layout.annotations] == [*map(in_words, runs.values())]
        assert frame.layout.yaxis.range == (int(frame.name) - 0.5, -0.5)
        assert max(frame.data[-1].y) == int(frame.name) - 1
    assert [note.text for note in fig.layout.annotations] == [note.text for note in fig.frames[1].layout.annotations]


# --- what the lesson says


def test_nothing_is_shown_before_the_prediction(tiny: Any) -> None:
    for pending in (lesson.picture(lesson.predict()), lesson.measured(lesson.predict(), tiny)):
        [place] = pending.things
        assert "Predict first" in str(place.outputs) and "101" not in str(place.outputs)


def test_the_reveal_is_the_figures_count() -> None:
    groups, joined = (len(run.passes) for run in lesson.both().values())
    guess = guessed()
    assert guess._reveal.startswith(f"{groups - joined}: {joined} passes in place of {groups}")
    assert f"You said 30 passes, and {groups - joined} are saved with 4 slots." in lesson.picture(guess).things[1]


def test_more_slots_waste_more_in_groups() -> None:
    idle = [lesson.served(False, slots).idle_share for slots in (2, 4, 8)]
    assert idle == sorted(idle)
    assert all(lesson.served(True, s).idle_share < lesson.served(False, s).idle_share for s in (2, 4, 8))


def test_gaps_are_left_only_at_the_end_where_requests_join() -> None:
    for slots in (2, 4):
        full = [len(rows) == slots for rows in lesson.served(True, slots).passes]
        assert full == sorted(full, reverse=True)


def test_chunks_trade_the_first_token_for_smoothness() -> None:
    runs = [lesson.beside(chunk) for chunk in lesson.CHUNKS.values()]
    gaps, firsts = [lesson.longest_gap(run) for run in runs], [lesson.first_token(run) for run in runs]
    assert gaps == [16 + 3, 64 + 3, 160 + 3]
    assert firsts == [(10, 190), (3, 169), (1, 163)], "160 tokens, and three for each pass"
    words = lesson.chunks().things[-1]
    assert (
        "8.58 times as high" in words and "after 10 passes and not 1" in words and "190 tokens in place of 163" in words
    )


def test_pages_are_told_by_what_the_scheduler_did() -> None:
    _, shown, words = lesson.preempted().things
    run, least = lesson.paged(lesson.FEW), lesson.enough()
    number, at = run.gave_way[0]
    assert f"request {number + 1} is preempted first, in pass {at + 1}" in words
    assert len(lesson.paged(least).passes) == len(lesson.served(True).passes) and not lesson.paged(least).gave_way
    assert lesson.paged(least - 1).gave_way or len(lesson.paged(least - 1).passes) > len(lesson.served(True).passes)
    assert f'<td class="eet-number">{run.read_twice}</td>' in shown.data
    assert number == max(run.requests.index(row.request) for row in run.passes[at - 1]), "the newest that runs"
    lost = (len(run.passes) - len(lesson.served(True).passes)) * lesson.SLOTS
    again = sum(box.num_passes for box in boxes(run) if box.kind == AGAIN)
    assert again < lost / 2, "most of what is lost is idle"


def test_instructions_in_front_of_every_prompt_are_read_once() -> None:
    without, shared = lesson.prefixed(False), lesson.prefixed(True)
    full, prompts = (
        lesson.INSTRUCTIONS // lesson.PAGE * lesson.PAGE,
        sum(prompt for prompt, _ in lesson.REQUESTS),
    )
    assert lesson.read(without) == prompts + len(lesson.REQUESTS) * lesson.INSTRUCTIONS
    assert lesson.read(without) - lesson.read(shared) == (len(lesson.REQUESTS) - 1) * full
    assert len(shared.passes) < len(without.passes) and not shared.gave_way
    assert lesson.read(lesson.prefixed(True, 0)) == prompts, "they have nothing else in common"
    _, shown, words = lesson.shared().things
    assert percent(lesson.found_share(shared)) in shown.data and f"{full} tokens fill pages" in words


def test_the_engine_makes_the_passes_that_were_counted(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson, "REQUESTS", ((3, 6), (9, 2), (20, 3), (4, 9), (5, 2), (17, 4)))
    tokens = []
    for joins in (False, True):
        runner, steps = lesson.Runner(tiny, joins), []
        step = runner.engine.step
        monkeypatch.setattr(runner.engine, "step", lambda step=step, steps=steps: steps.append(1) or step())
        runner.run()
        counted = simulate(lesson.REQUESTS, Schedule(lesson.CHUNK, 512, lesson.SLOTS, joins))
        assert len(steps) == len(counted.passes)
        assert 0 < runner.ttfts_ms[0] < runner.totals_ms[0]
        tokens.append(runner.tokens)
    assert tokens[0] == tokens[1] and [len(each) for each in tokens[0]] == [6, 2, 3, 9, 2, 4]


@pytest.mark.parametrize(("after", "said"), [(50.0, "2.00 × faster"), (101.0, "cannot tell apart")])
def test_what_was_measured_is_told_with_its_interval(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, after: float, said: str
) -> None:
    change = Change.of([100.0] * 8, [after] * 8)
    assert change is not None
    monkeypatch.setattr(lesson, "paired", lambda model: ((change, replace(change)), True))
    where, shown, words = lesson.measured(guessed(), tiny).things
    assert "Measured now" in where.data and said in shown.data
    assert "120" in shown.data, "12 requests in 100 ms"
    assert "8 pairs" in words and "Yes" in words


# --- exercises


def test_the_learners_split_is_the_schedulers() -> None:
    run = simulate(lesson.REQUESTS, Schedule(lesson.CHUNK, exercises.BUDGET, lesson.SLOTS, joins=True))
    cases = exercises.stream_cases()
    assert len(cases) == len(run.passes) and any(0 in exercises.split(*case[:4]) for case in cases)
    for case, rows in zip(cases, run.passes, strict=True):
        counts = [row.count for row in rows][case.decoding :]
        assert [count for count in exercises.split(*case[:4]) if count] == counts


def test_a_split_is_judged_in_words() -> None:
    def told(answer: Any) -> str:
        verdict = exercises.sharing.check(answer)
        assert verdict.ok is False
        return verdict.message

    assert exercises.sharing.check(lambda *case: tuple(exercises.split(*case))).ok
    assert "a list of 1 whole number, one" in told(lambda *case: [])
    assert "below 0" in told(lambda d, missing, c, b: [-1] * len(missing))
    assert "the least of three numbers" in told(lambda d, missing, c, b: [1] * len(missing))
    assert "ZeroDivisionError" in told(lambda *case: 1 // 0)


def test_the_formula_is_the_schedulers() -> None:
    for answers, slots in (([5, 1, 4, 2], 2), ([3, 3, 3, 3, 9], 2), ([7, 2, 5], 4), ([2, 9, 4, 4, 1, 1, 8], 3)):
        runs: list[Simulated] = [
            simulate([(3, new) for new in answers], Schedule(max_rows=slots, joins=joins)) for joins in (False, True)
        ]
        assert exercises.passes(answers, slots) == tuple(len(run.passes) for run in runs)


def test_pages_of_an_exercise_are_no_slab() -> None:
    """The ledger that is given is the one that is used."""
    assert not simulate(((8, 8),), Schedule(max_rows=1), PageLedger(3, 8, 1)).gave_way
