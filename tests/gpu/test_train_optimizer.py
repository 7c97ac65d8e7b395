"""Updates by kernels on a GPU are PyTorch's over a thousand steps, and round at random as the reference does."""

from __future__ import annotations

import pytest
import torch

from eet_lab.ops.cuda.train_optimizer import adamw, norm_of, sgd
from eet_lab.ops.noise import mix, noise_keys
from eet_lab.parts.buffers import Update, rounded_at_random
from eet_lab.parts.optimizers import AdamW as PlainAdamW
from eet_lab.parts.optimizers import FlatAdamW, FlatSGD

from .launches import launches_of, replayed

pytestmark = pytest.mark.gpu

SHAPES = ((7, 5), (11,), (1,), (130, 97), (3, 4, 2))
ADAMW = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6}
MOMENTUM = {"lr": 0.005, "momentum": 0.8}
GPU = torch.device("cuda")
RULES = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def groups(dtype=torch.float32) -> list[dict]:
    torch.manual_seed(0)
    params = [torch.randn(shape).to(GPU, dtype).requires_grad_() for shape in SHAPES]
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]


def params(found) -> list[torch.Tensor]:
    return [param for group in found for param in group["params"]]


def step(optimizer, weights, number: int, **how) -> None:
    """A step for gradients that depend on the weights, at a learning rate of its own."""
    optimizer.zero_grad(set_to_none=False)
    for weight in weights:
        grad = 2 * (weight.detach().float() - number % 5)
        weight.grad = grad.to(weight.dtype)
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + number % 7)
    optimizer.step(**how)


@pytest.mark.parametrize(
    ("kind", "its_kind", "settings"),
    [
        (FlatAdamW, torch.optim.AdamW, ADAMW),
        (FlatAdamW, torch.optim.AdamW, {"lr": 1e-3}),
        (FlatSGD, torch.optim.SGD, {"lr": 0.005}),
        (FlatSGD, torch.optim.SGD, MOMENTUM),
        (FlatSGD, torch.optim.SGD, {**MOMENTUM, "nesterov": True}),
    ],
)
def test_a_thousand_steps_are_pytorchs(kind, its_kind, settings):
    ours, theirs = groups(), groups()
    mine, its = kind(ours, **settings), its_kind(theirs, fused=True, **settings)
    for number in range(1000):
        step(mine, params(ours), number)
        step(its, params(theirs), number)
    for a, b in zip(params(ours), params(theirs), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("master", ["float32", "none"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [FlatAdamW, FlatSGD])
def test_sixteen_bits_are_updated_as_by_pytorch(kind, half, master):
    """A step from the same state: the moments and the master to fp32's last digits, the weights to their last."""
    ours, theirs = groups(half), groups(half)
    settings = ADAMW if kind is FlatAdamW else MOMENTUM
    mine, its = kind(ours, master=master, **settings), kind(theirs, master=master, **settings)
    its._by_kernel = [False] * len(its.buffers)  # PyTorch's formulas over the same buffers
    for number in range(5):
        step(mine, params(ours), number, scale=0.25)
        step(its, params(theirs), number, scale=0.25)
        for a, b in zip(mine.buffers, its.buffers, strict=True):
            for name, moment in a.moments.items():
                assert torch.allclose(moment, b.moments[name], rtol=1e-5, atol=1e-6), name
            if a.master is not None:
                assert torch.allclose(a.master, b.master, rtol=1e-6, atol=1e-6)
            assert torch.allclose(a.weights.float(), b.weights.float(), rtol=torch.finfo(half).eps, atol=1e-6)
            b.weights.copy_(a.weights)  # else one that was rounded the other way would part further


def flat(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Weights, gradients and moments, whose values bfloat16 holds."""
    generator = torch.Generator(GPU).manual_seed(n)
    weights, grads = (torch.randn(n, device=GPU, generator=generator).bfloat16().to(dtype) for _ in range(2))
    moments = [torch.rand(n, device=GPU, generator=generator) for _ in range(2)]
    return weights, grads, moments


def update(step: int = 3, skip: bool = False) -> Update:
    return Update.of(0.01, 0.5, step, GPU)._replace(skip=torch.tensor(skip, device=GPU))


@pytest.mark.parametrize("n", [1, 3, 4, 127, 4096, 1_000_003])
def test_rounding_at_random_is_the_references_to_the_bit(n):
    wide, half = flat(n, torch.float32), flat(n, torch.bfloat16)
    adamw(*wide, None, update(), **RULES)
    for seed in (0, 5, 2**40 + 7):
        weights = half[0].clone()
        moments = [moment.clone() for moment in half[2]]
        start = mix(mix(seed) + (seed >> 31))
        adamw(weights, half[1], moments, None, update(), noise=start, number=2, **RULES)
        key = mix(noise_keys(seed, 4, GPU)[3:] + 2)
        assert torch.equal(weights.float(), rounded_at_random(wide[0], key))
        assert all(torch.equal(a, b) for a, b in zip(moments, wide[2], strict=True))


@pytest.mark.parametrize("n", [1, 3, 4, 127, 4096, 1_000_003])
def test_any_count_with_and_without_a_master(n, dtype):
    """Each number is updated, and nothing behind them; what has a master follows it."""
    space = [torch.full((n + 8,), 7.0, device=GPU, dtype=each) for each in (dtype, dtype, *[torch.float32] * 3)]
    weights, grads, first, second, master = (part[:n] for part in space)
    for part, value in zip((weights, grads, first, second, master), (1.0, 0.5, 0.1, 0.2, 1.0), strict=True):
        part.fill_(value)
    has_master = dtype != torch.float32
    adamw(weights, grads, [first, second], master if has_master else None, update(), **RULES)
    assert all((part[n:] == 7).all() for part in space)
    assert weights.unique().numel() == first.unique().numel() == second.unique().numel() == 1
    wanted, exact = torch.ones(1, device=GPU, dtype=torch.float64), torch.tensor([0.25], device=GPU).double()
    m, v = 0.9 * 0.1 + 0.1 * exact, 0.999 * 0.2 + 0.001 * exact**2
    wanted = wanted * (1 - 0.01 * 0.1) - 0.01 / (1 - 0.9**3) * m / ((v / (1 - 0.999**3)).sqrt() + 1e-8)
    assert torch.allclose(weights[:1].double(), wanted, rtol=torch.finfo(dtype).eps, atol=2e-5)
    assert (grads == 0.5).all()
    if has_master:
        assert torch.allclose(master[:1].double(), wanted, rtol=2e-5)
        assert torch.equal(weights, master.to(dtype))
    sgd(weights, grads, [], None, update(), momentum=0.0, weight_decay=0.1, nesterov=False)
    assert weights.unique().numel() == 1 and all((part[n:] == 7).all() for part in space)


def test_skip_leaves_everything_as_it_was():
    weights, grads, moments = flat(1003, torch.bfloat16)
    master = weights.float()
    grads[5] = float("inf")
    before = [each.clone() for each in (weights, master, *moments, grads)]
    adamw(weights, grads, moments, master, update(skip=True), **RULES)
    sgd(weights, grads, moments[:1], master, update(skip=True), momentum=0.9, weight_decay=0.1, nesterov=False)
    assert all(torch.equal(a, b) for a, b in zip((weights, master, *moments, grads), before, strict=True))


@pytest.mark.parametrize("kind", [FlatAdamW, FlatSGD])
def test_a_captured_update_reads_its_numbers_when_it_is_replayed(kind):
    ours, theirs = groups(torch.bfloat16), groups(torch.bfloat16)
    mine, its = kind(ours), kind(theirs)
    for optimizer in (mine, its):
        for buffer in optimizer.buffers:
            buffer.grads.normal_(generator=torch.Generator(GPU).manual_seed(1))
    numbers = Update.of(0.0, 0.0, 1, GPU)
    numbers.skip.fill_(True)
    graph = torch.cuda.CUDAGraph()
    mine.update(numbers)
    with torch.cuda.graph(graph):
        mine.update(numbers)
    for number in range(1, 4):
        for part, value in zip(numbers, (0.1 / number, 0.5, number, number == 2), strict=True):
            part.fill_(value)
        graph.replay()
        if number != 2:
            its.update(Update.of(0.1 / number, 0.5, number, GPU))
    assert all(torch.equal(a, b) for a, b in zip(params(ours), params(theirs), strict=True))
    assert not torch.equal(params(ours)[0], params(groups(torch.bfloat16))[0])


@pytest.mark.parametrize("n", [1, 7, 1000, 3_000_001])
def test_the_norm_is_fp64s_and_tells_what_is_not_finite(n, dtype):
    x, other = torch.randn(n, device=GPU).to(dtype), torch.randn(100, device=GPU).to(dtype)
    norm = norm_of([x, other])
    wanted = torch.cat([x, other]).double().norm()
    assert norm.dtype == torch.float32 and norm.shape == ()
    assert torch.allclose(norm.double(), wanted, rtol=2e-6)
    assert torch.equal(norm, norm_of([x, other])) and torch.equal(norm, replayed(lambda: norm_of([x, other])))
    for value in (float("inf"), float("nan")):
        x[n // 2] = value
        assert not norm_of([x, other]).isfinite()


def test_a_flat_update_is_a_launch_for_each_buffer():
    found = groups(torch.bfloat16)
    optimizer = FlatAdamW(found)
    numbers = Update.of(0.1, 1.0, 1, GPU)
    names = launches_of(lambda: optimizer.update(numbers))
    assert len(names) == 2 and all("update_kernel" in name for name in names)
    assert len(launches_of(optimizer.grad_norm)) == 3
    assert not hasattr(PlainAdamW(groups()), "_by_kernel")


def test_other_types_are_pytorchs():
    ours, theirs = groups(torch.float64), groups(torch.float64)
    mine, its = FlatAdamW(ours, **ADAMW), torch.optim.AdamW(theirs, fused=True, **ADAMW)
    for number in range(20):
        step(mine, params(ours), number)
        step(its, params(theirs), number)
    for a, b in zip(params(ours), params(theirs), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)
