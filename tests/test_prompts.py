"""Where prompts are laid out: canvases, first steps, and the one without pads."""

from __future__ import annotations

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
from eet_lab.parts.prompts import packed, right_aligned, token_by_token, up_to_the_shortest
from eet_lab.technique import Recipe

PADDED, PACKED = "pre_padding,mask_removal", "pre_padding,mask_removal,packed_prefill"
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=9)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Prompts in which every token is another one."""
    tokens = iter(range(1, sum(lengths) + 1))
    return [[next(tokens) for _ in range(length)] for length in lengths]


@given(LENGTHS, st.integers(1, 8))
@settings(deadline=None)
def test_a_packed_step_has_no_pad_and_every_token_where_right_alignment_has_it(lengths, room):
    prompts = numbered(lengths)
    state, step = packed(prompts, room)
    wide_state, wide = right_aligned(prompts, room)
    assert len(step.ids) == sum(lengths) == len(step.positions) == len(step.rows) == len(step.columns)
    assert (step.columns >= step.num_pad[step.rows]).all()
    real = wide.columns >= wide.num_pad[wide.rows]
    assert torch.equal(torch.stack(step[:4]), torch.stack(wide[:4])[:, real])
    assert all(torch.equal(a, b) for a, b in zip(state, wide_state, strict=True))
    assert torch.equal(step.ids[step.last], wide.ids[wide.last])
    assert (step.extent, step.num_pad.tolist()) == (wide.extent, wide.num_pad.tolist())


@given(LENGTHS)
@settings(deadline=None)
def test_first_and_count_are_cu_seqlens(lengths):
    _, step = packed(numbered(lengths), 1)
    ends = torch.tensor(lengths).cumsum(0)
    assert step.first.tolist() == [0, *ends[:-1].tolist()]
    assert step.last.tolist() == (ends - 1).tolist()
    assert [span[:2] for span in step.spans] == list(zip(step.first.tolist(), lengths, strict=True))
    assert [step.rows[span.first : span.first + span.count].unique().tolist() for span in step.spans] == [
        [row] for row in range(len(lengths))
    ]


@pytest.mark.parametrize("lengths", [[5, 1, 9], [1], [7], [1, 1, 1], [0, 4], [0], [3, 3], list(range(64))])
@pytest.mark.parametrize("memory", ["", ",memory_reuse"])
def test_packed_tokens_equal_transformers(lengths, memory):
    model = make_gpt2()
    prompts = [[token % 499 for token in prompt] for prompt in numbered(lengths)]
    ours = Engine(load(model, device="cpu").decoder, Recipe.parse(PACKED + memory).parts)
    expected = hf_greedy(model, [prompt or [0] for prompt in prompts], 6)
    assert list(ours.generate(prompts, Settings(6)).tokens) == expected


def test_no_op_of_the_prefill_sees_a_pad(tiny, monkeypatch):
    seen, norm = set(), reference.norm
    monkeypatch.setattr(reference, "norm", lambda x, *args, **kw: seen.add(len(x)) or norm(x, *args, **kw))
    Engine(tiny.decoder, Recipe.parse(PACKED).parts).generate(numbered([2, 11, 5]), Settings(1))
    assert max(seen) == 18
    Engine(tiny.decoder, Recipe.parse(PADDED).parts).generate(numbered([2, 11, 5]), Settings(1))
    assert max(seen) == 33


def test_prefill_needs_less_memory_and_decode_the_same(tiny):
    plans = {}
    for words in (PADDED, PACKED):
        engine = Engine(tiny.decoder, Recipe.parse(words + ",memory_reuse").parts)
        engine.generate(numbered([1, 30, 2]), Settings(4))
        plans[words] = engine.plans()
    assert plans[PACKED]["prefill"].footprint_bytes < 0.5 * plans[PADDED]["prefill"].footprint_bytes
    assert plans[PACKED]["decode"].lifetimes == plans[PADDED]["decode"].lifetimes
    assert plans[PACKED]["decode"].offsets == plans[PADDED]["decode"].offsets


def test_a_session_serves_prompts_of_other_lengths_too(tiny):
    engine = Engine(tiny.decoder, Recipe.parse(PACKED + ",memory_reuse").parts)
    plain = Engine(tiny.decoder)
    for lengths in ([3, 9, 1], [3, 9, 1], [9, 3, 1], [3, 9, 2], [9, 9, 9]):
        prompts = [[(token * 7 + len(lengths)) % 499 for token in prompt] for prompt in numbered(lengths)]
        assert engine.generate(prompts, Settings(5)).tokens == plain.generate(prompts, Settings(5)).tokens


def test_packing_what_has_no_pads_is_refused():
    with pytest.raises(RecipeError, match="read=shortest has none; choose read=whole"):
        Recipe.parse("pre_padding:read=shortest,mask_removal,packed_prefill")


@pytest.mark.parametrize("layout", [token_by_token, up_to_the_shortest, right_aligned, packed])
def test_a_layout_wakes_no_threads(layout):
    """Of PyTorch's own work some is split among threads however little it is: with 16 it took 2 to 40 ms a request."""

    class Work(TorchDispatchMode):
        names: ClassVar[set[str]] = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(function.__name__)
            return function(*args, **(kwargs or {}))

    with Work() as work:
        layout([[5] * length for length in (3, 900, 40)], 9)
    assert work.names <= {"lift_fresh.default", "detach.default"}, "numpy's numbers are taken as they are"
