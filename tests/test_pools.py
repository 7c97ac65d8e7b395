"""Pools against their promises, on sequences of random requests, and what each gives back when."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from test_planners import A_HUNDRED, UNIT, A, B, collide, seeds, trace
from valid_plans import validate

from eet_lab.errors import PlanError
from eet_lab.memory import (
    PLANNERS,
    POOLS,
    RELEASES,
    ArenaPool,
    Chunk,
    ChunkedPool,
    DriverCalls,
    FirstFitPool,
    Lifetime,
)
from eet_lab.memory.pools import LedgerPool


def requests(rng: random.Random) -> Iterator[tuple[Lifetime, ...]]:
    """Some requests that come one after the other: new ones, and earlier ones again, also larger and smaller."""
    seen: list[tuple[Lifetime, ...]] = []
    for _ in range(10):
        if seen and rng.random() < 0.5:
            scale = rng.choice((1, 1, 2, 3))
            new = tuple(Lifetime(x.name, x.num_bytes * scale, x.first, x.last) for x in rng.choice(seen))
        else:
            new = trace(rng, most=8, unit=rng.choice((UNIT, 100)))
        seen.append(new)
        yield new


MAKERS = {
    "arena": ArenaPool,
    "arena, fit": lambda: ArenaPool(policy="fit"),
    "eet": lambda: FirstFitPool(repaired=False),
    "eet, repaired": FirstFitPool,
} | {
    f"chunked, {order}, {release}": lambda order=order, release=release: ChunkedPool(order, release, 16 * UNIT)
    for order in ("arrival", "ascending")
    for release in RELEASES
}
STEADY = ("arena", "eet", "chunked, arrival, never")
"""These give a request that comes again the same addresses, without a call."""

SETTLING = ("eet, repaired", "chunked, ascending, never")
"""What the first time added may be found sooner the second time, and then something else is missing."""


@pytest.mark.parametrize("name", MAKERS)
@A_HUNDRED
@given(seed=seeds)
def test_pools_place_every_request(name, seed):
    rng = random.Random(seed)
    for _ in range(3):
        pool, ever = MAKERS[name](), dict[int, Chunk]()
        for request in requests(rng):
            plan = validate(pool.place(request))
            assert plan.lifetimes == request and not collide(plan)
            assert plan.chunks == pool.chunks and plan.footprint_bytes >= plan.lower_bound_bytes
            _check_books(pool, ever)
            if name in STEADY:
                calls = pool.calls
                assert pool.place(request) == plan and pool.calls == calls
            if name in SETTLING:
                settled = [pool.place(request) and pool.calls for _ in range(4)]
                assert settled[-1] == settled[-2]
                _check_books(pool, ever)


def _check_books(pool, ever: dict[int, Chunk]) -> None:
    """The calls tell what is held, and an id means one allocation for good; `ever` are all chunks so far."""
    calls = pool.calls
    for chunk in pool.chunks:
        assert ever.setdefault(chunk.id, chunk) == chunk
    assert (calls.allocations, calls.frees) == (len(ever), len(ever) - len(pool.chunks))
    assert calls.allocated_bytes == sum(chunk.num_bytes for chunk in ever.values())
    assert calls.held_bytes == sum(chunk.num_bytes for chunk in pool.chunks)


def test_calls_add_and_subtract():
    early, late = DriverCalls(1, 0, 100, 0), DriverCalls(3, 2, 700, 400)
    assert late - early == DriverCalls(2, 2, 600, 400) and early + (late - early) == late and late.held_bytes == 300


def test_an_arena_grows_or_is_made_anew():
    small, large = ([Lifetime("x", size * UNIT, 0, 0)] for size in (1, 3))
    grown, fit = ArenaPool(), ArenaPool(policy="fit")
    for request in (small, large, small):
        for pool in (grown, fit):
            assert [chunk.start for chunk in pool.place(request).chunks] == [0]
    assert grown.calls == DriverCalls(2, 1, 4 * UNIT, UNIT) and grown.chunks == (Chunk(1, 0, 3 * UNIT),)
    assert fit.calls == DriverCalls(3, 2, 5 * UNIT, 4 * UNIT) and fit.chunks == (Chunk(2, 0, UNIT),)


def test_the_smallest_gap_that_fits_is_taken():
    """While the last two live, units [0, 6) and [11, 15) are free."""
    lives = [("a", 6, 0, 1), ("b", 5, 0, 3), ("c", 4, 0, 1), ("d", 3, 0, 3), ("e", 2, 2, 3), ("f", 2, 2, 3)]
    request = [Lifetime(name, size * UNIT, first, last) for name, size, first, last in lives]
    plan = ChunkedPool(chunk_bytes=20 * UNIT).place(request)
    assert [offset // UNIT for offset in plan.offsets] == [0, 6, 11, 15, 11, 13]
    assert [offset // UNIT for offset in PLANNERS["greedy_by_size"](request).offsets] == [0, 6, 11, 15, 0, 2]


@pytest.mark.parametrize(
    ("release", "frees"), [("immediate", [0, 1, 0, 1]), ("idle", [0, 0, 0, 0]), ("never", [0] * 4)]
)
def test_when_an_empty_chunk_is_given_back(release, frees):
    small, both = [Lifetime("a", UNIT, 0, 0)], [Lifetime("a", UNIT, 0, 0), Lifetime("b", 9 * UNIT, 0, 0)]
    pool, seen = ChunkedPool(release=release, chunk_bytes=UNIT, scale=1), []
    for request in (both, small, both, small):
        before = pool.calls
        pool.place(request)
        seen.append((pool.calls - before).frees)
    assert seen == frees


def test_idle_chunks_go_when_their_time_is_up():
    pool = ChunkedPool(release="idle", chunk_bytes=UNIT, scale=1)
    pool.place([Lifetime("a", UNIT, 0, 0), Lifetime("b", 9 * UNIT, 0, 0)])
    held = []
    for _ in range(RELEASES["idle"]):
        pool.place([Lifetime("b", 9 * UNIT, 0, 0)])
        held.append(len(pool.chunks))
    assert held == [2] * (len(held) - 1) + [1]


def test_a_new_chunk_is_larger_than_its_tensor():
    pool = ChunkedPool(chunk_bytes=10 * UNIT, scale=1.5)
    for size, num_bytes in ((4, 10 * UNIT), (11, 17 * UNIT)):  # 16.5 units, rounded up
        assert pool.place([Lifetime("x", size * UNIT, 0, 0)]).footprint_bytes == num_bytes


def test_chunks_start_where_tensors_may_and_fill_gaps_in_the_address_space():
    ledger = LedgerPool()
    _, second, _ = (ledger.allocate(num_bytes) for num_bytes in (992, 512, 320))
    assert [chunk.start for chunk in ledger.chunks] == [0, 1024, 1536]
    ledger.free(second)
    assert ledger.allocate(512) == Chunk(3, 1024, 512), "as large as the gap"
    assert ledger.allocate(32) == Chunk(4, 2048, 32)
    assert [chunk.id for chunk in ledger.chunks] == [0, 3, 2, 4] and [chunk.id for chunk in ledger.held] == [0, 2, 3, 4]


def test_eet_takes_the_first_buffer_and_its_repair_the_smallest():
    large, small = Lifetime("large", 9 * UNIT, 0, 0), Lifetime("small", 3 * UNIT, 0, 0)
    later, strict = Lifetime("later", 2 * UNIT, 1, 1), Lifetime("ffn_inner", 2 * UNIT, 1, 1)
    offsets = {}
    for repaired in (False, True):
        pool = FirstFitPool(repaired)
        offsets[repaired] = pool.place([large, small, later]).offsets
        assert pool.calls == DriverCalls(2, 0, 12 * UNIT, 0)
    assert offsets == {False: (0, 9 * UNIT, 0), True: (0, 9 * UNIT, 9 * UNIT)}
    assert len(FirstFitPool(False).place([large, small, strict]).chunks) == 3, "no buffer has exactly its size"


def test_eet_ends_at_the_101st_buffer_and_its_repair_does_not():
    many = [Lifetime(f"b{i}", UNIT, 0, 0) for i in range(101)]
    assert len(FirstFitPool(False).place(many[:100]).chunks) == 100
    with pytest.raises(PlanError, match=r"b100 asks for 256 bytes.* already 100, which is EET's limit.*repaired"):
        FirstFitPool(False).place(many)
    assert len(FirstFitPool(True).place(many).chunks) == 101


def cached(num_bytes: int) -> list[Lifetime]:
    return [Lifetime("emb_cache", num_bytes, 0, 2), Lifetime("qkv", 2 * UNIT, 1, 2)]


def test_a_second_larger_model_does_not_get_the_first_ones_cache():
    pool = FirstFitPool(False)
    pool.place(cached(4 * UNIT))
    assert list(pool.caches) == ["emb_cache"] and [buffer.num_bytes for buffer in pool.buffers] == [2 * UNIT]
    assert pool.place(cached(3 * UNIT)).footprint_bytes == 6 * UNIT, "smaller is fine, however much is wasted"
    with pytest.raises(PlanError, match=r"emb_cache asks for 1,280 bytes.*made with 1,024.*256 bytes beyond its end"):
        pool.place(cached(5 * UNIT))
    repaired = FirstFitPool(True)
    for size in (4, 5):
        validate(repaired.place(cached(size * UNIT)))


def test_a_cache_in_use_is_not_handed_out_again():
    twice = [Lifetime("emb_cache", UNIT, 0, 2), Lifetime("emb_cache", UNIT, 1, 2)]
    with pytest.raises(PlanError, match="asked for at request 1, but the one of request 0 is in use until request 2"):
        FirstFitPool(False).place(twice)


@pytest.mark.parametrize("alone", [{"order": "size"}, {"release": "now"}, {"chunk_bytes": 0}, {"scale": 0.9}])
def test_a_chunked_pool_says_what_it_can_be(alone):
    with pytest.raises(PlanError, match=next(iter(alone))):
        ChunkedPool(**alone)


def test_an_arena_says_what_it_can_be():
    with pytest.raises(PlanError, match="policy is 'shrink', but it must be one of grow, fit"):
        ArenaPool(policy="shrink")


@pytest.mark.parametrize("name", POOLS)
def test_every_choice_makes_a_fresh_pool(name):
    first, second = POOLS[name](), POOLS[name](release="never")
    first.place([A, B])
    assert first.calls.allocations >= 1 and second.calls == DriverCalls() and second.chunks == ()


def test_release_reaches_the_chunks():
    held = {}
    for release in RELEASES:
        pool = POOLS["chunked"](release=release)
        pool.place([Lifetime("x", 9 * 2**20, 0, 0), Lifetime("y", 2 * 2**20, 0, 0)])
        pool.place([A])
        held[release] = len(pool.chunks)
    assert held == {"immediate": 1, "idle": 2, "never": 2}


@pytest.mark.parametrize("numbers", [(-1, 0, 1), (256, 3, 1), ("256", 0, 1), (256, 0, 1.5)])
def test_a_lifetime_that_cannot_be_is_refused(numbers):
    with pytest.raises(PlanError, match="lifetime 'a'"):
        Lifetime("a", *numbers)
