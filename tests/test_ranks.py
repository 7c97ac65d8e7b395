"""Two processes that train one model are one process with the same batch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from threading import Event

import families
import pytest
import torch
import torch.distributed as dist
from test_training import language

from eet_lab.errors import Cancelled, OutOfMemory, RecipeError, TrainingError
from eet_lab.models.decoder import mapped
from eet_lab.parts import Parts
from eet_lab.parts.steps import CapturedSteps
from eet_lab.technique import Recipe
from eet_lab.training import Trainer, TrainSettings, launch, ranks

SETTINGS = TrainSettings(lr=1e-2, eps=1e-5, dropout=0.1, max_grad_norm=0.5, batch_tokens=25, seed=2)
RECIPE = "pre_padding,mask_removal,packed_prefill,chunked_cross_entropy:chunk=5,flat_optimizer"


def train(network, parts, batches, folder: Path) -> dict:
    """What a rank has after some steps, and evaluations; a batch has fewer examples than there are ranks."""
    ranks.BUCKET_BYTES = 4096
    if dist.is_initialized() and dist.get_rank():
        network = mapped(network, torch.zeros_like)  # the first rank's are what counts
    found = {}
    for number, steps in enumerate((batches[:1], [*batches, batches[0]])):
        trainer = Trainer(network, parts[number], settings=SETTINGS)
        losses = [trainer.step(batch).loss for batch in steps]
        losses += [trainer.evaluate(batches[0]), trainer.evaluate(batches[-1])]
        found |= {f"{number}/{path}": parameter.detach() for path, parameter in trainer.parameters.items()}
        found[f"{number}/losses"] = torch.tensor(losses)
    stop = Event()
    if not dist.is_initialized() or dist.get_rank() == 1:
        stop.set()  # on one rank alone: the other would wait for its gradients
    with pytest.raises(Cancelled):
        trainer.step(batches[0], stop)
    trainer.save(folder)
    if isinstance(trainer.ranks, ranks.Group):
        assert len(trainer.ranks.buckets) > 2
        torch.save(found, folder / f"{dist.get_rank()}.pt")
    return found


def test_two_ranks_are_one_process(tmp_path):
    """Losses and weights are those of one process but for rounding, and each rank has the same to the bit."""
    network, examples, parts = families.ours("gpt2").network, language(), (Parts(), Recipe.parse(RECIPE).parts)
    batches = [examples, examples[:3], examples[:1]]
    alone = train(network, parts, batches, tmp_path / "alone")
    launch(train, 2, network, parts, batches, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert alone.keys() == first.keys() == second.keys()
    for name, tensor in alone.items():
        assert torch.equal(first[name], second[name]), name
        limit = 1e-5 if name.endswith("losses") else 2e-4
        assert torch.allclose(first[name], tensor, rtol=limit, atol=limit), name
    resumed = Trainer(network, parts[1], settings=SETTINGS)
    resumed.resume(tmp_path)
    assert all(torch.equal(first[f"1/{path}"], each) for path, each in resumed.parameters.items())


def one_is_full(network, batch, folder: Path) -> None:
    """A pass of the second rank, and then an evaluation of it, find no memory; the first rank is not left waiting."""
    trainer = Trainer(network, Recipe.parse(RECIPE).parts, settings=SETTINGS)
    trainer.step(batch)
    kept = [parameter.detach().clone() for parameter in trainer.parameters.values()]
    loss, is_full, says = trainer.parts.loss, dist.get_rank() == 1, "Another rank could not do its part of the step"

    def full(*_: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to")

    for work in (trainer.step, trainer.gradients, trainer.evaluate):
        if is_full:
            trainer.parts = replace(trainer.parts, loss=full)
        with pytest.raises(OutOfMemory if is_full else TrainingError, match="memory is full" if is_full else says):
            work(batch)
        trainer.parts = replace(trainer.parts, loss=loss)
    assert all(map(torch.equal, kept, trainer.parameters.values())) and trainer.num_steps == 1
    with pytest.raises(RecipeError, match="captured_steps trains in one process"):
        Trainer(network, replace(trainer.parts, step_launch=CapturedSteps()))
    told = [trainer.step(batch).loss, trainer.evaluate(batch)]
    torch.save({**trainer.parameters, "losses": torch.tensor(told)}, folder / f"{dist.get_rank()}.pt")


def test_one_whose_memory_is_full_ends_a_step_of_all(tmp_path):
    launch(one_is_full, 2, families.ours("gpt2").network, language(), tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no more text")
    dist.barrier()


def test_one_that_raises_ends_all(monkeypatch):
    """Told from a notebook's cell, whose functions have no file: the processes are forked."""
    monkeypatch.setattr(one_fails, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(TrainingError, match="Rank 1 failed, and all were ended: ValueError: no more text"):
        launch(one_fails, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(TrainingError, match="Put the function into a file, and import it"):
        launch(one_fails, 2)
    with pytest.raises(TrainingError, match="num_processes is 0"):
        launch(one_fails, 0)
