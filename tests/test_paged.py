"""Keys and values that grow, in one slab and in pages: the same tokens, and what each of them costs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import OutOfMemory
from eet_lab.ops import reference
from eet_lab.parts import paged_kv
from eet_lab.parts.kv_cache import GrowingKV, StaticKV
from eet_lab.parts.paged_kv import HIDDEN, PagedKV, Pages
from eet_lab.technique import Recipe

LAYOUTS = ("", "pre_padding", "pre_padding:read=shortest", "pre_padding,mask_removal", "mask_removal")
LAYOUTS += ("pre_padding,mask_removal,packed_prefill",)
CACHES = {"growing": GrowingKV, "static": StaticKV, "paged": PagedKV(16), "small pages": PagedKV(4)}


def batch(seed: int, lengths: list[int]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, 499) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Shuffled(PagedKV):
    """Pages in no order, which nobody may rely on."""

    def __call__(self, *args) -> Pages:
        class Random(Pages):
            def _open(self, num_pad, capacity, ends):
                super()._open(num_pad, capacity, ends)
                random.Random(7).shuffle(self.ledger._free)

        return Random(*args, self.page)


@pytest.mark.parametrize("words", LAYOUTS)
def test_tokens_do_not_depend_on_how_keys_and_values_are_kept(tiny, words):
    parts = Recipe.parse(words).parts
    for lengths in ([37, 1, 16, 17], [5], [16, 16], [1, 1, 33]):
        prompts = batch(1, lengths)
        tokens = {
            name: Engine(tiny.decoder, replace(parts, kv_cache=kind)).generate(prompts, Settings(20)).tokens
            for name, kind in (CACHES | {"shuffled": Shuffled(8)}).items()
        }
        assert len(set(tokens.values())) == 1, tokens


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 30), st.sampled_from([1, 3, 16]))
@settings(max_examples=25, deadline=None)
def test_pages_hold_what_was_written_and_no_row_writes_into_anothers(lengths, more, page):
    """By the table alone: no page has two owners, every column that exists has one, and pads take none."""
    longest = max(lengths)
    pads = [longest - length for length in lengths]
    cache = Pages(1, 1, 8, torch.empty(0), page)
    for _ in range(2):
        cache.open(pads, longest + more)
        for row, pad in enumerate(pads):
            cache.ledger.skip(row, pad)
        for end in range(longest, longest + more):
            assert all(cache.ledger.reach(row, end) for row in range(len(pads)))
            cache.mirror()
        cache.keep([end - pad for pad in pads])
        table = cache.block_table
        owned = [[table[row, column // page].item() for column in range(pad, end)] for row, pad in enumerate(pads)]
        owners = [set(pages) for pages in owned]
        assert HIDDEN not in set().union(*owners)
        assert sum(map(len, owners)) == len(set().union(*owners)) == cache.num_pages - 1 - cache.num_free_pages
        assert cache.used_bytes == sum(map(len, owned)) * cache.column_bytes
        assert 0 <= cache.taken_bytes - cache.used_bytes < 2 * page * len(lengths) * cache.column_bytes


def test_pages_that_nothing_was_written_to_are_never_read(tiny):
    parts, prompts = Recipe.parse("pre_padding,mask_removal,memory_reuse:kv=paged").parts, batch(3, [20, 3, 11])

    @dataclass(frozen=True)
    class Poisoned(PagedKV):
        def __call__(self, *args):
            class Pool(Pages):
                def _open(self, num_pad, capacity, ends):
                    super()._open(num_pad, capacity, ends)
                    self.keys.fill_(torch.nan)
                    self.values.fill_(torch.nan)

            return Pool(*args, self.page)

    want = Engine(tiny.decoder, parts).generate(prompts, Settings(30)).tokens
    assert Engine(tiny.decoder, replace(parts, kv_cache=Poisoned())).generate(prompts, Settings(30)).tokens == want


def test_a_batch_with_nan_does_not_poison_the_next_in_pages(tiny):
    engine = Engine(tiny.decoder, Recipe.parse("pre_padding,memory_reuse:kv=paged").parts)
    want = engine.generate([[1, 2], [3]], Settings(5)).tokens
    with torch.inference_mode():
        engine.cache.keys.fill_(torch.nan)
        engine.cache.values.fill_(torch.nan)
    assert engine.generate([[1, 2], [3]], Settings(5)).tokens == want


def test_more_pages_than_there_is_memory_for_are_named(tiny, monkeypatch):
    monkeypatch.setattr(paged_kv, "free_bytes_of", lambda device: 2**20)
    engine = Engine(tiny.decoder, Recipe.parse("memory_reuse:kv=paged:pages=100").parts)
    with pytest.raises(OutOfMemory, match=r"^pages is 100, whose keys and values take 1.77. MiB, but 1 MiB are free"):
        engine.generate([[1, 2]], Settings(5))
    assert engine.kv_bytes == 0


def test_what_each_cache_costs(tiny):
    prompts, num_new, column = batch(5, [40, 4]), 9, 3 * 2 * 48 * 4
    costs = {}
    for name, kind in CACHES.items():
        parts = replace(Recipe.parse("pre_padding").parts, kv_cache=kind)
        engine = Engine(tiny.decoder, parts)
        engine.generate(prompts, Settings(num_new))
        costs[name] = engine.cache
        assert engine.cache.used_bytes == ((40 + 8) + (4 + 8)) * column
    assert costs["growing"].num_bytes == 2 * 48 * column
    assert costs["growing"].copied_bytes == sum(range(40, 48)) * 2 * column
    assert costs["static"].num_bytes == 2 * 49 * column
    assert costs["paged"].num_bytes == (1 + 4 + 2) * 16 * column  # the hidden page; 49 columns; 36 pads fill two pages
    assert costs["paged"].taken_bytes == (3 + 1) * 16 * column
    assert not any(costs[name].copied_bytes for name in ("static", "paged", "small pages"))
    assert costs["small pages"].num_bytes < costs["paged"].num_bytes < costs["static"].num_bytes * 1.2


def test_what_was_captured_is_void_when_pages_move(tiny):
    """Rows of fewer pads need more pages: the same session goes on, but no graph may write to the old pool."""
    launches = []

    def launch(decode, longest, pool):
        launches.append(decode)
        return decode

    parts = replace(Recipe.parse("pre_padding,memory_reuse:kv=paged").parts, launch=launch)
    parts = replace(parts, ops=replace(parts.ops, attention=reference.masked_attention))  # not used: there is a mask
    engine = Engine(tiny.decoder, parts)
    for lengths, num_launches in (([60, 1], 1), ([60, 2], 1), ([60, 50], 2), ([1, 60], 2)):
        prompts = batch(0, lengths)
        assert (
            engine.generate(prompts, Settings(3)).tokens == Engine(tiny.decoder).generate(prompts, Settings(3)).tokens
        )
        assert len(launches) == num_launches


def test_a_smaller_batch_takes_what_is_held():
    for kind in (StaticKV, PagedKV(16)):
        cache = kind(2, 3, 8, torch.empty(0))
        cache.open([0] * 4, 100)
        held, at = cache.num_bytes, cache.keys.data_ptr()
        for rows, capacity in ((1, 100), (4, 100), (3, 17), (2, 99)):
            cache.open([0] * rows, capacity)
            assert (cache.num_bytes, cache.keys.data_ptr()) == (held, at)
        cache.open([0] * 5, 100)
        assert cache.num_bytes > held
        cache.close()
        assert cache.num_bytes == 0


@pytest.mark.parametrize("kind", [GrowingKV, StaticKV, PagedKV(4)])
@pytest.mark.parametrize("words", LAYOUTS)
def test_used_bytes_count_what_was_kept_whatever_the_layout(tiny, kind, words):
    engine = Engine(tiny.decoder, replace(Recipe.parse(words).parts, kv_cache=kind))
    prompts = batch(3, [20, 3, 9])
    done = engine.generate(prompts, Settings(6))
    kept = sum(len(row) + len(new) - 1 for row, new in zip(prompts, done.tokens, strict=True))
    assert engine.cache.used_bytes == kept * engine.cache.column_bytes
    engine.close()
    assert engine.cache.used_bytes == 0
