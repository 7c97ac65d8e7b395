"""The ends of a decode step without a GPU: the cases, ties under top-k and top-p, and the technique that fuses them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from every_shape import every_shape
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import KernelError, RecipeError
from eet_lab.ops import cuda, reference
from eet_lab.ops.cases import CaseFailed
from eet_lab.ops.next_token_case import NextTokenShape
from eet_lab.ops.token_cases import TOKEN_CASES, ChooseShape
from eet_lab.ops.types import Sampling, fresh
from eet_lab.parts import Parts, replaced
from eet_lab.technique import Recipe

SMALL = 300_000  # bytes that a shape may read, so that the CPU is not kept busy
CASE = {case.name: case for case in TOKEN_CASES}


@every_shape(TOKEN_CASES, SMALL)
def test_the_reference_passes(case, shape):
    case.check(getattr(reference, case.op), shape, "cpu", torch.float32)


def wrong_embed(ids, positions, words, places, *, empty):
    return reference.embed(ids, positions.roll(1), words, places, empty=empty)


def second_best(logits, positions, sampling, *, empty):
    best = reference.choose(logits, positions, sampling)
    return reference.choose(logits.scatter(-1, best[:, None], -torch.inf), positions, sampling)


def deaf_choose(logits, positions, sampling, *, empty):
    """It draws with another row's noise."""
    return reference.choose(logits.roll(1, 0), positions.roll(1), sampling).roll(-1)


def wrong_row(x, step, norm_w, head, sampling, *, empty):
    """It reads its row's first token, and not its newest."""
    return reference.next_token(x, step._replace(last=step.last * 0), norm_w, head, sampling, empty=empty)


def highest_of_ties(x, step, norm_w, head, sampling, *, empty):
    logits = reference.newest_logits(x, step, norm_w, head, empty=empty)
    return logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)


def without_noise(x, step, norm_w, head, sampling, *, empty):
    """It draws the likeliest word."""
    return reference.newest_logits(x, step, norm_w, head, empty=empty).argmax(-1)


def without_top_k(x, step, norm_w, head, sampling, *, empty):
    return reference.next_token(x, step, norm_w, head, sampling._replace(top_k=sampling.top_k * 0), empty=empty)


def of_one_block(logits, best, rows, positions, sampling, *, empty):
    """It looks at a single block, the one with the largest."""
    V, word = logits.shape[1], logits.argmax(-1, keepdim=True)
    size = -(-V // best.shape[1])
    near = (torch.arange(V) - word).abs() < size
    kept = logits.masked_fill(~near, -torch.inf)
    return reference.choose_top_k(kept, best, rows, positions, sampling, empty=empty)


def wrong_advance(state, token, count, *, empty):
    """It takes no notice of rows that are done."""
    reference.advance(state._replace(limit=state.limit + 9), token, count, empty=empty)


def hasty_advance(state, token, count, *, empty):
    """It takes what was generated for what the prompt says."""
    reference.advance(state._replace(end=state.end * 0), token, count, empty=empty)


@pytest.mark.parametrize(
    ("op", "wrong", "shape"),
    [
        ("embed", wrong_embed, "t5/c8"),
        ("choose", second_best, "b3/v4096/greedy"),
        ("choose", deaf_choose, "b3/v4096/temp0.8"),
        ("next_token", wrong_row, "b2/t9/v499/c64"),
        ("next_token", highest_of_ties, "b4/t4/v1003/c64/tied"),
        ("next_token", wrong_row, "b3/t7/v1001/c64/temp0.8"),
        ("next_token", without_noise, "b16/t16/v1001/c72/temp1.3"),
        ("next_token", without_top_k, "b20/t67/v499/c64/temp1/k10"),
        ("choose_top_k", of_one_block, "b3/v4096/temp1/k50/blocks132"),
        ("advance", wrong_advance, "b33/s40"),
        ("advance", hasty_advance, "b33/s40"),
    ],
)
def test_every_case_fails_an_op_that_is_wrong(op, wrong, shape):
    [found] = [each for each in CASE[op].shapes if str(each) == shape]
    with pytest.raises(CaseFailed):
        CASE[op].check(wrong, found, "cpu", torch.float32)


def test_a_word_outside_of_the_top_k_fails_even_if_its_noise_is_the_largest():
    def careless(logits, positions, sampling, *, empty):
        return reference.choose(logits, positions, sampling._replace(top_k=sampling.top_k * 0))

    with pytest.raises(CaseFailed, match="error inf"):
        CASE["choose"].check(careless, ChooseShape(64, 1000, 2.0, top_k=2), "cpu", torch.float32)


def drawn(logits, **how):
    """All words that are ever drawn."""
    rows, asked = torch.tensor(logits).expand(4000, -1), (1.0, how.get("top_k", 0), how.get("top_p", 1.0))
    sampling = Sampling.of(reference.noise_keys(3, 4000), [asked] * 4000, len(logits))
    return set(reference.choose(rows, torch.arange(4000), sampling).tolist())


def test_words_that_tie_with_the_last_one_stay():
    logits = [0.3, 0.2, 0.2, 0.1, 0.2]
    logits = torch.tensor(logits).log().tolist()
    assert drawn(logits, top_k=2) == {0, 1, 2, 4}
    assert drawn(logits, top_p=0.31) == {0, 1, 2, 4}
    assert drawn(logits, top_p=0.29) == {0}
    assert drawn(logits, top_k=1, top_p=0.5) == {0}
    assert drawn(logits, top_p=0.95) == {0, 1, 2, 3, 4}


@given(
    st.lists(st.integers(-8, 8), min_size=2, max_size=12),
    st.floats(0.01, 0.99),
    st.integers(0, 2**62 - 1),
)
def test_top_p_keeps_the_words_whose_betters_have_less_mass(logits, top_p, seed):
    scores = torch.tensor([logits], dtype=torch.float32)
    chances = scores.double().softmax(-1)[0]
    better = torch.stack([chances[scores[0] > score].sum() for score in scores[0]])
    sampling = Sampling.of(reference.noise_keys(seed, 1), [(1.0, 0, top_p)], len(logits))
    word = int(reference.choose(scores, torch.tensor([1]), sampling))
    assert better[word] < top_p + 1e-5


def test_logits_count_where_a_choice_needs_them():
    shape = NextTokenShape(8, 8, 50257, 768)
    drawn, int8 = replace(shape, temperature=1.0), replace(shape, temperature=1.0, int8=True)
    moved = [
        each.read_bytes(2) for each in (shape, drawn, replace(drawn, top_k=50), int8, replace(int8, temperature=0))
    ]
    assert moved[0] == moved[1] and moved[2] - moved[1] == moved[3] - moved[4] == 2 * 8 * 50257 * 2


def test_a_head_that_cublas_takes_writes_its_logits():
    """With a number of words that it is quick with, and more channels of a norm than are streamed."""
    wide, few = NextTokenShape(1, 1, 50264, 16384), NextTokenShape(16, 16, 50264, 64)
    assert wide.writes_logits(2) and replace(few, B=17).writes_logits(2)
    streamed = replace(wide, C=8192), replace(wide, V=50257), few, replace(few, int8=True)
    assert not any(shape.writes_logits(2) for shape in streamed)


def test_a_head_without_words_is_named():
    x, step, norm, head, sampling = NextTokenShape(1, 1, 8, 8).inputs("cpu", torch.float16, 0)
    with pytest.raises(KernelError, match="has no outputs; kernels need at least one"):
        cuda.next_token(x, step, norm, head._replace(weight=head.weight[:0]), sampling, empty=fresh)


def test_it_refines_what_the_fused_kernels_replaced():
    before, after = (Recipe.parse(r).parts for r in ("fused_kernels", "fused_kernels,fused_sampling"))
    assert list(replaced(before, after)) == ["ops.embed", "ops.next_token", "ops.advance"]
    assert {"tokens", "sampling"} <= set(after.ops.kernels)
    assert "sampling" not in before.ops.kernels  # texts are embedded by "tokens", too
    with pytest.raises(RecipeError, match="needs fused_kernels"):
        Recipe.parse("fused_sampling")


def test_it_is_traced_without_a_gpu(tiny):
    drawn = Settings(temperature=1.0)
    for settings, end in ((Settings(), 1), (drawn, 1), (replace(drawn, top_p=0.5), 2), (replace(drawn, top_k=9), 2)):
        engine = Engine(tiny.decoder, Recipe.parse("pre_padding,memory_reuse,fused_kernels,fused_sampling").parts)
        engine.memory.plan(engine.tracer.request([40, 30], settings).passes, tiny.decoder.token_embedding)
        names = {name: [life.name for life in plan.lifetimes] for name, plan in engine.plans().items()}
        assert names["decode"][0] == "embedded" and names["decode"][-1] == "token"
        assert not [name for name in names["prefill"] if name.startswith("newest")]
        chosen = ["linear", "best", "token"][-1 - end :]
        assert names["prefill"][-1 - end :] == names["decode"][-1 - end :] == chosen
        assert all("linear" not in name[-2:] for name in names.values())


def test_what_is_not_supported_is_said():
    ids = torch.zeros(2, dtype=torch.long)
    with pytest.raises(KernelError, match="12 channels.*leave the fused kernels out"):
        cuda.embed(ids, ids, torch.zeros(5, 12), torch.zeros(5, 12), empty=fresh)
    with pytest.raises(KernelError, match="float64"):
        cuda.choose(torch.zeros(2, 5, dtype=torch.double), ids, Settings().sampling(2), empty=fresh)
    with pytest.raises(KernelError, match=r"positions is \(3,\)"):
        cuda.choose(torch.zeros(2, 5), torch.zeros(3), Settings().sampling(2), empty=fresh)


def test_the_baseline_asks_for_no_kernels():
    assert Parts().ops.kernels == ()
