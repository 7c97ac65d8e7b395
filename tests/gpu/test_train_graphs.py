"""Captured training steps on a GPU: those that are not captured, over changing lengths, in the same memory."""

from __future__ import annotations

from dataclasses import replace

import encoders
import families
import pytest
import seq2seqs
import test_vision
import torch
import transformers
from device_attention import by_device
from test_step_launch import batches

from eet_lab.bench.training import train_all
from eet_lab.errors import TrainingError
from eet_lab.models import load
from eet_lab.parts import steps
from eet_lab.parts.buffers import Buffer
from eet_lab.technique import Recipe
from eet_lab.training import Example, Trainer, TrainSettings

pytestmark = pytest.mark.gpu
PACKED = "pre_padding,mask_removal,packed_prefill"
STEPS = 20
SETTINGS = TrainSettings(lr=0.02, eps=1e-2, warmup_steps=9, max_grad_norm=0.5, label_smoothing=0.1, seed=3)
NAMES = {
    "language": lambda: families.theirs("gpt2"),
    "masked": lambda: encoders.theirs("bert-mlm"),
    "seq2seq": lambda: seq2seqs.theirs("bart"),
    "images": lambda: test_vision.theirs("classes"),
}


def network(task: str, dtype: torch.dtype):
    return load(NAMES[task](), device="cuda", dtype=dtype).network


def trainers(task: str, dtype: torch.dtype, recipe: str = PACKED, **changes) -> tuple[Trainer, Trainer]:
    """One that replays, and one that launches the same passes one kernel at a time."""
    words = recipe if dtype == torch.float32 else f"{recipe},varlen_attention"
    plain = Recipe.parse(words, "cuda").parts
    plain = replace(plain, texts=steps.Bucketed(plain.texts, 16))
    if dtype == torch.float32 and task != "images":  # which packed attention does not take
        plain = by_device(plain)
    settings = replace(SETTINGS, **changes)
    captured, eager = (
        Trainer(network(task, dtype), replace(plain, step_launch=launch), settings=settings)
        for launch in (steps.CapturedSteps(), steps.Eager)
    )
    return captured, eager


def examples(task: str, number: int) -> list[list[Example]]:
    if task != "images":
        return batches(task, number)
    images = test_vision.images()
    return [
        [Example(pixels=image + step / 9, labels=(step + i) % 3) for i, image in enumerate(images[: 3 + step % 3])]
        for step in range(number)
    ]


def assert_same(captured: Trainer, eager: Trainer, found: list[list[Example]], dtype: torch.dtype) -> None:
    """Each step of the one is that of the other, which begins with its weights: but for the order of sums in atomic
    additions of gradients.
    """
    limit = 1e-5 + 16 * torch.finfo(dtype).eps  # with other noise an eighth or more of a gradient is another
    for number, batch in enumerate(found):
        ours, plain = captured.step(batch), eager.step(batch)
        assert ours.loss == pytest.approx(plain.loss, rel=limit / 100), number
        assert ours.grad_norm == pytest.approx(plain.grad_norm, rel=limit / 4), number
        assert ours.is_skipped == plain.is_skipped and ours.loss_scale == plain.loss_scale
        for one, other in zip(captured.optimizer.buffers, eager.optimizer.buffers, strict=True):
            for mine, its in zip(state(one), state(other), strict=True):
                assert float((mine.float() - its.float()).norm()) <= limit * float(mine.float().norm()) + 1e-12, number
                its.copy_(mine)


@torch.no_grad()
def state(buffer: Buffer) -> list[torch.Tensor]:
    return [t for t in (buffer.weights.detach(), buffer.master, *buffer.moments.values()) if t is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("task", NAMES)
def test_captured_steps_are_eager_ones(task, dropout, dtype):
    """In one pass and in several, whose gradients add up, with optimizers tensor by tensor and flat."""
    changes = {"dropout": dropout, "attention_dropout": dropout, "batch_tokens": 30 if dropout else 4096}
    recipe = f"{PACKED},flat_optimizer" if dropout else f"{PACKED},chunked_cross_entropy:chunk=16"
    captured, eager = trainers(task, dtype, recipe, **changes)
    assert_same(captured, eager, examples(task, STEPS // 2) * 2, dtype)
    assert captured._launch.captures >= 3, "a step's first pass, later ones, and the update"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_overflow_of_float16_in_a_replay_is_skipped(optimizer):
    changes = {"init_scale": 2.0**10, "growth_interval": 4, "optimizer": optimizer}
    captured, eager = trainers("language", torch.float16, **changes)
    found = batches("language", 2) * 8
    assert_same(captured, eager, found[:6], torch.float16)
    for trainer in (captured, eager):
        trainer.loss_scale.scale = 2.0**30
    kept = [p.detach().clone() for p in captured.parameters.values()]
    assert captured.step(found[6]).is_skipped and eager.step(found[6]).is_skipped
    assert all(map(torch.equal, kept, captured.parameters.values()))
    assert captured.optimizer.num_steps == eager.optimizer.num_steps == 6
    for trainer in (captured, eager):
        trainer.loss_scale.scale = 2.0**10
    assert_same(captured, eager, found[7:], torch.float16)


@pytest.mark.parametrize("recipe", [PACKED, f"{PACKED},flat_optimizer:master=stochastic"])
def test_a_step_that_is_not_finite_changes_nothing(recipe):
    captured, _ = trainers("language", torch.bfloat16, recipe)
    batch = batches("language", 1)[0]
    for _ in range(3):
        captured.step(batch)
    kept = [p.detach().clone() for p in captured.parameters.values()]
    moments = [m.clone() for buffer in captured.optimizer.buffers for m in buffer.moments.values()]
    before = (norm := captured.parameters["norm.weight"]).detach().clone()
    with torch.no_grad():
        norm[0] = torch.inf
    with pytest.raises(TrainingError, match="Step 3 has a loss of nan .* is the weight norm.weight"):
        captured.step(batch)
    with torch.no_grad():
        norm.copy_(before)
    assert all(map(torch.equal, kept, captured.parameters.values()))
    after = [m for buffer in captured.optimizer.buffers for m in buffer.moments.values()]
    assert all(map(torch.equal, moments, after)) and captured.optimizer.num_steps == 3
    assert captured.step(batch).number == 3


def test_memory_is_flat_after_a_scan_and_a_run_is_resumed(tmp_path):
    captured, _ = trainers("language", torch.bfloat16, f"{PACKED},flat_optimizer", dropout=0.1)
    found = batches("language", 10)
    captured.reserve(found)
    captures, told = captured._launch.captures, []
    for number in range(30):
        if number == 20:
            captured.save(tmp_path)
            saved = [t.cpu() for buffer in captured.optimizer.buffers for t in state(buffer)]
        told.append((captured.step(found[number % 10]).loss, torch.cuda.memory_allocated()))
        if number == 0:
            reserved = torch.cuda.memory_reserved()
    assert captured._launch.captures == captures and len({size for _, size in told[1:]}) == 1
    assert torch.cuda.memory_reserved() == reserved
    captured.resume(tmp_path)
    resumed = [t.cpu() for buffer in captured.optimizer.buffers for t in state(buffer)]
    assert all(map(torch.equal, resumed, saved)) and captured.num_steps == captured.optimizer.num_steps == 20
    again = [captured.step(found[number % 10]).loss for number in range(20, 30)]
    assert again == pytest.approx([loss for loss, _ in told[20:]], rel=1e-2)
    before = torch.cuda.memory_allocated()
    captured._launch.close()
    assert torch.cuda.memory_allocated() < before and captured.step(found[0]).loss > 0


@pytest.mark.parametrize("recipe", ["", "chunked_cross_entropy,flat_optimizer"])
def test_a_graph_is_faster_where_the_host_launches(recipe):
    """12 layers of 64 channels over 8 x 64 tokens, with plain attention: the GPU waits for launches."""
    from time import perf_counter

    config = transformers.GPT2Config(
        n_layer=12, n_embd=64, n_head=4, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model = load(transformers.GPT2LMHeadModel(config), device="cuda", dtype=torch.bfloat16).network
    found, ms = [Example([5 + i] * 64) for i in range(8)], []
    for name in ("", "captured_steps"):
        words = ",".join(filter(None, [PACKED, "varlen_attention", recipe, name]))
        trainer = Trainer(model, Recipe.parse(words, "cuda").check("cuda", model.config.in_training).parts)
        times = []
        for _ in range(13):
            begin = perf_counter()
            trainer.step(found)
            times.append((perf_counter() - begin) * 1e3)
        ms.append(sorted(times[3:])[5])
    print(f"{recipe or 'plain'}: {ms[0]:.2f} ms eager, {ms[1]:.2f} ms captured")
    assert ms[1] < ms[0] / 2


def test_the_peak_of_a_benchmark_has_what_graphs_keep():
    """Activations of 2,048 tokens are most of it, and a replay allocates none of them; those of an earlier one go."""
    config = transformers.GPT2Config(
        n_layer=8, n_embd=256, n_head=4, vocab_size=500, n_positions=512, bos_token_id=0, eos_token_id=0
    )
    model = load(transformers.GPT2LMHeadModel(config), device="cuda", dtype=torch.bfloat16)
    recipes = "all", "all,-captured_steps"
    taken = [train_all(model, "train:any/b8/s512", recipes, repeats=1)[0] for _ in range(2)]
    (captured, eager), (again, _) = ([row.peak_bytes for row in rows] for rows in taken)
    assert abs(again / captured - 1) < 0.02
    held = 16 * model.config.num_params  # weights, gradients, master copies and moments
    assert eager > 2 * held and 0.7 * (eager - held) < captured - held < 1.5 * (eager - held)
