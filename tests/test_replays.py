"""What others published or measured, told again to the last printed digit by pools that never saw their code."""

from __future__ import annotations

from itertools import pairwise

import pytest
from turbo_workloads import bert_base, turbo_head
from valid_plans import validate

from eet_lab.memory import POOLS, ArenaPool, ChunkedPool, DriverCalls, FirstFitPool
from eet_lab.memory.replays import TURBO_ALIGNMENT, Replay, compare, pools, replay
from eet_lab.memory.workloads import drawn, eet_request, eet_sweep, turbo_artifact, turbo_figure

MiB = 2**20


def mib(*num_bytes: float) -> list[str]:
    return [f"{n / MiB:.3f}" for n in num_bytes]


def mean_max_new(found: Replay) -> list[str]:
    return mib(found.mean_footprint_bytes, max(found.footprint_bytes), found.new_bytes_per_request)


def test_turbo_transformers_figure_6():
    first, second = replay(ChunkedPool(alignment=TURBO_ALIGNMENT), turbo_figure()).served
    assert [chunk.num_bytes for chunk in first.plan.chunks] == [2_949_120, 2_097_152]
    assert first.calls == DriverCalls(2, 0, 2_949_120 + 2_097_152, 0)
    assert second.plan.chunks[:2] == first.plan.chunks and second.calls == DriverCalls(1, 0, 2_097_152, 0)


def test_turbo_transformers_artifact():
    """compare_allocator.py: mean and greatest footprint, and new memory for each of the 50 requests, in MiB."""
    found = compare(turbo_artifact())
    assert mean_max_new(found["chunks, arrival, immediate"]) == ["4.228", "7.108", "0.702"]
    assert mean_max_new(found["arena, made anew"]) == ["2.789", "4.922", "2.789"], "GSOC, charged for all of it"


def test_turbo_transformers_order_of_chunks():
    """Its C++ keeps chunks in ascending size, and counts inputs and pooler as well."""
    found = compare(turbo_head())
    assert mean_max_new(found["chunks, ascending, immediate"])[::2] == ["4.345", "1.134"]
    assert mean_max_new(found["chunks, arrival, immediate"]) == ["4.228", "7.108", "0.702"]


def test_what_an_arena_would_have_done_for_it():
    """The paper's baseline frees its arena each time. One that is kept asks the driver less than chunks do."""
    found = compare(turbo_artifact())
    grown, reserved, chunks = (
        found[name] for name in ("arena, grown", "arena, reserved", "chunks, arrival, immediate")
    )
    assert mean_max_new(grown) == ["4.876", "4.922", "0.284"] and grown.calls.allocations == 3
    assert mean_max_new(reserved) == ["4.922", "4.922", "0.098"] and reserved.calls.allocations == 1
    assert chunks.calls == DriverCalls(17, 16, 36_813_216, 33_554_432)


@pytest.mark.parametrize(
    ("rows", "name", "mean", "most", "new", "allocations", "frees"),
    [
        (1, "arena, made anew", 7.53, 17.31, 7.53, 150, 149),
        (1, "arena, grown", 17.17, 17.31, 0.42, 4, 3),
        (1, "arena, reserved", 17.31, 17.31, 0.12, 1, 0),
        (1, "chunks, ascending, immediate", 11.92, 32.74, 3.37, 95, 91),
        (1, "chunks, ascending, never", 31.49, 32.17, 0.21, 6, 0),
        (20, "arena, grown", 343.48, 346.11, 8.47, 4, 3),
        (20, "chunks, ascending, immediate", 242.93, 627.11, 68.71, 124, 119),
    ],
)
def test_bert_base_at_lengths_up_to_500(rows, name, mean, most, new, allocations, frees):
    """Chunks hold less in the mean, more at the worst, and ask the driver twenty times as often."""
    workload = bert_base(rows)
    found = replay(pools(workload)[name](), workload)
    told = [found.mean_footprint_bytes, max(found.footprint_bytes), found.new_bytes_per_request]
    assert [round(n / MiB, 2) for n in told] == [mean, most, new]
    assert (found.calls.allocations, found.calls.frees) == (allocations, frees)


def test_bert_base_lower_bound():
    bound = replay(ArenaPool(), bert_base()).lower_bound_bytes
    assert [round(n / MiB, 2) for n in (sum(bound) / 150, max(bound))] == [7.51, 17.31]


def test_lengths_are_the_artifacts():
    assert drawn(50, 250)[:6] == [221, 103, 199, 232, 112, 15]


def swept(*lengths: int) -> tuple[FirstFitPool, Replay]:
    pool = FirstFitPool(repaired=False)
    return pool, replay(pool, eet_sweep(lengths))


def buffers_mib(pool: FirstFitPool) -> float:
    return sum(chunk.num_bytes for chunk in pool.buffers) / MiB


def test_eet_needs_seven_buffers_and_three_caches_for_a_prompt():
    pool, found = swept(512)
    assert len(pool.buffers) == 7 and buffers_mib(pool) == 96.0
    assert sum(chunk.num_bytes for chunk in pool.caches.values()) / MiB == 18.0 and len(pool.caches) == 3
    assert found.calls == DriverCalls(10, 0, 114 * MiB, 0) and not found.ended


@pytest.mark.parametrize(
    ("lengths", "mebibytes"),
    [
        (range(128, 897, 128), 370.5),
        (range(32, 1025, 32), 1552.125),
        (range(1024, 31, -32), 156.0),
    ],
)
def test_eet_never_frees_and_takes_the_first_that_fits(lengths, mebibytes):
    """GPT-2 small, 4 rows: the same prompts need ten times the memory when they come the shortest first."""
    pool, found = swept(*lengths)
    assert buffers_mib(pool) == mebibytes and not found.ended


@pytest.mark.parametrize(("step", "prompt"), [(8, 122), (1, 117)])
def test_eet_ends_the_process_at_the_101st_buffer(step, prompt):
    pool, found = swept(*range(step, 1025, step))
    assert len(found.served) == prompt - 1 and len(pool.buffers) == 100
    assert "already 100, which is EET's limit" in found.ended


def test_ours_on_eets_prompts():
    """MiB held in the end; EET's pool holds 1570.1 and 174.0 with its caches, and 120.0 are alive at once."""
    up, down = (compare(eet_sweep(lengths)) for lengths in (range(32, 1025, 32), range(1024, 31, -32)))
    assert max(up["arena, grown"].lower_bound_bytes) == 120 * MiB
    held = {name: [round(found[name].held_bytes / MiB, 1) for found in (up, down)] for name in up}
    assert held == {
        "arena, made anew": [120.0, 36.0],
        "arena, grown": [120.0, 120.0],
        "arena, reserved": [120.0, 120.0],
        "chunks, arrival, immediate": [244.8, 115.2],
        "chunks, arrival, idle": [316.8, 115.2],
        "chunks, arrival, never": [457.2, 122.4],
        "chunks, ascending, immediate": [246.8, 122.4],
        "chunks, ascending, idle": [318.8, 122.4],
        "chunks, ascending, never": [459.2, 122.4],
        "EET": [1570.1, 174.0],
        "EET, repaired": [1534.1, 162.0],
    }
    calls = {name: (found.calls.allocations, found.calls.frees) for name, found in up.items()}
    assert calls["arena, grown"] == (25, 24) and calls["arena, reserved"] == (1, 0)
    assert calls["chunks, arrival, immediate"] == (9, 4) and calls["EET"] == (38, 0)


def test_a_request_lives_in_order():
    """A layer's input lives until its attention's output is made, whose own life ends with the layer's."""
    lives = eet_request(64, num_layers=2).lifetimes
    assert [life.first for life in lives] == list(range(len(lives)))
    caches = [(life.name, life.first, life.last) for life in lives if life.name.endswith("_cache")]
    prefill = caches[:5]
    assert [name for name, _, _ in prefill] == ["emb_cache"] + ["self_mask_attn_cache", "decoder_out_cache"] * 2
    assert all(last == following for (_, _, last), (_, following, _) in pairwise(prefill))


@pytest.mark.parametrize("name", [name for name in POOLS if name != "optimal"])
def test_the_engines_choices_serve_the_workloads(name):
    pool = POOLS[name]()
    for workload in (eet_sweep(range(64, 513, 64), num_layers=2), turbo_artifact()):
        for _, lifetimes in workload:
            plan = validate(pool.place(lifetimes), alignment=1)
            assert plan.lifetimes == tuple(lifetimes)
            assert plan.chunks == pool.chunks
            assert plan.footprint_bytes == pool.calls.held_bytes >= plan.lower_bound_bytes > 0


def test_a_replay_counts_what_was_reserved_before():
    reserved = compare(turbo_figure())["arena, reserved"]
    assert [one.calls.allocations for one in reserved.served] == [1, 0]
    assert reserved.held_bytes == max(reserved.lower_bound_bytes)
