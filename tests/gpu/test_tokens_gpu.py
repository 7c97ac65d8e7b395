"""The kernels at a step's ends on a GPU: the cases, and the same draws as PyTorch's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from every_shape import every_shape

from eet_lab.engine.settings import Settings
from eet_lab.errors import KernelError
from eet_lab.ops import cuda, reference
from eet_lab.ops.cuda.launching import dependent
from eet_lab.ops.cuda.linear import outputs_and_largest, takes_few
from eet_lab.ops.next_token_case import NextTokenShape
from eet_lab.ops.reference import noise_keys
from eet_lab.ops.shapes import Normal, copied
from eet_lab.ops.token_cases import HOW, MIXED, TOKEN_CASES, TOP_K, ChooseShape, TopKShape, block_maxima
from eet_lab.ops.types import Batch, Choice, Linear, Norm, Sampling, fresh
from gpu.launches import launches_of, replayed

pytestmark = pytest.mark.gpu
CASE = {case.name: case for case in TOKEN_CASES}


@pytest.mark.parametrize("way", [lambda op: op, dependent], ids=["plain", "dependent"])
@every_shape(TOKEN_CASES)
def test_within_the_budget(case, shape, dtype, way):
    case.check(way(getattr(cuda, case.op)), shape, "cuda", dtype)


@pytest.mark.parametrize("how", [*HOW, *MIXED], ids=str)
def test_draws_equal_pytorchs(how, dtype):
    """Noise, scores and order are the same to the bit; only a sum of chances may round to the other side of top_p."""
    source = torch.Generator(device="cuda").manual_seed(1)
    shape = ChooseShape(64, 50257, **how)
    for seed in range(6):
        logits = (torch.randn(64, shape.V, device="cuda", generator=source) * (0.5 + seed)).to(dtype)
        sampling = shape.sampling(noise_keys(seed * 2**35 + seed, 64, "cuda"))
        positions = torch.arange(64, device="cuda") * 3 + seed
        expected = reference.choose(logits, positions, sampling)
        assert torch.equal(cuda.choose(logits, positions, sampling, empty=fresh), expected), seed


@pytest.mark.parametrize("clumped", [False, True])
@pytest.mark.parametrize("how", [*TOP_K, *({"mixed": True} | how for how in TOP_K)], ids=str)
def test_draws_from_the_top_k_equal_pytorchs(how, clumped, dtype):
    for seed in range(8):
        shape = TopKShape(16, 50257, **how, spread=0.5 + seed, clumped=clumped)
        inputs = shape.inputs("cuda", dtype, seed)
        expected = reference.choose_top_k(*inputs, empty=fresh)
        assert torch.equal(cuda.choose_top_k(*inputs, empty=fresh), expected), seed


@pytest.mark.parametrize("how", [*HOW[1:], *MIXED], ids=str)
def test_every_row_draws_on_its_own(how):
    logits, positions, sampling = ChooseShape(9, 777, **how).inputs("cuda", torch.float16, 5)
    each = [slice(row, row + 1) for row in range(len(logits))]
    asked = [Sampling(sampling.choice, *(part[at] for part in sampling[1:])) for at in each]
    alone = [reference.choose(logits[at], positions[at], its) for at, its in zip(each, asked, strict=True)]
    assert torch.equal(cuda.choose(logits, positions, sampling, empty=fresh), torch.cat(alone))


def test_hidden_words_are_never_drawn():
    logits = torch.full((3, 5000), -torch.inf, device="cuda", dtype=torch.float16)
    logits[:, [7, 4321]] = 1.0
    positions = torch.arange(3, device="cuda")
    for seed in range(8):
        for how in HOW:
            sampling = Settings(seed=seed, **how).sampling(3, "cuda")
            assert set(cuda.choose(logits, positions, sampling, empty=fresh).tolist()) <= {7, 4321}
            if sampling.choice == Choice.LIMITED:
                with_best = (logits, block_maxima(logits, 132), positions, positions, sampling)
                assert set(cuda.choose_top_k(*with_best, empty=fresh).tolist()) <= {7, 4321}


@pytest.mark.parametrize("B", [1, 8])
@pytest.mark.parametrize("k", [1, 50, 100])
def test_the_few_words_that_reach_the_bound_are_enough(B, k):
    """What is NaN unknown to the head's blocks is no candidate; a selection among all words would keep nothing else."""
    logits, best, rows, positions, sampling = TopKShape(B, 50257, top_k=k).inputs("cuda", torch.float16, 4)
    expected = cuda.choose_top_k(logits, best, rows, positions, sampling, empty=fresh)
    lowest = logits.topk(k, largest=False).indices
    got = cuda.choose_top_k(logits.scatter(-1, lowest, torch.nan), best, rows, positions, sampling, empty=fresh)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("how", [*HOW, *TOP_K], ids=str)
@pytest.mark.parametrize("num_nan", [1, 40, 50257])
def test_a_word_is_drawn_even_from_what_overflowed(how, num_nan, dtype):
    """Any word: but it is one, since the next step looks it up."""
    shape = TopKShape(3, 50257, **{"top_k": 0, "temperature": 0.0} | how if how in HOW else how)
    logits, _, rows, positions, sampling = shape.inputs("cuda", dtype, 6)
    logits[:, torch.arange(num_nan) * (50257 // num_nan)] = torch.nan
    best = torch.nan_to_num(logits.float(), nan=torch.inf).to(dtype)
    best = block_maxima(torch.where(logits.isnan(), logits, best), 132)  # a NaN is the largest
    got = [cuda.choose(logits, positions, sampling, empty=fresh)]
    if sampling.choice == Choice.LIMITED:
        got += [cuda.choose_top_k(logits, best, rows, positions, sampling, empty=fresh)]
    assert all(bool(((token >= 0) & (token < 50257)).all()) for token in got)


@pytest.mark.parametrize("seed", range(40))
def test_a_top_p_of_nearly_one_finds_its_last_word(seed):
    shape = TopKShape(16, 5000, top_k=131, top_p=1 - 2**-24, spread=0.01)
    inputs = shape.inputs("cuda", torch.float32, seed)
    token, last = cuda.choose_top_k(*inputs, empty=fresh), inputs[0].topk(131).values[:, -1]
    assert bool((inputs[0].gather(-1, token[:, None])[:, 0] >= last).all())


CAPTURED = [(case, shape) for case in TOKEN_CASES for shape in case.shapes[3:4]]
CAPTURED += [(CASE["next_token"], shape) for shape in CASE["next_token"].shapes if getattr(shape, "temperature", 0)]


@pytest.mark.parametrize(("case", "shape"), CAPTURED, ids=lambda each: getattr(each, "name", str(each)))
def test_it_can_be_captured_and_replayed(case, shape):
    inputs = shape.inputs("cuda", torch.float16, 2)
    eager = case.call(getattr(cuda, case.op), copied(inputs), fresh)
    mine = copied(inputs)
    captured = replayed(lambda: case.call(dependent(getattr(cuda, case.op)), mine, fresh))
    assert torch.equal(captured, eager)


@pytest.mark.parametrize("case", TOKEN_CASES, ids=lambda case: case.name)
def test_launches_are_as_many_as_declared(case):
    for shape in case.bench:
        inputs = shape.inputs("cuda", torch.float16, 0)
        launches = launches_of(partial(case.call, getattr(cuda, case.op), inputs, fresh))
        assert len(launches) == case.launches, launches


@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 3), (5, 40), (16, 16), (20, 20)])
def test_the_next_token_is_the_choice_among_logits_that_need_not_be_written(B, T, dtype):
    normal = Normal("cuda", dtype, 4)
    x, head, norm = normal(T, 64), normal(5003, 64), Norm(normal(64) + 1, normal(64), 1e-5)
    head[4000:] = head[1000:2003]  # ties go to the lowest
    head[:500] = head[2500:3000]
    last = torch.arange(B, device="cuda") * (T // B) + T // B - 1
    token = torch.arange(T, device="cuda")
    nothing = Batch(*[None] * 10)
    batch = nothing._replace(last=last, first=last - T // B + 1, positions=token, rows=token, max_q=T // B)
    w = Linear(head, None)
    top_k, top_p = {"top_k": 50}, {"top_p": 0.8}
    for how in ({}, *({"temperature": 1.0} | limits for limits in ({}, top_k, top_p, top_k | top_p))):
        args = (x, batch, norm, w, Settings(seed=9, **how).sampling(B, x.device))
        expected = cuda.next_token_by_torch(*args, empty=fresh)
        if takes_few(B, x, w, gathered=True):  # the sums of its logits may be in another order
            logits, best = outputs_and_largest(x, last, norm, w, empty=fresh)
            assert torch.equal(block_maxima(logits, best.shape[1]), best)
            expected = reference.choose(logits, batch.positions[last], args[-1])
        for op in (cuda.next_token, dependent(cuda.next_token)):
            assert torch.equal(op(*args, empty=fresh), expected), how


ASKED = [(0.0, 0, 1.0), (0.8, 0, 1.0), (1.0, 50, 1.0), (0.7, 0, 0.9), (1.3, 200, 0.6), (0.0, 9, 0.5), (1.1, 10**6, 1.0)]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 3), (7, 40), (16, 16), (20, 20), (65, 65)])
def test_a_row_gets_what_it_would_get_if_all_asked_for_the_same(B, T, int8, dtype):
    """To the bit: whatever launches the most general of the rows needs, its logits are the same."""
    for seed in range(4):
        shape = NextTokenShape(B, T, 5003, 64, int8=int8)
        x, batch, norm, head, greedy = shape.inputs("cuda", dtype, seed)
        asked = [ASKED[(row + seed) % len(ASKED)] for row in range(B)]
        for limit in (len(ASKED), 2):  # with limits, and draws alone
            mixed = [how if ASKED.index(how) < limit else ASKED[row % 2] for row, how in enumerate(asked)]
            args = x, batch, norm, head
            got = cuda.next_token(*args, Sampling.of(greedy.noise, mixed, 5003), empty=fresh)
            for how in dict.fromkeys(mixed):
                rows = torch.tensor([row for row, its in enumerate(mixed) if its == how], device="cuda")
                alone = cuda.next_token(*args, Sampling.of(greedy.noise, [how] * B, 5003), empty=fresh)
                assert torch.equal(got[rows], alone[rows]), (seed, how)


@pytest.mark.parametrize("B", [5, 20])
@pytest.mark.parametrize("choice", [Choice.DRAW, Choice.LIMITED])
def test_a_captured_choice_is_replayed_with_other_values(B, choice):
    x, batch, norm, head, greedy = NextTokenShape(B, B, 5003, 64).inputs("cuda", torch.float16, 3)
    first, *others = [[ASKED[(row + seed) % (2 * choice)] for row in range(B)] for seed in range(3)]
    sampling, graph = Sampling.of(greedy.noise.clone(), first, 5003), torch.cuda.CUDAGraph()
    assert sampling.choice == choice
    call = partial(dependent(cuda.next_token), x, batch, norm, head, sampling, empty=fresh)
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        token = call()
    for seed, asked in enumerate(others):
        new = Sampling.of(noise_keys(seed, B, "cuda"), asked, 5003)._replace(choice=choice)
        for part, value in zip(sampling[1:], new[1:], strict=True):
            part.copy_(value)
        graph.replay()
        assert torch.equal(token, cuda.next_token(x, batch, norm, head, new, empty=fresh))


def test_logits_that_vectors_cannot_read_are_refused():
    logits = torch.zeros(2 * 8 + 1, device="cuda", dtype=torch.float16)[1:].view(2, 8)
    sampling = Settings().sampling(2, "cuda")
    with pytest.raises(KernelError, match="multiple of 16 bytes"):
        cuda.choose(logits, torch.zeros(2, dtype=torch.long, device="cuda"), sampling, empty=fresh)
