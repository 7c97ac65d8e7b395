"""The memory of slots: what they hold is foreseen, serves whoever comes, and may be pages that are too few for all."""

# ruff: noqa: F401, F811  # fixtures come by their names

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
from test_captures import emulated
from test_continuous import BASE, POLICIES, STORES, alone, decoder, engine_of, random_life, recipe

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import PromptError, RecipeError
from eet_lab.parts import Parts
from eet_lab.parts.paged_kv import PagedKV
from eet_lab.scheduling import Schedule
from eet_lab.technique import Recipe


@pytest.mark.parametrize("store", STORES)
def test_a_forecast_knows_the_slots(decoder, store):
    rows = [[1] * length for length in (5, 17, 9, 30)]
    for policy in POLICIES:
        engine = Engine(decoder, Recipe.parse(recipe(store, policy)).parts)
        forecast, lifetimes = engine.forecast(rows, Settings(8)), engine.lifetimes(rows, Settings(8))
        engine.generate(rows, Settings(8))
        assert (forecast.kv_bytes, forecast.activation_bytes) == (engine.kv_bytes, engine.activation_bytes)
        assert {name: plan.lifetimes for name, plan in engine.plans().items()} == lifetimes


def test_passes_of_any_number_of_tokens_are_traced_a_few_times(decoder):
    engine, before = engine_of(decoder, policy="rows=8:chunk=200:budget=250", columns=200), 0
    for length in range(66, 190, 7):
        engine.generate([[1] * length, [2] * (length + 3), [3]], Settings(2))
        before = before or engine.memory._num_traced
    assert engine.memory._num_traced - before <= 6


def test_what_is_reserved_serves_those_that_are_added(decoder):
    engine = engine_of(decoder, columns=64)
    slots, held_bytes = engine._slots, (engine.kv_bytes, engine.activation_bytes)
    for number in range(5):
        engine.add([1] * 50, Settings(9), number=number)
    while engine.step() or not engine._slots.idle:
        assert engine._slots is slots and (engine.kv_bytes, engine.activation_bytes) == held_bytes


def test_few_pages_are_enough_with_it_and_an_error_without(decoder, alone):
    rows, words = [[1] * 20, [2] * 30, [3] * 9], "memory_reuse:kv=paged:pages=5"
    joined = Engine(decoder, Recipe.parse(recipe("paged:pages=5")).parts)
    assert joined.generate(rows, Settings(40)).tokens == Engine(decoder).generate(rows, Settings(40)).tokens
    together = Engine(decoder, Recipe.parse(f"{BASE},{words}").parts)
    for attempt in (together.forecast, together.generate):
        with pytest.raises(PromptError, match="3 rows of 70 columns may need 12 pages of 16, but there are 5"):
            attempt(rows, Settings(40))
    assert joined.forecast(rows, Settings(40)).largest_context == 80 + 1


def test_what_no_page_pool_holds_is_told_before_any_work(decoder):
    engine = engine_of(decoder, "paged", columns=30, kv_cache=PagedKV(page=16, num_pages=3))
    held_bytes = engine.kv_bytes
    with pytest.raises(PromptError, match="KV cache"):
        engine.generate([[1], [2] * 36], Settings(4))
    assert engine.kv_bytes == held_bytes > 0
    assert len(engine.generate([[1, 2]], Settings(4)).tokens[0]) == 4
    assert engine.add([1], Settings(2), number=2**31 - 1).done is False


def test_pages_that_hold_less_than_a_slot_are_told_of_rather_than_the_slot(decoder, monkeypatch):
    """More room in the slots alone would not help, nor would more pages alone."""
    monkeypatch.setattr("eet_lab.engine.engine.COLUMNS", 120)
    engine = Engine(decoder, Recipe.parse(recipe("paged:pages=5")).parts)
    with pytest.raises(
        PromptError, match=r"holds 80 columns\. Shorten the prompt, or .* pages \(memory_reuse:pages\) and make room by"
    ):
        engine.add([1] * 150, Settings(9))
    with pytest.raises(
        PromptError, match=r"holds 80 columns\. .* give the KV cache more pages \(memory_reuse:pages\)\.$"
    ):
        engine.add([1] * 100, Settings(9))
    roomy = Engine(decoder, Recipe.parse(recipe("paged:pages=12")).parts)
    with pytest.raises(PromptError, match="its slot, whose room is 120 tokens"):
        roomy.add([1] * 150, Settings(9))


def test_where_pages_run_out_the_newest_is_read_again(decoder, alone):
    engine = engine_of(decoder, "paged", columns=64, kv_cache=PagedKV(page=16, num_pages=6))
    assert random_life(engine, alone, 1, 40, most=30) > 20
    assert engine._slots.scheduler.num_preempted > 0 and engine.cache.ledger.free == 5


def test_a_batch_that_pages_do_not_hold_leaves_the_engine_as_it_was(decoder):
    words = f"{BASE},memory_reuse:kv=paged:pages=5"
    engine = Engine(decoder, Recipe.parse(words).parts)
    for _ in range(2):
        with pytest.raises(PromptError, match="may need 12 pages"):
            engine.generate([[1] * 20, [2] * 30, [3] * 9], Settings(40))
    assert engine.generate([[1, 2]], Settings(4)).tokens == Engine(decoder).generate([[1, 2]], Settings(4)).tokens


def test_prompts_of_one_token_in_every_slot_are_a_decode_step(decoder, monkeypatch):
    """What its ops ask for was traced for one token a row, and not for as many tokens of any row."""
    engine, passes = engine_of(decoder, policy="rows=4:chunk=9:budget=20", columns=64), []
    run = engine._slots.passes._run
    monkeypatch.setattr(engine._slots.passes, "_run", lambda name, *others: (passes.append(name), run(name, *others)))
    requests = [engine.add([5 + number], Settings(3), number=number) for number in range(4)]
    while not all(request.done for request in requests):
        engine.step()
    assert set(passes) == {"decode"}
    want = Engine(decoder).generate([[5 + number] for number in range(4)], Settings(3)).tokens
    assert tuple(tuple(request.generated) for request in requests) == want


def test_requests_that_have_left_are_forgotten(decoder):
    engine = engine_of(decoder, columns=64)
    engine.add([1, 2, 3], Settings(40))
    gone = weakref.ref(engine.add([7], Settings(1), number=1))
    for _ in range(12):
        engine.step()
    gc.collect()
    assert gone() is None and not engine._slots.idle


def test_requests_do_not_join_in_a_cache_that_grows(decoder):
    with pytest.raises(RecipeError, match="cannot join in a KV cache that grows: add memory_reuse"):
        Engine(decoder, replace(Parts(), schedule=Schedule(max_rows=2)))


@pytest.mark.parametrize("store", STORES)
def test_slots_that_others_ran_beside_find_their_places_again(decoder, store):
    """Prompts of one token are decoded at once, in whatever places the arena has."""
    engine, plain = engine_of(decoder, store, "rows=8:chunk=4:budget=8", columns=40), Engine(decoder)
    for count in (8, 1, 8, 2, 5):
        rows = [[1 + row] for row in range(count)]
        for settings in (Settings(8), Settings(8, 0.9, top_k=5)):
            assert engine.generate(rows, settings).tokens == plain.generate(rows, settings).tokens


def test_graphs_of_other_slots_are_void_too_once_memory_has_moved(decoder):
    """A batch has slots of its own beside those of requests that join; what draws there needs a larger arena."""
    words = recipe("static:planner=no_reuse", "rows=4:chunk=1:budget=16")
    parts, counts = emulated(Recipe.parse(words).parts)
    engine, rows, settings = Engine(decoder, parts), [[1, 2], [3]], Settings(10)
    engine.reserve(4, 20, settings)
    want = Engine(decoder).generate(rows, settings).tokens
    for _ in range(2):
        assert engine.generate(rows, settings).tokens == want
    generation = engine.memory.generation
    for how in ({}, {"temperature": 0.8, "top_k": 5}):
        engine.add([1, 2], Settings(3, **how))
    while engine.step() or not engine.slots.idle:
        pass
    captures = counts["captures"]
    assert engine.memory.generation > generation
    assert engine.generate(rows, settings).tokens == want and counts["captures"] > captures
