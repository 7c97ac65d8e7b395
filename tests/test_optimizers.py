"""AdamW and SGD over buffers are PyTorch's, and 16-bit weights lose as little as is said."""

from __future__ import annotations

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch

from eet_lab.errors import TrainingError
from eet_lab.parts import buffers
from eet_lab.parts.buffers import rounded_at_random
from eet_lab.parts.optimizers import SGD, AdamW, FlatAdamW, FlatSGD
from eet_lab.training import TrainSettings

SHAPES = ((7, 5), (11,), (1,), (130,), (3, 4, 2))


def groups(dtype=torch.float32) -> list[dict]:
    torch.manual_seed(0)
    params = [torch.randn(shape).to(dtype).requires_grad_() for shape in SHAPES]
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]


def params(found) -> list[torch.Tensor]:
    return [param for group in found for param in group["params"]]


def step(optimizer, weights, number: int) -> None:
    """A step for gradients that depend on the weights, at a learning rate of its own."""
    optimizer.zero_grad()
    for weight in weights:
        weight.grad = 2 * (weight.detach() - number % 5)
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + number % 7)
    optimizer.step()


ADAMW = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6}
MOMENTUM = {"lr": 0.005, "momentum": 0.8}


@pytest.mark.parametrize(
    ("kind", "its_kind", "settings", "dtype"),
    [
        (AdamW, torch.optim.AdamW, ADAMW, torch.float32),
        (FlatAdamW, torch.optim.AdamW, ADAMW, torch.float32),
        (FlatAdamW, torch.optim.AdamW, ADAMW, torch.float64),
        (SGD, torch.optim.SGD, {"lr": 0.005}, torch.float32),
        (FlatSGD, torch.optim.SGD, MOMENTUM, torch.float32),
        (FlatSGD, torch.optim.SGD, {**MOMENTUM, "nesterov": True}, torch.float64),
    ],
)
def test_a_thousand_steps_are_pytorchs(kind, its_kind, settings, dtype):
    ours, theirs = groups(dtype), groups(dtype)
    mine, its = kind(ours, **settings), its_kind(theirs, foreach=False, **settings)
    for number in range(1000):
        step(mine, params(ours), number)
        step(its, params(theirs), number)
    limit = 1e-5 if dtype == torch.float32 else 1e-13
    for a, b in zip(params(ours), params(theirs), strict=True):
        assert torch.allclose(a, b, rtol=limit, atol=limit)


def test_all_tensors_of_a_group_are_one_buffer_and_stay_views():
    found = groups()
    before = [param.detach().clone() for param in params(found)]
    optimizer = FlatAdamW(found)
    assert len(optimizer.buffers) == 2 and len(AdamW(groups()).buffers) == len(SHAPES)
    for param, old in zip(params(found), before, strict=True):
        assert torch.equal(param, old) and param.data_ptr() % 16 == 0
    step(optimizer, params(found), 0)
    whole = optimizer.buffers[0]
    for param, place in zip(whole.params, whole.places, strict=True):
        assert param.data_ptr() == whole.weights[place].data_ptr() and not torch.equal(param, before[0][:1])


@pytest.mark.parametrize("of", [copy.deepcopy, lambda found: pickle.loads(pickle.dumps(found))])
@pytest.mark.parametrize(
    ("kind", "dtype"), [(AdamW, torch.bfloat16), (FlatAdamW, torch.float32), (FlatSGD, torch.bfloat16)]
)
def test_a_copy_goes_on_apart(kind, dtype, of):
    """With what was kept of each weight, and buffers of its own."""
    weights = [torch.nn.Parameter(weight.detach()) for weight in params(groups(dtype))]
    weights[1].requires_grad_(False)
    optimizer = kind(weights, lr=0.02, **({"momentum": 0.9} if kind is FlatSGD else {}))
    trained = [weights[0], *weights[2:]]
    for number in range(3):
        step(optimizer, trained, number)
    copies, second = of((weights, optimizer))
    before = [weight.detach().clone() for weight in weights]
    for number in range(3, 6):
        step(second, [copies[0], *copies[2:]], number)
    assert all(map(torch.equal, before, weights)) and optimizer.num_steps == 3 and second.num_steps == 6
    for number in range(3, 6):
        step(optimizer, trained, number)
    assert all(map(torch.equal, copies, weights)) and len(second.buffers) == len(optimizer.buffers)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_weight_that_is_given_twice_is_refused():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with pytest.raises(TrainingError, match=r"A weight \[2, 3\] is given 2 times, .* Give each weight once"):
        FlatAdamW([weight, weight])


def test_gradients_that_were_put_elsewhere_are_found():
    ours, theirs = groups(), groups()
    mine, its = FlatAdamW(ours), AdamW(theirs)
    for weights in (params(ours), params(theirs)):
        for number, weight in enumerate(weights):
            weight.grad = None if number == 1 else torch.full_like(weight, number + 1.0)
    mine.step()
    its.step()
    assert all(torch.equal(a, b) for a, b in zip(params(ours), params(theirs), strict=True))


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e9])
def test_clipping_is_pytorchs(max_norm):
    """It is part of the update, in 32 bits whatever the weights have."""
    found, theirs = groups(), groups()
    optimizer, its = FlatSGD(found, lr=1.0), torch.optim.SGD(theirs, lr=1.0)
    for weights in (params(found), params(theirs)):
        for weight in weights:
            weight.grad = torch.ones_like(weight) * weight.detach()
    norm = optimizer.grad_norm()
    optimizer.step(scale=float(TrainSettings(max_grad_norm=max_norm).clipping(norm)))
    wanted = torch.nn.utils.clip_grad_norm_(params(theirs), max_norm or 1e30)
    its.step()
    assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert all(torch.allclose(a, b) for a, b in zip(params(found), params(theirs), strict=True))


STATES = [
    (AdamW, FlatAdamW),
    (FlatAdamW, AdamW),
    (FlatAdamW, torch.optim.AdamW),
    (torch.optim.AdamW, FlatAdamW),
    (FlatSGD, torch.optim.SGD),
    (torch.optim.SGD, FlatSGD),
]


@pytest.mark.parametrize(("first", "second"), STATES)
def test_a_state_is_read_in_any_layout(first, second):
    settings = MOMENTUM if "SGD" in first.__name__ else {}
    found = groups()
    optimizer = first(found, **settings)
    for number in range(3):
        step(optimizer, params(found), number)
    again = groups()
    other = second(again, **settings)
    with torch.no_grad():
        for a, b in zip(params(again), params(found), strict=True):
            a.copy_(b)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in (3, 4):
        step(optimizer, params(found), number)
        step(other, params(again), number)
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(params(again), params(found), strict=True))


def test_a_state_without_steps_begins_anew_and_one_that_lacks_a_tensor_keeps_the_others_count():
    found, settings = groups(), MOMENTUM
    optimizer, torchs = FlatSGD(found, **settings), torch.optim.SGD(groups(), **settings)
    step(optimizer, params(found), 0)
    optimizer.load_state_dict(torchs.state_dict())
    assert optimizer.num_steps == 0
    step(optimizer, params(found), 0)
    state = optimizer.state_dict()
    del state["state"][max(state["state"])]
    step(optimizer, params(found), 1)
    optimizer.load_state_dict(state)
    assert optimizer.num_steps == 1


def test_it_is_an_optimizer_of_pytorch_for_any_module():
    """With frozen weights, a scheduler, a scaler that skips, and hooks, it makes the steps of PyTorch's."""
    found = []
    for kind in (FlatAdamW, partial(torch.optim.AdamW, foreach=False)):
        torch.manual_seed(4)
        module = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 3))
        module[1].requires_grad_(False)
        groups = [{"params": module[0].parameters(), "lr": 0.1}, {"params": [*module[1:].parameters()]}]
        optimizer = kind(groups, lr=0.02, weight_decay=0.3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.02], total_steps=9, cycle_momentum=False)
        scaler, steps = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2), []
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        for number in range(6):
            loss = module(torch.randn(5, 6)).square().mean() * (float("inf") if number == 2 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.2)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        found.append([len(steps), scaler.get_scale(), *scheduler.get_last_lr(), *module.state_dict().values()])
    for ours, its in zip(*found, strict=True):
        assert torch.allclose(torch.as_tensor(ours), torch.as_tensor(its), rtol=1e-5, atol=1e-7)
    assert found[0][0] == 5


def drifted(master: str, kind=FlatAdamW) -> float:
    """How far 16-bit weights of 1.0 come in 200 steps of 0.001 down, of which bfloat16 holds none."""
    weight = torch.ones(4096, dtype=torch.bfloat16).requires_grad_()
    optimizer = kind([weight], lr=1e-3, weight_decay=0.0, master=master)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return float(weight.detach().float().mean())


def test_small_updates_are_lost_without_a_master_and_kept_with_one_or_at_random():
    assert drifted("none") == 1.0
    assert drifted("float32") == pytest.approx(0.8, abs=2e-3)
    assert drifted("stochastic") == pytest.approx(0.8, abs=2e-3)


def test_rounding_at_random_takes_a_neighbour_and_is_right_on_average():
    numbers = torch.tensor([1.0, 1.0 + 2**-9, -3.3, 1e-30, 0.0, float("inf"), float("nan")])
    many = numbers.repeat_interleave(20000)
    rounded = rounded_at_random(many, torch.tensor(5)).view(len(numbers), -1)
    assert torch.equal(rounded.bfloat16().float()[:-1], rounded[:-1]) and rounded[-1].isnan().all()
    assert torch.allclose(rounded[:5].double().mean(-1), numbers[:5].double(), rtol=1e-4)
    assert (rounded[:6].unique(dim=1).shape[1]) <= 2 * 2 * 2 * 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lr": -1.0}, "lr is -1.0, but it must be a number from 0 to 1e30"),
        ({"lr": 1e38}, "lr is 1e\\+38"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0, but it must be a number from 0 to less than 1"),
        ({"betas": 0.9}, "betas is 0.9, but it must be two numbers"),
        ({"betas": (0.9, 0.99, 0.999)}, r"betas is \(0.9, 0.99, 0.999\), but it must be two numbers"),
        ({"amsgrad": True}, "FlatAdamW has no 'amsgrad'; there are params, lr, betas, eps, weight_decay, "),
        ({"master": "fp32"}, "master is 'fp32', but it must be one of float32, none, stochastic"),
    ],
)
def test_settings_that_cannot_be(settings, says):
    with pytest.raises(TrainingError, match=says):
        FlatAdamW(groups(), **settings)


@pytest.mark.parametrize("kind", [AdamW, FlatAdamW, SGD, FlatSGD])
def test_tensors_that_no_step_would_change_are_refused(kind):
    """Beside weights that learn they stay as they are, as with PyTorch's optimizers."""
    counts, learns = torch.ones(3, dtype=torch.int64), torch.ones(2).requires_grad_()
    with pytest.raises(TrainingError, match=r"No tensor of 2 .*; the first has torch.int64 \[3\]. Give weights"):
        kind([{"params": [counts]}, {"params": [torch.ones(4)]}])
    learns.grad = torch.ones(2)
    kind([counts, learns], lr=0.5).step()
    assert torch.equal(counts, torch.ones(3, dtype=torch.int64)) and (learns < 1).all()


def test_a_frozen_weight_is_named_where_its_name_is_known():
    module = torch.nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(TrainingError, match=r"; weight has torch.float32 \[2, 3\]"):
        FlatAdamW(module.named_parameters())


def test_weights_that_would_no_longer_be_updated():
    module = torch.nn.Conv2d(3, 4, 3)
    module.bias.requires_grad_(False)
    optimizer = FlatAdamW(module.parameters())
    with pytest.raises(TrainingError, match="Make the optimizer of all groups at once"):
        optimizer.add_param_group({"params": [torch.ones(2).requires_grad_()]})
    module.bias.requires_grad_(True)
    with pytest.raises(TrainingError, match="A weight was unfrozen after its optimizer was made"):
        optimizer.step()
    module.requires_grad_(False)
    with pytest.raises(TrainingError, match=r"A weight \[4, 3, 3, 3\] was frozen after its optimizer was made"):
        optimizer.step()
    module.to(memory_format=torch.channels_last)
    with pytest.raises(TrainingError, match=r"A weight \[4, 3, 3, 3\] was moved after its optimizer was made"):
        optimizer.step()


def test_what_cannot_be_rounded_at_random_and_another_models_state():
    with pytest.raises(TrainingError, match="rounds bfloat16"):
        FlatAdamW(groups(torch.float16), master="stochastic")
    state = FlatAdamW(groups()).state_dict()
    with pytest.raises(TrainingError, match="state of another model"):
        FlatAdamW(groups()[:1]).load_state_dict(state)
    with pytest.raises(TrainingError, match="Tensor 0 of the optimizer's state has another shape"):
        FlatAdamW([{"params": params(groups())[1:3]}, {"params": params(groups())[:3]}]).load_state_dict(state)
    with pytest.raises(TrainingError, match=r"has \['exp_avg', 'exp_avg_sq'\], and this optimizer keeps \['momentum"):
        FlatSGD(groups(), momentum=0.5).load_state_dict(state)
    state["state"][2]["exp_avg_sq"].view(-1)[0] = -1e-9
    with pytest.raises(TrainingError, match="exp_avg_sq of tensor 2 has the value -.*, but all must be finite and at "):
        FlatAdamW(groups()).load_state_dict(state)


def test_sgd_that_cannot_be():
    with pytest.raises(TrainingError, match="momentum is 1.0, but it must be a number from 0 to less than 1"):
        FlatSGD(groups(), momentum=1.0)
    with pytest.raises(TrainingError, match="looks ahead along the momentum, and momentum is 0"):
        FlatSGD([{"params": params(groups()), "momentum": 0.0}], momentum=0.9, nesterov=True)
    optimizer = FlatSGD(groups())
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(TrainingError, match="momentum was 0 when the optimizer was made"):
        optimizer.step()


def test_no_tensor_has_the_noise_of_another(monkeypatch):
    """A number's place is added to its tensor's key: keys lie further apart than tensors are long."""
    keys, rounded = [], buffers.rounded_at_random
    monkeypatch.setattr(buffers, "rounded_at_random", lambda wide, key: keys.append(int(key)) or rounded(wide, key))
    params = [torch.ones(4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    optimizer = AdamW(params, master="stochastic")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert len(keys) == 3 and min(abs(a - b) for a, b in itertools.combinations(keys, 2)) > 1 << 24
