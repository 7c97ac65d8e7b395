"""Runs of training: resumed ones, stopped ones, and what is told on the way."""

from __future__ import annotations

import random
import threading

import families
import pytest
import torch

from eet_lab.bench.train_compare import compare_training, ladder_training
from eet_lab.errors import TrainingError
from eet_lab.technique import Recipe
from eet_lab.training import Rows, Trainer, train


def rows(seed: int, num_tokens: int = 120) -> Rows:
    draw = random.Random(seed)
    return Rows([draw.randrange(5, 40) for _ in range(num_tokens)], 12, seed=seed)


def trainer() -> Trainer:
    return Trainer(families.ours("gpt2").network, dropout=0.1, lr=1e-2, warmup_steps=2)


HOW = {"batch_rows": 3, "max_steps": 7}


def test_a_resumed_run_goes_on_to_the_bit(tmp_path):
    """Stopped in the middle of an epoch of four steps, and once more by its own limit."""
    whole, told = trainer(), []
    run = train(whole, rows(0), held_out=rows(1, 40), evaluate_every=2, on_evaluation=told.append, **HOW)
    assert [step.number for step in run.steps] == [*range(7)] and not run.was_stopped and run.tokens_per_s > 0
    assert [each.num_steps for each in run.evaluations] == [0, 2, 4, 6, 7] and list(run.evaluations) == told
    assert run.evaluations[-1].loss < run.evaluations[0].loss and run.losses == tuple(s.loss for s in run.steps)
    stop, losses = threading.Event(), []
    parted = train(
        trainer(), rows(0), folder=tmp_path, on_step=lambda step: step.number == 1 and stop.set(), cancel=stop, **HOW
    )
    assert parted.was_stopped and len(parted.steps) == 2
    losses += parted.losses
    for limit in (5, 7):
        again = trainer()
        again.resume(tmp_path)
        losses += train(again, rows(0), folder=tmp_path, save_every=3, **HOW | {"max_steps": limit}).losses
    assert tuple(losses) == run.losses
    assert all(torch.equal(a, b) for a, b in zip(again.parameters.values(), whole.parameters.values(), strict=True))


def test_memory_is_taken_first_and_steps_stay_the_same_to_the_bit():
    packed = Recipe.parse("pre_padding,mask_removal,packed_prefill").parts
    plain, reserved = (Trainer(families.ours("gpt2").network, packed, dropout=0.1, lr=1e-2) for _ in range(2))
    losses = train(plain, rows(0), **HOW).losses
    assert train(reserved, rows(0), reserve=True, **HOW).losses == losses
    assert all(map(torch.equal, reserved.parameters.values(), plain.parameters.values()))
    with pytest.raises(TrainingError, match="has 48 tokens, but Trainer.reserve has taken memory for at most 36"):
        reserved.step(rows(0).batch(0, 4))


def test_a_step_that_fails_keeps_the_last_checkpoint(tmp_path):
    failing = trainer()
    train(failing, rows(0), folder=tmp_path, **HOW | {"max_steps": 2})
    before = next(tmp_path.iterdir()).read_bytes()
    with torch.no_grad():
        next(iter(failing.parameters.values())).fill_(float("nan"))
    with pytest.raises(TrainingError, match="Step 2 has a loss of nan"):
        train(failing, rows(0), folder=tmp_path, save_every=1, **HOW)
    assert next(tmp_path.iterdir()).read_bytes() == before


@pytest.mark.parametrize("is_ruined_at_once", [False, True])
def test_a_step_that_ruins_the_weights_leaves_the_checkpoint_before_it(tmp_path, is_ruined_at_once):
    """The checkpoint after it was written before anything was seen to be wrong."""
    if not is_ruined_at_once:
        train(trainer(), rows(0), folder=tmp_path, save_every=1, **HOW | {"max_steps": 3})
    (tmp_path / "trainer.previous.pt").write_bytes(b"of a run that was killed")
    ruined = Trainer(families.ours("gpt2").network, lr=1e30)
    if not is_ruined_at_once:
        ruined.resume(tmp_path)
    with pytest.raises(TrainingError, match="has a loss of nan"):
        train(ruined, rows(0), folder=tmp_path, save_every=1, **HOW)
    assert [path.name for path in tmp_path.iterdir()] == ["trainer.pt"]
    assert (tmp_path / "trainer.pt").stat().st_size > 1000
    if not is_ruined_at_once:
        again = trainer()
        again.resume(tmp_path)
        assert again.num_steps == 3 and again.evaluate([*rows(1, 40)]) < 10


def test_held_out_examples_that_can_be_read_once_are_told_each_time():
    held_out = rows(1, 40)
    runs = [train(trainer(), rows(0), held_out=given, **HOW) for given in (held_out, iter(held_out), [*held_out])]
    assert runs[0].evaluations == runs[1].evaluations == runs[2].evaluations and len(runs[0].evaluations) == 2


def test_what_a_run_cannot_be_is_told():
    started = trainer()
    train(started, rows(0), batch_rows=1, max_steps=2)
    for changes, says in [
        ({"max_steps": 1}, "max_steps is 1, but it must be .* from 2"),
        ({"batch_rows": 0}, "batch_rows is 0"),
        ({"evaluate_every": 2}, "evaluate_every is 2, but there is no held_out"),
        ({"save_every": 2}, "save_every is 2, but there is no folder"),
        ({"save_every": 0, "folder": "x"}, "save_every is 0"),
        ({"folder": __file__}, "The training cannot be saved in .*there is a file in its place.*Choose another folder"),
        ({"held_out": 3}, "held_out is 3, but it must be examples"),
        ({"rows": [[1, 2], [3, 4]]}, r"rows is \[\[1, 2\], \[3, 4\]\], but .* Give Rows\(.*Examples\("),
        ({"rows": None}, "rows is None, but"),
    ]:
        with pytest.raises(TrainingError, match=says):
            train(started, **{"rows": rows(0)} | HOW | changes)
    assert started.num_steps == 2
    shorter = Trainer(families.ours("gpt2").network, lr_schedule="linear", max_steps=6)
    with pytest.raises(TrainingError, match="max_steps is 7, but .* rate ends at 0 after max_steps=6 of its settings"):
        train(shorter, rows(0), **HOW)
    with pytest.raises(TrainingError, match=r"must be a Trainer: give Trainer\(model.network\)"):
        train(families.ours("gpt2"), rows(0), **HOW)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_no_step_is_made_after_the_end_of_the_schedule(schedule, tmp_path):
    network = families.ours("gpt2").network
    ends = Trainer(network, lr_schedule=schedule, max_steps=2)
    steps = ends.steps(rows(0).batch(n, 3) for n in range(4))
    assert [next(steps).number for _ in range(2)] == [0, 1]
    before = {name: weight.detach().clone() for name, weight in ends.parameters.items()}
    says = rf"Step 2 cannot be made .*: lr_schedule='{schedule}' ends at max_steps=2, .* larger max_steps"
    for go_on in (lambda: next(steps), lambda: ends.step(rows(0).batch(2, 3))):
        with pytest.raises(TrainingError, match=says):
            go_on()
    assert ends.num_steps == 2 and all(torch.equal(before[name], weight) for name, weight in ends.parameters.items())
    longer = Trainer(network, lr_schedule=schedule, max_steps=3)
    longer.resume(ends.save(tmp_path).parent)
    assert longer.step(rows(0).batch(2, 3)).lr > 0
    steady = Trainer(network, max_steps=1)
    assert [steady.step(rows(0).batch(n, 3)).lr for n in range(2)] == [1e-3, 1e-3]


@pytest.mark.parametrize("how", [compare_training, ladder_training])
def test_what_cannot_say_what_a_step_reads_is_told_before_any_work(how, monkeypatch):
    monkeypatch.setattr("eet_lab.bench.train_compare.Trainer", lambda *_, **__: pytest.fail("a trainer was made"))
    with pytest.raises(TrainingError, match=r"rows is \[\[1, 2\]\], but .* Give Rows\("):
        how(families.ours("gpt2"), [[1, 2]], "pre_padding")
