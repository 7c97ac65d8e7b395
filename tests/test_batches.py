"""What passes read: batches of any layout, and the schedules that they follow from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from conftest import make_gpt2
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import hf_greedy
from torch.utils._python_dispatch import TorchDispatchMode

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import RecipeError
from eet_lab.models import load
from eet_lab.ops import reference
from eet_lab.ops.attention import within_window
from eet_lab.ops.shapes import AttentionShape
from eet_lab.ops.types import fresh
from eet_lab.parts.attend import Bounds
from eet_lab.parts.batches import batch_of, end_to_end, left_padded, make_batch
from eet_lab.scheduling import (
    LEFT_PADDED,
    PACKED,
    TOKEN_BY_TOKEN,
    UP_TO_THE_SHORTEST,
    Request,
    Row,
    Schedule,
    Scheduler,
    Slab,
)
from eet_lab.technique import Recipe

PADDED_RECIPE, PACKED_RECIPE = "pre_padding,mask_removal", "pre_padding,mask_removal,packed_prefill"
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=9)


def first_rows(schedule: Schedule, lengths: list[int]) -> list[Row]:
    """What a scheduler's first pass reads of prompts that begin together."""
    scheduler = Scheduler(schedule, Slab(len(lengths), 2000), 2000)
    for length in lengths:
        scheduler.add(Request((0,) * length, 1))
    return scheduler.next()


def numbered(lengths: list[int]) -> list[list[int]]:
    """Prompts in which every token is another one."""
    tokens = iter(range(1, sum(lengths) + 1))
    return [[next(tokens) for _ in range(length)] for length in lengths]


@given(LENGTHS)
@settings(deadline=None)
def test_texts_end_to_end_have_no_pad_and_every_token_of_left_padding(lengths):
    texts = numbered(lengths)
    batch, wide = end_to_end(texts), left_padded(texts)
    real = wide.columns >= wide.keys.begin[wide.rows]
    assert len(batch.ids) == sum(lengths) == int(real.sum())
    assert all(torch.equal(a, b[real]) for a, b in zip(batch[:3], wide[:3], strict=True)), "ids, positions, rows"
    assert torch.equal(batch.columns, batch.positions) and not batch.keys.begin.any() and not batch.keys.padded
    assert torch.equal(batch.ids[batch.last], wide.ids[wide.last])
    assert (batch.max_q, batch.max_kv) == (wide.max_q, wide.max_kv) == (max(lengths), max(lengths))


@given(LENGTHS)
@settings(deadline=None)
def test_first_and_count_are_cu_seqlens(lengths):
    batch = end_to_end(numbered(lengths))
    ends = torch.tensor(lengths).cumsum(0)
    assert batch.first.tolist() == [0, *ends[:-1].tolist()]
    assert batch.last.tolist() == (ends - 1).tolist()
    assert list(batch.spans) == list(zip(batch.first.tolist(), lengths, strict=True))
    assert list(batch.keys.spans) == [(0, length) for length in lengths]
    for row, (first, count) in enumerate(batch.spans):
        assert batch.rows[first : first + count].unique().tolist() == [row]


@given(LENGTHS, st.data())
@settings(deadline=None)
def test_a_batch_of_some_slots_is_what_each_row_says(lengths, data):
    """Slots in between read nothing; each row goes on where it was, behind its own pads."""
    num_rows = len(lengths) + 3
    slots = sorted(data.draw(st.permutations(range(num_rows)))[: len(lengths)])
    starts = data.draw(st.lists(st.integers(0, 30), min_size=len(lengths), max_size=len(lengths)))
    pads = data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    batch = make_batch(lengths, rows=slots, starts=starts, pads=pads, num_rows=num_rows)
    for slot in range(num_rows):
        mine = batch.rows == slot
        first, count = batch.spans[slot]
        assert int(mine.sum()) == count == batch.count[slot]
        if slot not in slots:
            assert batch.keys.spans[slot] == (0, 0)
            continue
        place = slots.index(slot)
        assert mine.nonzero()[0, 0] == first == batch.first[slot] and batch.last[slot] == first + count - 1
        assert batch.positions[mine].tolist() == list(range(starts[place], starts[place] + lengths[place]))
        assert torch.equal(batch.columns[mine], batch.positions[mine] + pads[place])
        assert batch.keys.begin[slot] == pads[place]
        assert batch.keys.spans[slot] == (pads[place], pads[place] + starts[place] + lengths[place])
    assert (batch.max_q, batch.max_kv) == (max(lengths), max(end for _, end in batch.keys.spans))


@pytest.mark.parametrize("lengths", [[5, 1, 9], [1], [7], [1, 1, 1], [0, 4], [0], [3, 3], list(range(64))])
@pytest.mark.parametrize("memory", ["", ",memory_reuse"])
def test_packed_tokens_equal_transformers(lengths, memory):
    model = make_gpt2()
    prompts = [[token % 499 for token in prompt] for prompt in numbered(lengths)]
    ours = Engine(load(model, device="cpu").decoder, Recipe.parse(PACKED_RECIPE + memory).parts)
    expected = hf_greedy(model, [prompt or [0] for prompt in prompts], 6)
    assert list(ours.generate(prompts, Settings(6)).tokens) == expected


def test_no_op_of_the_prefill_sees_a_pad(tiny):
    for words, most in ((PACKED_RECIPE, 18), (PADDED_RECIPE, 33)):
        parts, seen = Recipe.parse(words).parts, set()

        def norm(x, *args, seen=seen, **keywords):
            seen.add(len(x))
            return reference.norm(x, *args, **keywords)

        ops = replace(parts.ops, norm_linear=partial(parts.ops.norm_linear, norm=norm))
        Engine(tiny.decoder, replace(parts, ops=ops)).generate(numbered([2, 11, 5]), Settings(1))
        assert max(seen) == most


def test_prefill_needs_less_memory_and_decode_the_same(tiny):
    plans = {}
    for words in (PADDED_RECIPE, PACKED_RECIPE):
        engine = Engine(tiny.decoder, Recipe.parse(words + ",memory_reuse").parts)
        engine.generate(numbered([1, 30, 2]), Settings(4))
        plans[words] = engine.plans()
    assert plans[PACKED_RECIPE]["prefill"].footprint_bytes < 0.5 * plans[PADDED_RECIPE]["prefill"].footprint_bytes
    assert plans[PACKED_RECIPE]["decode"].lifetimes == plans[PADDED_RECIPE]["decode"].lifetimes
    assert plans[PACKED_RECIPE]["decode"].offsets == plans[PADDED_RECIPE]["decode"].offsets


def test_slots_serve_prompts_of_other_lengths_too(tiny):
    engine = Engine(tiny.decoder, Recipe.parse(PACKED_RECIPE + ",memory_reuse").parts)
    plain = Engine(tiny.decoder)
    for lengths in ([3, 9, 1], [3, 9, 1], [9, 3, 1], [3, 9, 2], [9, 9, 9]):
        prompts = [[(token * 7 + len(lengths)) % 499 for token in prompt] for prompt in numbered(lengths)]
        assert engine.generate(prompts, Settings(5)).tokens == plain.generate(prompts, Settings(5)).tokens


def test_packing_what_has_no_pads_is_refused():
    with pytest.raises(
        RecipeError, match="^packed_prefill cannot be combined with .*Choose read=whole, or leave packed_prefill out.$"
    ):
        Recipe.parse("pre_padding:read=shortest,mask_removal,packed_prefill")


@pytest.mark.parametrize("schedule", [TOKEN_BY_TOKEN, UP_TO_THE_SHORTEST, LEFT_PADDED, PACKED])
def test_a_layout_wakes_no_threads(schedule):
    """Of PyTorch's own work some is split among threads however little it is: with 16 it took 2 to 40 ms a request."""

    class Work(TorchDispatchMode):
        names: ClassVar[set[str]] = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(function.__name__)
            return function(*args, **(kwargs or {}))

    with Work() as work:
        batch_of(first_rows(schedule, [3, 900, 40]), 3, reads_pads=schedule.aligned)
    assert work.names <= {"lift_fresh.default", "detach.default"}, "numpy's numbers are taken as they are"


@pytest.mark.parametrize(
    ("schedule", "reads"),
    [(TOKEN_BY_TOKEN, [1, 1, 1]), (UP_TO_THE_SHORTEST, [2, 2, 2]), (LEFT_PADDED, [2, 9, 4]), (PACKED, [2, 9, 4])],
)
def test_what_the_first_pass_reads_follows_from_the_schedule(schedule, reads):
    batch = batch_of(first_rows(schedule, [2, 9, 4]), 3, reads_pads=schedule.aligned)
    assert batch.count.tolist() == reads == schedule.first_counts([2, 9, 4])
    assert batch.keys.begin.tolist() == ([7, 0, 5] if schedule.aligned else [0, 0, 0])
    assert len(batch.ids) == (27 if schedule.aligned else sum(reads))


@pytest.mark.parametrize("decode", [True, False])
def test_a_window_is_another_first_column_where_each_row_reads_one_token(decode):
    """Once a pass, for all layers; a prompt's tokens see different columns, so that theirs stays a matter of the op."""
    shape = AttentionShape((3, 9), 2, 2, 8, decode=decode, window=4)
    batch, asked = shape.batch("cpu"), []

    def empty(name, *of, **how):
        asked.append(name)
        return fresh(name, *of, **how)

    attend = Bounds(None, batch, None, empty=empty, window=4)
    assert attend.batch.keys.begin.tolist() == ([6, 5] if decode else [6, 0])
    assert within_window(attend.batch, 4, empty) is attend.batch if decode else attend.batch is batch
    assert asked == ["window_begin"] * decode
