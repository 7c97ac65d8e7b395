"""Two processes that train one model are one process with the same batch: over gloo on a CPU, over NCCL on two GPUs.

`pytest -m gpu tests/test_ranks.py` runs them with a GPU for each process.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event

import families
import pytest
import torch
import torch.distributed as dist
from device_attention import by_device
from test_training import language

from eet_lab.errors import Cancelled, OutOfMemory, TrainingError
from eet_lab.models.decoder import mapped
from eet_lab.parts import Parts
from eet_lab.parts.steps import Bucketed, CapturedSteps, Eager
from eet_lab.technique import Recipe
from eet_lab.training import Example, Rows, Trainer, TrainSettings, launch, ranks
from eet_lab.training import train as run

SETTINGS = TrainSettings(lr=1e-2, eps=1e-5, dropout=0.1, max_grad_norm=0.5, batch_tokens=25, seed=2)
RECIPE = "pre_padding,mask_removal,packed_prefill,chunked_cross_entropy:chunk=5,flat_optimizer"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """Where ranks train; each has a GPU of its own."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed, one for each process")
    return request.param


@pytest.fixture(scope="module")
def folder(device, tmp_path_factory) -> Path:
    """What two ranks wrote, which did all that is looked at."""
    found = tmp_path_factory.mktemp("ranks")
    launch(both, 2, families.ours("gpt2").network, device, language(), found)
    return found


def both(network, device: str, examples, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        train(patch, network, device, examples, folder)
        one_is_full(network, device, examples, folder)
    if device == "cpu":
        group_ends(network, examples, folder)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked, and need not import again, which takes two of them 20 s; with a GPU they are spawned."""
    if not torch.cuda.is_available():
        start = torch.multiprocessing.start_processes
        monkeypatch.setattr(
            torch.multiprocessing, "start_processes", lambda *given, **_: start(*given, start_method="fork")
        )


class Whole(Eager):
    """Not captured, and treated as if it were."""

    is_captured = True


def parts_on(device: str) -> list[Parts]:
    """Summed after each weight's gradient, in buckets, and after passes that are one launch each."""
    flat = Recipe.parse(RECIPE).parts
    if device == "cpu":
        return [Parts(), flat, replace(flat, step_launch=Whole)]
    bucketed = by_device(replace(flat, texts=Bucketed(flat.texts, 16)))
    return [Parts(), flat, replace(bucketed, step_launch=CapturedSteps())]


def on(network, device: str):
    """A copy for this rank alone."""
    return mapped(network, lambda tensor: tensor.to(device, copy=True))


def train(patch: pytest.MonkeyPatch, network, device: str, examples, folder: Path) -> dict:
    """What a rank has after some steps, and evaluations; a batch has fewer examples than there are ranks."""
    patch.setattr(ranks, "BUCKET_BYTES", 4096)
    network, batches = on(network, device), [examples, examples[:3], examples[:1]]
    if dist.is_initialized() and dist.get_rank():
        network = mapped(network, torch.zeros_like)  # the first rank's are what counts
    found, missing, send = {}, list[int](), ranks.Group._send

    def sent(group: ranks.Group) -> None:
        missing.append(sum(bucket.num_missing for bucket in group.buckets))
        send(group)

    patch.setattr(ranks.Group, "_send", sent)
    for number, parts in enumerate(parts_on(device)):
        trainer = Trainer(network, parts, settings=SETTINGS)
        losses = [trainer.step(batch).loss for batch in (batches if number == 0 else [*batches, *batches[:2]])]
        losses += [trainer.evaluate(batches[0]), trainer.evaluate(batches[-1])]
        found |= {f"{number}/{path}": parameter.detach() for path, parameter in trainer.parameters.items()}
        found[f"{number}/losses"] = torch.tensor(losses)
        stop = Event()
        if not dist.is_initialized() or dist.get_rank() == 1:
            stop.set()  # on one rank alone: the other would wait for its gradients
        for batch in (batches[0], batches[-1]):  # the second rank has no part of the last one
            with pytest.raises(Cancelled):
                trainer.step(batch, stop)
        if number == 1:
            trainer.save(folder)
    if isinstance(trainer.ranks, ranks.Group):
        assert len(trainer.ranks.buckets) > 2
        assert max(missing) > 0, "no gradient was summed before the backward pass had made all"
        torch.save(found, folder / f"{dist.get_rank()}.pt")
    return found


def test_two_ranks_are_one_process(device, folder, tmp_path, monkeypatch):
    """Losses and weights are those of one process but for rounding, and each rank has the same to the bit."""
    network = families.ours("gpt2").network
    alone = train(monkeypatch, network, device, language(), tmp_path)
    first, second = (torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(2))
    assert alone.keys() == first.keys() == second.keys()
    for name, tensor in alone.items():
        assert torch.equal(first[name], second[name]), name
        limit = 1e-5 if name.endswith("losses") else 2e-4
        assert torch.allclose(first[name], tensor.cpu(), rtol=limit, atol=limit), name
    resumed = Trainer(network, parts_on("cpu")[1], settings=SETTINGS)
    resumed.resume(folder)
    assert all(torch.equal(first[f"1/{path}"], each) for path, each in resumed.parameters.items())


def one_is_full(network, device: str, batch, folder: Path) -> None:
    """A pass of the second rank, and then an evaluation of it, find no memory; the first rank is not left waiting."""
    trainer = Trainer(on(network, device), Recipe.parse(RECIPE).parts, settings=SETTINGS)
    trainer.step(batch)
    kept = [parameter.detach().clone() for parameter in trainer.parameters.values()]
    loss, is_full = trainer.parts.loss, dist.get_rank() == 1
    says = r"Rank 1 failed, and all ranks left this step out; .* It says: RuntimeError: \[enforce fail at alloc_cpu"

    def full(*_: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to")

    for work in (trainer.step, trainer.gradients, trainer.evaluate):
        if is_full:
            trainer.parts = replace(trainer.parts, loss=full)
        with pytest.raises(OutOfMemory if is_full else TrainingError, match="memory is full" if is_full else says):
            work(batch)
        trainer.parts = replace(trainer.parts, loss=loss)
    (folder / "file").touch()
    with pytest.raises(
        TrainingError, match=r"^The training cannot be saved in|^The first rank failed: TrainingError: The"
    ):
        trainer.save(folder / "file")
    assert all(map(torch.equal, kept, trainer.parameters.values())) and trainer.num_steps == 1
    updates_fail(trainer, batch, folder / "before", full)
    told = [trainer.step(batch).loss, trainer.evaluate(batch)]
    torch.save({**trainer.parameters, "losses": torch.tensor(told)}, folder / f"full-{dist.get_rank()}.pt")


def updates_fail(trainer: Trainer, batch, folder: Path, full) -> None:
    """What follows a step's passes finds no memory: on one rank alone, and on one as the other failed before it."""
    trainer.save(folder)
    is_full, loss = dist.get_rank() == 1, trainer.parts.loss
    for fails, work in (("_totals", trainer.step), ("_updated", trainer.evaluate)):
        if is_full:
            setattr(trainer, fails, full)
            with pytest.raises(OutOfMemory, match="memory is full"):
                trainer.step(batch)
            delattr(trainer, fails)
        else:
            trainer.step(batch)
        for _ in range(2):  # until they are made alike
            with pytest.raises(
                TrainingError,
                match=r"rank 0 has made 2, rank 1 has made 1\. .* Resume all ranks from the last checkpoint",
            ):
                work(batch)
        trainer.resume(folder)
    if is_full:
        trainer.parts = replace(trainer.parts, loss=full)
        with pytest.raises(OutOfMemory):
            trainer.step(batch)
        trainer.parts = replace(trainer.parts, loss=loss)
    else:
        trainer._totals = full
        with pytest.raises(TrainingError, match="Rank 1 failed, and all ranks left this step out"):
            trainer.step(batch)
        del trainer._totals


def test_one_whose_memory_is_full_ends_a_step_of_all(folder):
    first, second = (torch.load(folder / f"full-{rank}.pt", map_location="cpu") for rank in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def given_apart(network, examples) -> None:
    """Each rank is given its own share, or other numbers, where all must be given the same."""
    is_second = dist.get_rank() == 1
    trainer = Trainer(network, settings=SETTINGS)
    trainer.step(examples)
    kept = [parameter.detach().clone() for parameter in trainer.parameters.values()]
    own = examples[is_second::2]
    for batch, count in ((own, len(examples[1::2])), (examples[:4] if is_second else examples[:5], 4)):
        says = f"Ranks were given different examples: rank 0 has .*, and rank 1 has {count} .* each reads its own share"
        for work in (trainer.step, trainer.gradients, trainer.evaluate):
            with pytest.raises(TrainingError, match=says):
                work(batch)
    assert trainer.num_steps == 1 and all(map(torch.equal, kept, trainer.parameters.values()))
    rows = [Rows([*range(5, number)], 9, seed=2) for number in (80, 95)]
    for changes, says in (
        ({"max_steps": 3 + is_second}, "max_steps is 3 on rank 0 and 4 on rank 1. Give all ranks the same"),
        ({"batch_rows": 2 - is_second}, "batch_rows is 2 on rank 0 and 1 on rank 1"),
        ({"rows": rows[is_second]}, "rows is 8 on rank 0 and 10 on rank 1"),
        ({"held_out": [*rows[0]][is_second:]}, "held_out is 8 on rank 0 and 7 on rank 1"),
    ):
        with pytest.raises(TrainingError, match=f"Ranks differ in their training: {says}"):
            run(trainer, **{"rows": rows[0], "max_steps": 3, "batch_rows": 2} | changes)
    with pytest.raises(TrainingError, match="Ranks differ in their trainers: seed is 0 on rank 0 and 1 on rank 1"):
        Trainer(network, seed=int(is_second))
    with pytest.raises(TrainingError, match="their trainers: lr is 0.001 on rank 0 and 0.002 on rank 1"):
        Trainer(network, lr=1e-3 * (1 + is_second))
    assert run(trainer, rows[0], max_steps=3, batch_rows=2).losses and trainer.num_steps == 3


def one_has_less_memory_or_is_stopped(network) -> None:
    """What ends a scan, or is refused after it, on one rank alone: the other does not wait for ever."""
    is_second, texts = dist.get_rank() == 1, [Example([5] * 6), Example([5] * 9)]
    trainer, stop = Trainer(network, settings=SETTINGS), Event()
    trainer.reserve([texts])
    with pytest.raises(TrainingError, match="has 9 tokens, but Trainer.reserve has taken memory for at most 6"):
        trainer.step(texts[::-1])
    assert trainer.step(texts).number == 0
    if is_second:
        stop.set()
    asked = {"max_steps": 3, "batch_rows": 2, "reserve": True, "cancel": stop}
    assert run(trainer, Rows([*range(5, 80)], 9), **asked).was_stopped and trainer.num_steps == 1


def through_checkpoints(network, folder: Path) -> None:
    """A run that writes checkpoints, is stopped, is resumed, and fails: each rank has all of it."""
    rows, stop, is_second = Rows([*range(5, 80)], 9), Event(), dist.get_rank() == 1

    def on_step(step) -> None:
        if is_second and step.number == 4:
            stop.set()  # on one rank alone

    asked = {"batch_rows": 2, "folder": folder, "save_every": 2}
    first = Trainer(network, settings=SETTINGS)
    assert len(run(first, rows, max_steps=4, **asked).steps) == 4
    stopped = run(first, rows, max_steps=9, on_step=on_step, cancel=stop, **asked)
    assert stopped.was_stopped and [step.number for step in stopped.steps] == [4]
    whole, resumed = Trainer(network, settings=SETTINGS), Trainer(network, settings=SETTINGS)
    run(whole, rows, max_steps=8, batch_rows=2)
    resumed.resume(folder)
    assert resumed.num_steps == 5
    run(resumed, rows, max_steps=8, **asked)
    assert all(map(torch.equal, whole.parameters.values(), resumed.parameters.values()))

    def broken(step) -> None:
        if resumed.num_steps == 9:
            next(iter(resumed.parameters.values())).detach().fill_(torch.nan)

    with pytest.raises(TrainingError, match="loss"):
        run(resumed, rows, max_steps=12, on_step=broken, **{**asked, "save_every": 1})
    whole.resume(folder)
    assert whole.num_steps == 8 and [path.name for path in folder.iterdir()] == ["trainer.pt"]


@pytest.mark.usefixtures("forked")
def test_ranks_write_checkpoints_stop_and_resume(tmp_path):
    launch(through_checkpoints, 2, families.ours("gpt2").network, tmp_path)


@pytest.mark.usefixtures("forked")
def test_what_one_rank_cannot_is_told_to_the_other():
    launch(one_has_less_memory_or_is_stopped, 2, families.ours("gpt2").network)


@pytest.mark.usefixtures("forked")
def test_ranks_that_are_given_different_things_are_told_before_weights_change():
    launch(given_apart, 2, families.ours("gpt2").network, language())


def group_ends(network, examples, folder: Path) -> None:
    """As a script that torchrun starts ends its group; `launch` has its own to end. Writes the names of its threads."""
    Trainer(network, settings=SETTINGS).step(examples)
    rank = dist.get_rank()
    dist.destroy_process_group()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    (folder / f"threads-{rank}.txt").write_text("\n".join(names))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_a_group_that_is_destroyed_leaves_no_threads_of_its_works(device, folder):
    """One that frees a tensor while the interpreter ends would abort the process."""
    if device == "cuda":
        pytest.skip("NCCL's threads are not gloo's")
    for rank in range(2):
        names = (folder / f"threads-{rank}.txt").read_text().split("\n")
        assert any(names) and not [name for name in names if "gloo_runloop" in name]


def from_a_notebook(examples, folder: Path) -> None:
    torch.set_num_threads(1)  # the pool of more is not there after a fork
    dist.init_process_group("gloo")
    trainer = Trainer(families.ours("gpt2").network, parts_on("cpu")[1], settings=SETTINGS)
    assert isinstance(trainer.ranks, ranks.Group)
    torch.save(torch.tensor(trainer.step(examples).loss), folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


def test_ranks_that_accelerate_launches_train_one_model(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    if torch.cuda.is_available():
        pytest.skip("ranks of this test have the CPU")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # transformers' trainers have made one
    alone = Trainer(families.ours("gpt2").network, parts_on("cpu")[1], settings=SETTINGS).step(language())
    accelerate.notebook_launcher(from_a_notebook, (language(), tmp_path), num_processes=2, use_port=port)
    losses = [torch.load(tmp_path / f"{rank}.pt").item() for rank in range(2)]
    assert losses[0] == losses[1] == pytest.approx(alone.loss, rel=1e-5)


def one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no more text")
    dist.barrier()


def test_one_that_raises_ends_all(device, monkeypatch):
    """On a CPU told from a notebook's cell, whose functions have no file: the processes are forked."""
    failed = "Rank 1 failed, and all were ended: ValueError: no more text"
    if device == "cuda":
        with pytest.raises(TrainingError, match=failed):
            launch(one_fails, 2)
        return
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(one_fails, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(TrainingError, match=failed):
        launch(one_fails, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(TrainingError, match="Put the function into a file, and import it"):
        launch(one_fails, 2)
    with pytest.raises(TrainingError, match="num_processes is 0"):
        launch(one_fails, 0)


def test_what_is_no_function_of_a_file_is_told():
    with pytest.raises(TrainingError, match="function is 'work', but it must be a function"):
        launch("work", 2)
    with pytest.raises(TrainingError, match="<lambda> cannot be sent to other processes .* stands by itself in a file"):
        launch(lambda: 1, 2)
