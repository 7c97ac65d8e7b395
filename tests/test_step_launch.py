"""Training steps that are captured are those that are not; without a GPU, by a recorder of PyTorch's operations."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import encoders
import families
import pytest
import seq2seqs
import test_vision
import torch
from counted import tensors_in
from device_attention import by_device
from test_trainer import FLAT
from test_training import parts
from torch.utils._python_dispatch import TorchDispatchMode

from eet_lab.collector import no_collection
from eet_lab.errors import KernelError, TrainingError
from eet_lab.models import load
from eet_lab.parts import buffers, launch, optimizers, steps
from eet_lab.parts.passes import Batching, Text
from eet_lab.technique import Recipe
from eet_lab.training import IGNORED, Example, Trainer, TrainSettings

PACKED = "pre_padding,mask_removal,packed_prefill"
aten = torch.ops.aten
OF_THE_HOST = (aten._local_scalar_dense.default, aten.lift_fresh.default, aten.nonzero.default)
"""A value that the host reads, a tensor that it makes, and a shape that depends on values: none can be captured."""


class Recorder(TorchDispatchMode):
    """Every operation with the tensors that it read and made: all else of it stays as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in OF_THE_HOST, f"{func} cannot be captured"
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, tensors_in(made)))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        """The same operations on the same tensors; what one makes is written to where it was."""
        for func, args, kwargs, made in self.calls:
            for old, new in zip(made, tensors_in(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def recorded(monkeypatch):
    """Captures are recordings, which leave the trainers' tensors as they were."""
    gc.collect()
    gc.freeze()  # the collection before each capture goes through what the test makes
    trainers = []

    def capture(work, pool):
        kept = [(t, t.clone()) for trainer in trainers for t in tensors(trainer)]
        recorder = Recorder()
        with recorder:
            work()
        for tensor, before in kept:
            tensor.copy_(before)
        return recorder

    monkeypatch.setattr(launch, "capture", capture)
    monkeypatch.setattr(launch, "capturing", nullcontext)
    for module in (buffers, optimizers):
        monkeypatch.setattr(module, "is_read_on_host", lambda weights: False)

    def made(network, graphs=32, bucket=16, **settings) -> Trainer:
        plain = by_device(parts(PACKED, optimizer=FLAT))
        captured = replace(plain, texts=steps.Bucketed(plain.texts, bucket), step_launch=steps.CapturedSteps(graphs))
        trainers.append(Trainer(network, captured, **settings))
        return trainers[-1]

    return made


@torch.no_grad()
def tensors(trainer: Trainer, grads: bool = True) -> list[torch.Tensor]:
    """All that a step changes."""
    buffers = trainer.optimizer.buffers
    each = [(b.weights.detach(), b.grads if grads else None, b.master, *b.moments.values()) for b in buffers]
    return [t for found in each for t in found if t is not None]


def batches(task: str, number: int, seed: int = 0) -> list[list[Example]]:
    """Of examples whose number and lengths change."""
    draw = random.Random(seed)

    def row(most: int = 14) -> list[int]:
        return [draw.randrange(5, 90) for _ in range(draw.randint(2, most))]

    def example() -> Example:
        ids = row()
        if task == "seq2seq":
            return Example(ids, row(9))
        if task == "masked":
            return Example(ids, [7 if place % 3 == 0 else IGNORED for place in range(len(ids))])
        return Example(ids)

    return [[example() for _ in range(draw.randint(3, 6))] for _ in range(number)]


MODELS = {
    "language": lambda: families.ours("gpt2").network,
    "masked": lambda: encoders.ours("bert-mlm").network,
    "seq2seq": lambda: seq2seqs.ours("bart").network,
}


@pytest.mark.parametrize(("task", "dropout"), [("language", 0.0), ("masked", 0.2), ("seq2seq", 0.2)])
def test_captured_steps_are_eager_ones(recorded, task, dropout):
    """Padded to buckets, in several passes, with a learning rate, a clipping, and noise that change between steps."""
    settings = TrainSettings(lr=0.1, eps=1e-2, warmup_steps=9, dropout=dropout, attention_dropout=dropout)
    settings = replace(settings, batch_tokens=30, max_grad_norm=0.5, label_smoothing=0.1, seed=3)
    captured = recorded(MODELS[task](), settings=settings)
    eager = Trainer(MODELS[task](), parts(PACKED), settings=settings)
    told, found = [], batches(task, 3)
    for batch in [*found, *found, *found[:2]]:
        told.append(captured.step(batch))
        wanted = eager.step(batch)
        assert told[-1].loss == pytest.approx(wanted.loss, rel=1e-5)
        assert told[-1].grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
        assert (told[-1].lr, told[-1].num_tokens) == (wanted.lr, wanted.num_tokens)
    assert max(step.num_passes for step in told) > 1
    for path, parameter in captured.parameters.items():
        torch.testing.assert_close(parameter, eager.parameters[path], rtol=1e-4, atol=2e-5)
    assert captured._launch.captures > 3
    loss, grads = captured.gradients(batch)
    wanted_loss, wanted_grads = eager.gradients(batch)
    assert loss == pytest.approx(wanted_loss, rel=1e-3) and grads.keys() == wanted_grads.keys()


def test_captured_images(recorded):
    """Passes of the same length have no pads, and plain attention does."""
    network, images = test_vision.ours("classes").network, test_vision.images()
    captured = recorded(network, lr=1e-2)
    captured.parts = replace(captured.parts, train_ops=Recipe().parts.train_ops)
    eager = Trainer(network, parts(PACKED), lr=1e-2)
    for number in range(5):
        batch = [Example(pixels=image + number, labels=(number + i) % 3) for i, image in enumerate(images)]
        told, wanted = captured.step(batch), eager.step(batch)
        assert told.loss == pytest.approx(wanted.loss, rel=1e-5) and told.computed_tokens == wanted.computed_tokens
    assert captured._launch.captures == 3, "a pass, the norm of gradients, and the update"


@pytest.mark.parametrize("task", MODELS)
def test_pads_of_a_bucket_change_nothing(task):
    """For attention that reads lengths from the host, in steps and evaluations of which nothing is captured."""
    plain, batch, network = parts(PACKED), batches(task, 1)[0], MODELS[task]()
    found = []
    for texts in (plain.texts, steps.Bucketed(plain.texts, 64)):
        trainer = Trainer(network, replace(plain, texts=texts), dropout=0.1, attention_dropout=0.1)
        found.append((trainer.evaluate(batch), *trainer.gradients(batch)))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-5)
    for path, grad in found[0][2].items():
        torch.testing.assert_close(grad, found[1][2][path], rtol=1e-4, atol=1e-5 * float(grad.abs().max() + 1))


@pytest.mark.parametrize(("optimizer", "dtype"), [("adamw", "float32"), ("adamw", "bfloat16"), ("sgd", "bfloat16")])
def test_a_captured_step_that_is_not_finite_changes_nothing(recorded, optimizer, dtype):
    """Of a graph that was captured before: the loss is not finite, then a gradient alone, which keeps its digits."""
    network = load(families.theirs("gpt2"), device="cpu", dtype=dtype).network
    captured = recorded(network, lr=1e-2, optimizer=optimizer)
    batch = batches("language", 1)[0]
    for _ in range(3):
        captured.step(batch)
    kept = [t.clone() for t in tensors(captured, grads=False)]
    before = (parameter := captured.parameters["norm.weight"]).detach().clone()
    for value, says in ((torch.inf, "loss of nan .* is the weight norm"), (1e30, "gradient norm of inf")):
        with torch.no_grad():
            parameter.fill_(value)
        with pytest.raises(TrainingError, match=f"Step 3 has a .*{says}"):
            captured.step(batch)
        with torch.no_grad():
            parameter.copy_(before)
        assert all(map(torch.equal, tensors(captured, grads=False), kept)) and captured.optimizer.num_steps == 3
    assert captured.step(batch).number == 3


def test_float16_skips_an_overflow_in_a_replay(recorded):
    network = load(families.theirs("gpt2"), device="cpu", dtype="float16").network
    captured = recorded(network, lr=1e-3, init_scale=2.0**8, growth_interval=100)
    batch = batches("language", 1)[0]
    for _ in range(3):
        assert not captured.step(batch).is_skipped
    captured.loss_scale.scale = 2.0**26
    kept = [p.detach().clone() for p in captured.parameters.values()]
    skipped = captured.step(batch)
    assert skipped.is_skipped and skipped.loss_scale == 2.0**26 and captured.loss_scale.scale == 2.0**25
    assert all(map(torch.equal, kept, captured.parameters.values())) and captured.optimizer.num_steps == 3
    captured.loss_scale.scale = 2.0**8
    assert captured.step(batch).loss < skipped.loss + 1e-2 and captured._launch.captures == 3


def test_memory_stays_and_old_graphs_go(recorded):
    """Each graph reads what is sent to the same addresses; of more kinds than are kept, the oldest go."""
    captured = recorded(families.ours("gpt2").network, graphs=4)
    shapes = [[Example([5] * length)] for length in (8, 9, 10)]
    for batch in (shapes[0], shapes[0], shapes[1], shapes[1]):
        captured.step(batch)
    first = next(iter(captured._launch._kept.values()))
    address = first.staging._data.data_ptr()
    captured.step(shapes[0])
    assert first.staging._data.data_ptr() == address and captured._launch.captures == 4
    for batch in (shapes[2], shapes[0], shapes[1], shapes[1]):
        captured.step(batch)
    assert len(captured._launch._kept) == 4 and captured._launch.captures == 5


class Row(NamedTuple):
    row: torch.Tensor


def test_graphs_share_a_pool_until_the_last_of_them_goes(monkeypatch):
    """Then PyTorch has forgotten it, and takes nothing more of that name."""
    handles = []

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            handles.append(pool)

        def capture_end(self):
            pass

        replay = capture_end

    monkeypatch.setattr(launch, "capturing", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for graphs, num_pools in ((1, 3), (2, 1)):
        handles.clear()
        replays = steps.Replays(lambda given: given.row + 1, torch.device("cpu"), graphs)
        for length in (3, 3, 4, 4, 3, 3):
            replays(Row(torch.zeros(length)))
        assert len({*map(id, handles)}) == num_pools, graphs
    replays.void()
    replays(Row(torch.zeros(3)))
    assert len({*map(id, handles)}) == 2


def test_a_trainer_that_nobody_has_is_gone_at_once(recorded):
    """Its weights, and its graphs: nothing of it waits for the collector."""
    trainer = Trainer(families.ours("gpt2").network, parts(PACKED, step_launch=steps.CapturedSteps()))
    for _ in range(3):
        trainer.step([Example([5, 6, 7])])
    gone = [weakref.ref(each) for each in (trainer, trainer._launch, next(iter(trainer.parameters.values())))]
    with no_collection():
        del trainer
        assert [each() for each in gone] == [None] * 3


def test_a_scan_captures_the_largest_first_and_changes_nothing(recorded):
    captured, found = recorded(families.ours("gpt2").network, lr=1e-2), batches("language", 6)
    kept, sizes = [p.detach().clone() for p in captured.parameters.values()], []
    run = captured._pass
    captured._pass = lambda given: sizes.append(len(given.read.batch.ids)) or run(given)
    captured.reserve(found)
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 2
    assert all(map(torch.equal, kept, captured.parameters.values())) and captured.optimizer.num_steps == 0
    captures, eager = captured._launch.captures, Trainer(families.ours("gpt2").network, parts(PACKED), lr=1e-2)
    assert [captured.step(each).loss for each in found] == pytest.approx([eager.step(each).loss for each in found])
    assert captured._launch.captures == captures


def test_a_captured_run_is_resumed_to_the_bit(recorded, tmp_path):
    """Captured or not: what is replayed is what ran."""
    found = batches("language", 1) * 6
    whole, first, second = (recorded(families.ours("gpt2").network, lr=1e-2, dropout=0.1) for _ in range(3))
    losses = [whole.step(each).loss for each in found]
    before = [first.step(each).loss for each in found[:4]]
    first.save(tmp_path)
    second.resume(tmp_path)
    assert before + [second.step(each).loss for each in found[4:]] == losses


def test_texts_of_different_lengths_need_an_attention_that_reads_them(recorded):
    captured = recorded(families.ours("gpt2").network)
    captured.parts = replace(captured.parts, train_ops=Recipe().parts.train_ops)
    with pytest.raises(KernelError, match="Turn varlen_attention on"):
        captured.step([Example([5, 6, 7]), Example([5, 6])])
    assert captured.step([Example([5, 6, 7]), Example([7, 6, 5])]).number == 0


@pytest.mark.parametrize(("batch_tokens", "most"), [(300, 256), (256, 256), (100, 128)])
def test_a_pass_stays_within_its_tokens_when_rounded_up_but_has_one_bucket_at_least(batch_tokens, most):
    texts = [Text([5] * (9 + number % 11), None, [0]) for number in range(60)]
    groups = [*steps.Bucketed(Recipe.parse(PACKED).parts.texts, 128)(texts, Batching(batch_tokens))]
    assert max(sum(len(text.ids) for text in group.texts) for group in groups) == most
    assert sum(len(group.numbers) for group in groups) == len(texts)


def test_sources_stay_within_the_tokens_of_a_pass_with_those_of_pads():
    texts = [Text([5] * (3 + number % 2), None, [0], [6] * 32) for number in range(30)]
    groups = [*steps.Bucketed(Recipe.parse(PACKED).parts.texts, 32)(texts, Batching(300))]
    assert max(sum(len(text.source) for text in group.texts) for group in groups) == 288
    assert sum(len(group.numbers) for group in groups) == len(texts)


@pytest.mark.parametrize("seed", range(20))
def test_buckets_hold_all_texts_and_sources_everywhere(seed):
    draw = random.Random(seed)
    has_source = seed % 2
    texts = [
        Text([5] * draw.randint(1, 20), None, range(draw.randint(0, 1)), [6] * draw.randint(1, 30) * has_source)
        for _ in range(draw.randint(2, 40))
    ]
    for group in steps.Bucketed(Recipe.parse(PACKED).parts.texts, 32)(texts, Batching(300)):
        own, pads = group.texts[: len(group.numbers)], group.texts[len(group.numbers) :]
        assert [text.ids for text in own] == [texts[number].ids for number in group.numbers]
        if pads:
            assert sum(len(text.ids) for text in group.texts) % 32 == 0 and len(group.texts) % 16 == 0
            assert sum(len(text.source) for text in group.texts) % 32 == 0 and group.num_asked % 16 == 0
            longest = max(len(text.ids) for text in own), max(len(text.source) for text in own)
            assert all(len(text.ids) <= longest[0] and len(text.source) <= longest[1] for text in pads)
            assert not has_source or all(text.source for text in pads if text.ids)
