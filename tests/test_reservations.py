"""What a reservation holds, and which batches it serves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from test_memory import PLANNED, drawn

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.engine.slot_passes import SlotPasses
from eet_lab.errors import OutOfMemory, PromptError
from eet_lab.ops import reference
from eet_lab.technique import Recipe

RESERVABLE = ["memory_reuse", PLANNED, "pre_padding,mask_removal,memory_reuse:kv=paged"]
RESERVABLE += ["pre_padding,mask_removal,packed_prefill,memory_reuse", "pre_padding,memory_reuse:planner=chunked"]


@pytest.mark.parametrize("recipe", RESERVABLE)
def test_after_a_reservation_no_smaller_request_allocates(tiny, recipe):
    engine, plain, draw = Engine(tiny.decoder, Recipe.parse(recipe).parts), Engine(tiny.decoder), random.Random(1)
    engine.reserve(3, 40, Settings(9))
    held = engine.activation_bytes, engine.kv_bytes, engine.memory.calls, engine.memory.generation, addresses(engine)
    for _ in range(12):
        prompts, settings = drawn(draw, draw.randint(1, 3), 40), Settings(draw.randint(1, 9))
        assert engine.generate(prompts, settings).tokens == plain.generate(prompts, settings).tokens
        assert held == (engine.activation_bytes, engine.kv_bytes, engine.memory.calls, 1, addresses(engine))
    engine.generate([[1] * 60] * 8, Settings(9))
    assert engine.kv_bytes > held[1] and engine.activation_bytes >= held[0]


def test_a_reservation_runs_a_decode_step_whatever_stops_a_row(tiny, monkeypatch):
    steps, decode = [], SlotPasses._decode
    monkeypatch.setattr(SlotPasses, "_decode", lambda self, *given: (steps.append(given), decode(self, *given)))
    Engine(tiny.decoder, Recipe.parse(PLANNED).parts).reserve(2, 10, Settings(6, stop=tuple(range(499))))
    assert steps


def addresses(engine: Engine) -> list[int]:
    """Where all lies that an engine keeps."""
    chunks = [*engine.memory._chunks.values()]
    return [part.data_ptr() for part in (*chunks, engine.cache.keys, engine.staging._data, engine.slot_staging._data)]


def test_slots_serve_every_batch_that_a_reservation_covers(tiny):
    engine, draw = Engine(tiny.decoder, Recipe.parse(PLANNED).parts), random.Random(2)
    engine.reserve(2, 50, Settings(8))
    slots, tokens = engine._slots, engine._slots.passes.table.buffer.tokens.data_ptr()
    for _ in range(5):
        engine.generate(drawn(draw, 2, 50), Settings(draw.randint(1, 8)))
        assert engine._slots is slots and slots.passes.table.buffer.tokens.data_ptr() == tokens
    engine.generate(drawn(draw, 1, 50), Settings(8))
    assert engine._slots is not slots
    prompts = drawn(draw, 2, 50)
    assert engine.generate(prompts, Settings(8)).tokens == Engine(tiny.decoder).generate(prompts, Settings(8)).tokens
    assert engine._slots is slots
    engine.generate(drawn(draw, 3, 50), Settings(8))
    assert list(engine._all_slots.values()) == [engine._slots]


def test_a_request_that_asks_for_other_things_than_was_reserved_is_placed_in_the_same_memory(tiny):
    def more_for_few(ids, positions, words, places, *, empty):
        if len(ids) < 40:
            empty("few", (len(ids),), words)
        return reference.embed(ids, positions, words, places, empty=empty)

    parts = Recipe.parse(PLANNED).parts
    engine = Engine(tiny.decoder, replace(parts, ops=replace(parts.ops, embed=more_for_few)))
    plain = Engine(tiny.decoder)
    engine.reserve(2, 50, Settings(8))
    calls, names = engine.memory.calls, []
    for lengths in ([50, 40], [3, 2], [30, 30]):
        prompts = [[7] * length for length in lengths]
        assert engine.generate(prompts, Settings(8)).tokens == plain.generate(prompts, Settings(8)).tokens
        names.append([life.name for life in engine.plans()["prefill"].lifetimes].count("few"))
        assert engine.memory.calls == calls
    assert names == [0, 1, 0]


@pytest.mark.parametrize(
    ("rows", "tokens", "told"),
    [
        (0, 8, "num_rows is 0"),
        (2, -4, "prompt_tokens is -4"),
        (True, 8, "num_rows is True"),
        (2, "8", "prompt_tokens is '8'"),
        (2, 10**9, "prompt_tokens is 1,000,000,000; .* context of 128"),
    ],
)
def test_what_cannot_be_reserved_is_named_before_any_work(tiny, rows, tokens, told):
    with pytest.raises(PromptError, match=told):
        Engine(tiny.decoder).reserve(rows, tokens, Settings(4))


def test_a_reservation_that_fails_leaves_the_last_one_or_none(tiny):
    engine = Engine(tiny.decoder, Recipe.parse(PLANNED).parts)
    engine.reserve(3, 40, Settings(9))
    held = engine.kv_bytes, engine._reserved
    with pytest.raises(PromptError, match="num_rows is 0"):
        engine.reserve(0, 8)
    assert held == (engine.kv_bytes, engine._reserved)
    for words in ("pre_padding,memory_reuse:kv=paged:pages=4", "all,continuous_batching,memory_reuse:kv=paged:pages=4"):
        engine = Engine(tiny.decoder, Recipe.parse(words).parts)
        with pytest.raises(PromptError, match="pages"):
            engine.reserve(8, 100, Settings(4))
        assert (engine._reserved, engine.activation_bytes, engine.kv_bytes) == ((0, 0), 0, 0)


def test_more_rows_than_the_device_has_room_for_are_refused_before_they_are_laid_out(tiny):
    with pytest.raises(OutOfMemory, match="num_rows is 1,000,000,000, but .* at the very most, .*forecast"):
        Engine(tiny.decoder).reserve(10**9, 8, Settings(4))
