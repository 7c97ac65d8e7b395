"""Lesson 5: what is told of others is what they told, and the exercise says what is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from eet_lab.bench import streams as torch_streams
from eet_lab.bench.streams import AllocatorTrace, Cached
from eet_lab.errors import PlanError
from eet_lab.lessons import memory_exercises as exercises
from eet_lab.lessons import memory_reuse
from eet_lab.lessons import variable_length as lesson
from eet_lab.memory import POOLS, Plan
from eet_lab.memory.replays import replay

MiB = 2**20


def test_nothing_is_compared_before_the_prediction() -> None:
    guess = lesson.predict()
    [pending] = lesson.artifact(guess).things
    assert "Predict first" in str(pending.outputs)
    guess.answer(9.0)
    guess.wait(10)
    assert "0.702" in str(pending.outputs)


def test_the_arenas_film_waits_for_the_prediction() -> None:
    guess = lesson.predict()
    [pending] = lesson.play("arena, grown", guess).things
    assert "Predict first" in str(pending.outputs) and "arena, grown" not in str(pending.outputs)
    guess.answer(9.0)
    guess.wait(10)
    assert "arena, grown" in str(pending.outputs) and "frames" in str(pending.outputs)
    calls = str(lesson.served()["arena, grown"].calls.allocations)
    assert all(calls not in thing for thing in lesson.play().things if isinstance(thing, str))


def test_the_records_of_fifty_requests_are_as_rare_as_the_reveal_says() -> None:
    guess = lesson.predict()
    lengths = [request.length for request in lesson.stream()]
    records = sum(length > max(lengths[:at], default=0) for at, length in enumerate(lengths))
    assert guess._reveal.startswith(f"{records} times")
    assert sum(1 / n for n in range(1, 51)) == pytest.approx(4.5, abs=0.01)
    assert sum(1 / n for n in range(1, 1001)) == pytest.approx(7.5, abs=0.02)


def test_published_figures_are_replayed_to_the_digit() -> None:
    for name, (held, new) in lesson.PUBLISHED_MIB.items():
        found = lesson.served()[name]
        assert f"{found.mean_footprint_bytes / MiB:.3f}" == held
        assert f"{found.new_bytes_per_request / MiB:.3f}" == new


def test_the_order_of_prompts_is_ten_times_the_memory() -> None:
    shown, words = lesson.eet_order().things
    assert lesson._buffer_bytes(lesson.SWEEP) / MiB == pytest.approx(1552, abs=0.5)
    assert lesson._buffer_bytes(lesson.SWEEP[::-1]) == 156 * MiB
    assert "1.516 GiB" in words and "156 MiB" in words and "1.533 GiB" in shown.data


def test_the_policies_are_told_by_what_they_did() -> None:
    fig, words = lesson.releases().things
    idle = lesson.served()["chunks, arrival, idle"]
    held = idle.footprint_bytes
    falls = [at + 1 for at in range(1, len(held)) if held[at] < held[at - 1]]
    assert len(falls) == idle.calls.frees > 0 and len(fig.data) == 3
    assert all(f"at request {fall}" in words or f"at {fall}" in words for fall in falls)
    assert f"{idle.calls.allocations} allocations and {idle.calls.frees} frees" in words
    assert "17 allocations and 16 frees, 4.228 MiB" in words
    assert f", 8 in a row leave a chunk empty {len(falls)} times" in words, (
        "not what stands before it, which never frees"
    )


def test_no_pool_hides_under_another() -> None:
    fig = lesson.trade_off(lesson.served())
    points = {trace.name: (trace.x[0], trace.y[0], trace.marker.size) for trace in fig.data}
    assert len(set(points.values())) == len(points)
    assert all(trace.marker.symbol.endswith("open") for trace in fig.data if trace.name.startswith("EET"))


def test_a_name_that_is_no_choice_lists_the_choices(tiny: Any) -> None:
    with pytest.raises(PlanError, match=r"no pool 'nonsense'.*'arena, grown'.*'EET, repaired'"):
        lesson.play("nonsense")
    with pytest.raises(PlanError, match=r"no planner 'greedy'. Did you mean 'greedy_by_size'\?.*'no_reuse'"):
        memory_reuse.buffers(Plan((), ()), "greedy")


def test_the_orders_are_told_where_they_are_named() -> None:
    notebook = json.loads((Path(__file__).resolve().parent.parent / "notebooks" / "00_start_here.ipynb").read_text())
    [line] = [line for line in notebook["cells"][-1]["source"] if line.startswith("| arrival, ascending |")]
    assert "searched" in line
    guess = lesson.predict()
    guess.value = 9.0
    assert any("Arrival and ascending" in thing for thing in lesson.artifact(guess).things if isinstance(thing, str))


def hint(answer: Any) -> str:
    verdict = exercises.holding.check(answer)
    assert verdict.ok is False
    return verdict.message


def test_the_exercise_tells_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exercises.holding.check(exercises.hold).ok
    assert "driver calls" in hint(lambda needed, held, before: needed)
    assert "night" in (told := hint(lambda needed, held, before: max(needed, held))) and "on average" in told
    assert "at least that many" in hint(lambda needed, held, before: needed - 1)
    assert "ZeroDivisionError" in hint(lambda needed, held, before: 1 // 0)
    monkeypatch.delenv("EET_LAB_FAST", raising=False)
    assert exercises.holding.check(lambda needed, held, before: ...).ok is None


def test_an_engine_asks_the_driver_as_often_as_was_foreseen_on_paper(tiny: Any) -> None:
    stream = lesson.traced(tiny)
    truth = [lesson._tokens(lesson.Engine(tiny.decoder), p) for p in lesson.requests(tiny)]
    for name in ("greedy_by_size", "chunked"):
        pool = POOLS[name]()
        replay(pool, stream)
        calls, _, tokens = lesson._ran(tiny, name)
        assert tokens == truth
        assert calls == pool.calls.allocations + pool.calls.frees


def test_the_peers_figures_are_labelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    streams = {"artifact": {"default": Cached((MiB, 4 * MiB), MiB, 2, 0)}}
    told = AllocatorTrace("Some GPU", "2.13", "2026-11-21T00:00:00", streams)
    path = tmp_path / "told.json"
    path.write_text(json.dumps(asdict(told)))
    monkeypatch.setattr(torch_streams, "RECORDED", path)
    assert torch_streams.recorded_allocator() == told
    where, shown, _ = lesson.torch_allocator().things
    assert "Not this machine: recorded on an Some GPU" in where.data and "4 MiB" in shown.data


@pytest.mark.gpu
def test_the_allocator_is_measured_in_both_settings() -> None:
    found = torch_streams.allocator_here()
    for settings in found.streams.values():
        assert set(settings) == set(torch_streams.SETTINGS)
        for each in settings.values():
            assert max(each.reserved_bytes) >= each.most_allocated_bytes > 0
            assert each.allocations > 0
