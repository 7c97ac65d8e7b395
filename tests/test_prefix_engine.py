"""Prefix caching on a model: the same tokens as without, and what is shared is neither written nor lost."""

# ruff: noqa: F401, F811  # fixtures come by their names

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from alone import num_alike
from families import CONFIGS, NEW, expected, ours, prompts
from test_captures import emulated
from test_continuous import GREEDY, MIXED, POLICIES, alone, decoder, engine_of, lagging, recipe
from test_soak import held

from eet_lab.bench.parity import parity
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import RecipeError
from eet_lab.parts.kv_cache import StaticKV
from eet_lab.parts.paged_kv import PagedKV, SharedPages
from eet_lab.technique import Recipe

STEM = [7, 3, 11, 5, 2, 13, 8, 1, 9, 4, 6, 10, 12, 14, 15, 16, 17, 18, 19, 20]


def shared_recipe(policy: str = POLICIES[0], store: str = "paged") -> str:
    return f"{recipe(store, policy)},prefix_caching"


def shared_engine(decoder, page=4, num_pages=None, policy=POLICIES[0], columns=96, **changes) -> Engine:
    return engine_of(decoder, "paged", policy, columns, kv_cache=PagedKV(page, num_pages, True), **changes)


def finish(engine, *requests):
    while engine.step() or not all(request.done for request in requests):
        pass


def common_life(engine, alone, seed, num_requests, hows=GREEDY, most=24):
    """Requests of a few stems come and go, some again with their answers in front; some are cancelled. Returns how many
    were whole.
    """
    draw, asked, added, running, begun = random.Random(seed), [], [], [], [[]]
    stems = [[draw.randrange(1, 60) for _ in range(most)] for _ in range(2)]
    while len(added) < num_requests or running:
        if len(added) < num_requests and draw.random() < 0.5:
            own = [draw.randrange(1, 60) for _ in range(draw.choice((0, 0, 1, 5)))]
            prompt = (draw.choice(begun[-4:]) or draw.choice(stems)[: draw.randint(1, most)]) + own
            stop = tuple(draw.sample(range(61), 4)) if draw.random() < 0.3 else ()
            how = draw.choice(hows) if hows[1:] else hows[0]
            settings = Settings(draw.randint(1, most), **how, seed=draw.randint(0, 2), stop=stop)
            added.append(engine.add(prompt, settings, number=len(added)))
            asked.append((prompt, settings))
            running.append(added[-1])
        engine.step()
        for request in running:
            if request.done and len(request.prompt) < most:
                begun.append([*request.prompt, *request.generated])
            elif not request.done and draw.random() < 0.003:
                engine.cancel(request)
        running = [request for request in running if not request.done]
    assert engine.step() == []
    ledger = engine.cache.ledger
    assert ledger.free == ledger.num_pages - 1 and ledger.num_shared == 0
    return num_alike(added, alone.each(asked))


@pytest.mark.parametrize(
    ("policy", "pages", "hows"),
    [(POLICIES[0], 21, MIXED), (POLICIES[1], None, GREEDY), (POLICIES[2], None, MIXED)],
    ids=["few pages, mixed", "token by token, greedy", "many slots, mixed"],
)
def test_each_gets_what_it_would_get_alone(decoder, alone, policy, pages, hows):
    engine = shared_engine(decoder, 4, pages, policy, columns=80)
    assert common_life(engine, alone, f"{policy}", 20, hows) > 10
    assert engine.prefix_cache_hit_rate > 0.2
    assert (engine.num_preempted > 0) == (pages is not None)


@pytest.mark.usefixtures("lagging")
def test_a_host_that_is_behind_hears_the_same(decoder, alone):
    engine = shared_engine(decoder, 4, 21, columns=80)
    assert common_life(engine, alone, "behind", 20, MIXED) > 8 and engine.prefix_cache_hit_rate > 0.2


def test_captured_steps_serve_those_that_share(decoder, alone):
    """A prompt that is there as a whole joins in a replay: it reads one token, as all others."""
    parts, counts = emulated(Recipe.parse(shared_recipe()).parts)
    engine = Engine(decoder, parts)
    engine.reserve(3, 94, Settings(2))
    prompt, settings = STEM[:16], Settings(5)
    for _ in range(3):
        request = engine.add(prompt, settings)
        finish(engine, request)
        assert tuple(request.generated) == alone(prompt, settings)
    assert request.cached == 15 and counts["replays"] > 0
    assert common_life(engine, alone, "captured", 15, MIXED[2:3]) > 7


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_reads_behind_what_is_there(name):
    """Prompts, and a beginning of each first: windows, rotations and norms of heads find what they need."""
    model, rows = ours(name).decoder, prompts()
    engine = shared_engine(model, 2, columns=32)
    for row in rows:
        finish(engine, engine.add(row[: len(row) // 2 + 1], Settings(2)))
    requests = [engine.add(row, Settings(NEW)) for row in rows]
    finish(engine, *requests)
    assert [tuple(request.generated) for request in requests] == expected(name)
    assert sum(request.cached for request in requests) > 0


def test_what_is_shared_is_not_written_and_a_copy_holds_the_same(decoder, alone):
    engine = shared_engine(decoder)
    first = engine.add(STEM[:16], Settings(4))
    finish(engine, first)
    [*pages] = engine.cache.ledger._idle
    before = engine.cache.keys[:, pages].clone(), engine.cache.values[:, pages].clone()
    again, other = engine.add(STEM[:16], Settings(9)), engine.add([*STEM[:12], 50], Settings(9))
    engine.step()
    assert (again.cached, other.cached) == (15, 12) and engine.cache.shared_bytes == 3 * 4 * engine.cache.column_bytes
    assert engine.cache.used_bytes <= engine.cache.taken_bytes
    finish(engine, again, other)
    assert torch.equal(before[0], engine.cache.keys[:, pages]) and torch.equal(before[1], engine.cache.values[:, pages])
    assert tuple(again.generated) == alone(STEM[:16], Settings(9))
    assert tuple(other.generated) == alone([*STEM[:12], 50], Settings(9))


def test_what_is_found_is_not_read_again(decoder, monkeypatch):
    engine, read = shared_engine(decoder), []
    passes = engine._slots.passes
    batch_of = passes._sent
    monkeypatch.setattr(passes, "_sent", lambda rows, *more: (read.extend(rows), batch_of(rows, *more))[1])
    for tail in (30, 31):
        finish(engine, engine.add([*STEM, tail, 40], Settings(2)))
    assert sum(row.count for row in read[:2]) == 22 and [row.start for row in read] == [0, 16, 20]
    assert engine.cache.prefix_cache_queries == 44 and engine.cache.prefix_cache_hits == 20
    assert engine.prefix_cache_hit_rate == pytest.approx(20 / 44)
    engine.reset_prefix_cache()
    assert engine.prefix_cache_hit_rate == 0 and not engine.cache.ledger._idle


def test_a_batch_begins_with_nothing_cached_and_shares_what_its_prompts_begin_with(decoder):
    rows = [[*STEM, 20 + row] for row in range(6)]
    plain, engine = Engine(decoder).generate(rows, Settings(5)).tokens, shared_engine(decoder)
    for _ in range(2):
        assert engine.generate(rows, Settings(5)).tokens == plain
        assert engine.prefix_cache_hit_rate == pytest.approx(5 * 20 / (6 * 21))
    forced = [[row] * 4 for row in range(6)]
    assert engine.generate(rows, Settings(4), forced=forced).tokens == tuple(map(tuple, forced))


def test_a_forecast_and_a_reservation_know_its_pages(decoder):
    rows = [[1] * length for length in (5, 17, 9, 30)]
    for store in ("paged", "paged:pages=9", "static"):
        engine = Engine(decoder, Recipe.parse(shared_recipe(store=store)).parts)
        forecast = engine.forecast(rows, Settings(8))
        engine.generate(rows, Settings(8))
        assert (forecast.kv_bytes, forecast.activation_bytes) == (engine.kv_bytes, engine.activation_bytes)


def test_it_keeps_the_knobs_of_pages_and_needs_a_batch_that_joins():
    def cache(words):
        return Recipe.parse(words).parts.kv_cache

    assert cache(shared_recipe(store="paged:page=32:pages=7")) == PagedKV(32, 8, True)
    assert cache(shared_recipe(store="static")) == PagedKV(prefix_caching=True), "pages, of the usual size"
    assert cache(recipe("static")) is StaticKV and not cache(recipe("paged")).prefix_caching
    with pytest.raises(RecipeError, match="prefix_caching needs .*continuous_batching"):
        Recipe.parse("all,prefix_caching")


def test_it_is_a_rung_whose_teacher_forced_logits_are_those_of_the_baseline():
    rows, recipe = [[*STEM, number] for number in range(3)], Recipe.parse(shared_recipe("rows=2:chunk=8:budget=8"))
    assert recipe.names[-2:] == ("continuous_batching", "prefix_caching")
    found = parity(ours("qwen3").decoder, recipe.parts, rows, Settings(4))
    assert found.verdict in ("identical", "within rounding"), found


def test_many_requests_leave_nothing_behind(decoder):
    parts = replace(Recipe.parse(shared_recipe()).parts, kv_cache=PagedKV(4, 14, True))
    Engine(decoder, parts).generate([[1]], Settings(2))
    before, draw, engine = held(), random.Random(0), Engine(decoder, parts)
    engine.reserve(1, 30, Settings(2))
    running, held_bytes = set(), None
    for _ in range(250):
        prompt = STEM[: draw.randint(1, 20)] + [draw.randrange(60)] * draw.randint(0, 2)
        running.add(engine.add(prompt, Settings(draw.randint(1, 3))))
        for request in [*running]:
            if request.done:
                running.discard(request)
            elif draw.random() < 0.1:
                engine.cancel(request)
        engine.step()
        now = engine.kv_bytes, engine.memory.held_bytes
        assert held_bytes in (None, now)
        held_bytes = now
    finish(engine, *running)
    ledger = engine.cache.ledger
    assert isinstance(engine.cache, SharedPages) and ledger.free == 13 and ledger._idle
    assert all(cached.reader is None for cached in ledger._by_page.values()), "requests that have left are forgotten"
    engine.close()
    running.clear()
    del engine, request, ledger
    assert held() == before
