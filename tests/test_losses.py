"""Cross entropy in place and in chunks is PyTorch's, with the gradients, and says what it cannot take."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

import eet_lab
from eet_lab.errors import TrainingError
from eet_lab.losses import CausalLMLoss, CrossEntropyLoss, cross_entropy, linear_cross_entropy
from eet_lab.parts import losses

SETTINGS = [
    {},
    {"label_smoothing": 0.1, "reduction": "sum"},
    {"label_smoothing": 1.0},
    {"label_smoothing": 0.3, "ignore_index": 3},
]


def batch(dtype=torch.float32, rows=(37,), words=23) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, some of them large, and labels, some of which are ignored."""
    torch.manual_seed(1)
    logits = (torch.randn(*rows, words) * 5).to(dtype)
    logits.view(-1, words)[1, 2] = 80.0
    labels = torch.randint(words, rows)
    labels.view(-1)[::5] = losses.IGNORED
    return logits, labels


def gradient(loss, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss, and the gradient of three times it."""
    leaf = logits.clone().requires_grad_()
    value = loss(leaf + 0.0)
    (3 * value).backward()
    return value.detach(), leaf.grad


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_loss_and_its_gradient_are_pytorchs(monkeypatch, settings, dtype, in_place):
    monkeypatch.setattr(losses, "AT_A_TIME", 100)  # four rows at a time, and one that is left
    logits, labels = batch(dtype)
    labels = labels.where(labels >= 0, settings.get("ignore_index", losses.IGNORED))
    loss, grad = gradient(lambda x: CrossEntropyLoss(in_place=in_place, **settings)(x, labels), logits)
    wanted, its = gradient(lambda x: functional.cross_entropy(x, labels, **settings), logits)
    limit = 2e-6 if dtype == torch.float32 else 1e-14
    assert loss.dtype == dtype and torch.allclose(loss, wanted, rtol=limit)
    assert torch.allclose(grad, its, rtol=limit, atol=limit)
    with torch.no_grad():
        kept = logits.clone()
        assert torch.allclose(cross_entropy(logits, labels, in_place=in_place, **settings), wanted, rtol=limit)
    assert torch.equal(kept, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_lose_no_more_in_place(dtype):
    """The budget: twice the error of PyTorch's, and a digit of the largest number."""
    logits, labels = batch(dtype, rows=(5, 40))
    its = gradient(lambda x: functional.cross_entropy(x.flatten(0, -2).float(), labels.flatten()), logits)
    exact = gradient(lambda x: functional.cross_entropy(x.flatten(0, -2), labels.flatten()), logits.double())
    ours = gradient(lambda x: cross_entropy(x, labels, in_place=True), logits)
    assert ours[0].dtype == torch.float32
    for mine, low, true in zip(ours, its, exact, strict=True):
        budget = 2 * (low.double() - true).abs().max() + 4 * torch.finfo(low.dtype).eps * true.abs().max()
        assert (mine.double() - true).abs().max() <= budget


def test_in_place_is_in_place_and_tells_who_still_needs_the_logits():
    logits, labels = batch()
    leaf = logits.requires_grad_()
    made = leaf * 1.0
    place = made.data_ptr()
    seen = []
    made.register_hook(lambda grad: seen.append(grad.data_ptr()))
    loss = cross_entropy(made, labels, in_place=True)
    assert torch.equal(made, leaf), "the forward pass leaves them"
    loss.backward(retain_graph=True)
    assert seen == [place]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(leaf.tanh(), labels, in_place=True).backward()
    with pytest.raises(TrainingError, match="they are a leaf, which would be lost"):
        cross_entropy(leaf, labels, in_place=True)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_head_in_chunks_is_pytorchs(settings, has_bias):
    torch.manual_seed(2)
    _, labels = batch(rows=(3, 13))
    labels = labels.where(labels >= 0, settings.get("ignore_index", losses.IGNORED))
    shapes = [(3, 13, 8), (23, 8), (23,)][: 2 + has_bias]
    ours = [torch.randn(shape).requires_grad_() for shape in shapes]
    theirs = [each.detach().clone().requires_grad_() for each in ours]
    loss = linear_cross_entropy(*ours[:2], labels, linear_bias=ours[2] if has_bias else None, chunk=7, **settings)
    logits = functional.linear(theirs[0], theirs[1], theirs[2] if has_bias else None)
    wanted = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)
    (loss * 3).backward()
    (wanted * 3).backward()
    assert torch.allclose(loss, wanted, rtol=2e-6)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_causal_model_is_that_of_transformers(tiny, hf_model):
    ids = torch.randint(499, (2, 17), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[1, 9:] = losses.IGNORED
    outputs = hf_model(ids, output_hidden_states=True)
    for loss in (CausalLMLoss(), CausalLMLoss(hf_model.lm_head, chunk=5)):
        for num in (None, 50):
            wanted = hf_model.loss_function(outputs.logits, labels, 499, num_items_in_batch=num)
            assert torch.allclose(loss(outputs, labels, num_items_in_batch=num), wanted, rtol=1e-6)
    assert not list(CausalLMLoss(hf_model.lm_head).parameters())
    for wrong, says in (({"label_smoothing": -1}, "label_smoothing is -1"), ({"chunk": 0}, "chunk is 0")):
        with pytest.raises(TrainingError, match=says):
            CausalLMLoss(hf_model.lm_head, **wrong)


@pytest.mark.parametrize(
    ("labels", "settings", "says"),
    [
        ([1, 23, 2], {}, "1 of the labels, 23 the first, are not from 0 to 22, nor -100"),
        ([1, -1, -2], {}, "2 of the labels, -1 the first"),
        ([1, -100, 2], {"ignore_index": 1}, "-100 the first, are not from 0 to 22, nor 1"),
        ([-100] * 3, {}, "None of the 3 labels can be learned from: all are -100"),
        ([1, 2], {}, r"The labels are \[2\] of torch.int64, but logits \[3, 23\] need whole numbers \[3\]"),
        ([1.0, 2.0, 3.0], {}, r"torch.float32, but logits"),
        ([1, 2, 3], {"reduction": "none"}, "reduction is 'none', but it must be 'mean' or 'sum'"),
        ([1, 2, 3], {"label_smoothing": 1.1}, "label_smoothing is 1.1, but it must be a number from 0 to 1"),
        ([1, 2, 3], {"label_smoothing": "0"}, "label_smoothing is '0'"),
    ],
)
def test_what_cannot_be_learned_from(labels, settings, says):
    with pytest.raises(TrainingError, match=says):
        cross_entropy(torch.zeros(3, 23), torch.tensor(labels), **settings)
    with pytest.raises(TrainingError, match=says):
        linear_cross_entropy(torch.zeros(3, 4), torch.zeros(23, 4), torch.tensor(labels), **settings)


def test_shapes_that_do_not_fit():
    states, weight, labels = torch.zeros(3, 4), torch.zeros(23, 4), torch.tensor([1, 2, 3])
    with pytest.raises(TrainingError, match=r"weight is \[4, 23\] and the states are \[3, 4\]"):
        linear_cross_entropy(states, weight.t(), labels)
    with pytest.raises(TrainingError, match=r"bias is \[4\], but it must be \[23\]"):
        linear_cross_entropy(states, weight, labels, linear_bias=torch.zeros(4))
    with pytest.raises(TrainingError, match="chunk is 0"):
        linear_cross_entropy(states, weight, labels, chunk=0)
    with pytest.raises(TrainingError, match=r"logits are \[3, 4\] of torch.int64"):
        cross_entropy(states.long(), labels)
    with pytest.raises(TrainingError, match="The labels are a list, but must be a tensor"):
        cross_entropy(states, [1, 2, 3])
    assert eet_lab.losses.cross_entropy is cross_entropy


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"hidden_states": None}, "hidden_states are None, .* Call the model with output_hidden_states=True"),
        ({"hidden_states": ()}, "hidden_states are a tuple, but a loss with a head is taken from the last"),
        ({"hidden_states": torch.zeros(1, 3, 4)}, r"hidden_states are \[1, 3, 4\] of torch.float32, but .* a tuple of"),
        ({"hidden_states": (torch.zeros(3, 4),)}, r"labels are \[1, 3\] .* hidden states are \[3, 4\] .* token, \[3\]"),
        ({"hidden_states": (torch.zeros(1, 3, 5),)}, r"weight is \[23, 4\] and the states are \[1, 3, 5\]"),
        ({"hidden_states": (torch.zeros(1, 3, 4).bfloat16(),)}, "head is torch.float32 .* states are torch.bfloat16"),
        ({"hidden_states": (torch.zeros(1, 3, 4, device="meta"),)}, "head is torch.float32 on cpu .* on meta"),
        ({"logits": None}, "logits are None, but the loss is taken from outputs.logits"),
        (
            {"logits": torch.zeros(1, 1, 23)},
            r"logits are \[1, 1, 23\] .* compute all of its logits \(no logits_to_keep",
        ),
    ],
)
def test_outputs_without_what_a_causal_loss_reads(wrong, says):
    [name] = wrong
    loss = CausalLMLoss(torch.nn.Linear(4, 23) if name == "hidden_states" else None)
    whole = {"logits": torch.zeros(1, 3, 23), "hidden_states": (torch.zeros(1, 3, 4),)}
    labels = torch.tensor([[1, 2, 3]])
    assert loss(SimpleNamespace(**whole), labels) > 0
    with pytest.raises(TrainingError, match=says):
        loss(SimpleNamespace(**whole | wrong), labels)
    for none in (None, [[1, 2, 3]], torch.tensor(3), labels[:, :2]):
        with pytest.raises(TrainingError, match=r"The labels are .* one label for each token, \[1, 3\]"):
            loss(SimpleNamespace(**whole), none)


def test_what_is_no_tensor_and_what_is_no_head():
    states, weight, labels = torch.zeros(3, 4), torch.zeros(23, 4), torch.tensor([1, 2, 3])
    with pytest.raises(TrainingError, match="head is a Sequential, but it must be a torch.nn.Linear, such as"):
        CausalLMLoss(torch.nn.Sequential())
    with pytest.raises(TrainingError, match="outputs is a tuple whose logits are None.*return_dict=True"):
        CausalLMLoss()((states,), labels)
    for given, says in (((None, weight), "states are None"), ((states, torch.nn.Linear(4, 23)), "weight is a Linear")):
        with pytest.raises(TrainingError, match=f"{says}, but must be a tensor of real numbers"):
            linear_cross_entropy(*given, labels)
    with pytest.raises(TrainingError, match=r"bias is a list, but must be a tensor of real numbers \[V\]"):
        linear_cross_entropy(states, weight, labels, linear_bias=[0.0] * 23)
    for none in (None, [[1.0]], states[:, :0]):
        with pytest.raises(TrainingError, match=r"The logits are .*, but must be a tensor of real numbers \[...,V\]"):
            cross_entropy(none, labels)
    with pytest.raises(TrainingError, match=r"labels are on meta, but must be on cpu: labels.to\('cpu'\)"):
        cross_entropy(states, labels.to("meta"))
    for none, called in ((None, "None"), (3, "an int"), (np.zeros(3), "an ndarray"), ([1], "a list")):
        with pytest.raises(TrainingError, match=f"The labels are {called}, but must be a tensor"):
            cross_entropy(states, none)
    with pytest.raises(TrainingError, match="complex64, but logits"):
        cross_entropy(states, labels.to(torch.complex64))


@pytest.mark.parametrize("grad", [True, False])
def test_on_meta_nothing_is_computed_and_errors_are_told_in_words(grad):
    states, weight, labels = (torch.zeros(size, device="meta") for size in ((3, 4), (23, 4), (3,)))
    labels = labels.long()
    with torch.set_grad_enabled(grad):
        assert linear_cross_entropy(states, weight, labels, check=False).is_meta
        for loss in (lambda: linear_cross_entropy(states, weight, labels), lambda: cross_entropy(weight[:3], labels)):
            with pytest.raises(TrainingError, match="labels are on meta, where they have no values.*check=False"):
                loss()
        for other in (weight.half(), torch.zeros(23, 4)):
            with pytest.raises(TrainingError, match="both must be the same"):
                linear_cross_entropy(states, other, labels, check=False)


def test_autocast_makes_a_head_and_states_alike_where_no_gradient_is_taken():
    states, weight, labels = torch.zeros(3, 4), torch.zeros(23, 4).bfloat16(), torch.tensor([1, 2, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            assert linear_cross_entropy(states, weight, labels) > 3
        with pytest.raises(TrainingError, match="both must be the same"):
            linear_cross_entropy(states, weight, labels)


def test_a_frozen_head_has_no_gradient_and_the_states_have_theirs():
    torch.manual_seed(0)
    states, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    target = torch.tensor([1, 2, 8, 0, 3, 3])
    linear_cross_entropy(states, weight, target, chunk=4).backward()
    other = states.detach().clone().requires_grad_()
    torch.nn.functional.cross_entropy(other @ weight.T, target).backward()
    torch.testing.assert_close(states.grad, other.grad)
    assert weight.grad is None


def test_a_sum_over_no_label_is_zero():
    """Of an accumulated batch, one part may have all its labels masked."""
    logits, none = torch.randn(3, 5, requires_grad=True), torch.full((3,), -100)
    assert float(cross_entropy(logits * 1, none, in_place=True, reduction="sum").detach()) == 0
    with pytest.raises(TrainingError, match="None of the 3 labels"):
        cross_entropy(logits, none)
    with pytest.raises(TrainingError, match="The one label cannot be learned from: it is -100, which is ignored. Give"):
        cross_entropy(logits[:1], none[:1])
    with pytest.raises(TrainingError, match="There are no labels. Give a longer text"):
        cross_entropy(logits[:0], none[:0])
