"""Two workers of Ray Train on a cluster of this machine train one model. `make test-ray` runs it on the CPU.

`pytest -m gpu tests/test_ray_train.py` gives a GPU to each worker.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import families
import pytest
import torch
import torch.distributed as dist
from test_training import language

from eet_lab import ray_here
from eet_lab.errors import SetupError, TrainingError
from eet_lab.models.decoder import mapped
from eet_lab.technique import Recipe
from eet_lab.threads import num_cores
from eet_lab.training import Trainer, TrainSettings, launch_on_ray

NEEDS_RAY = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray installs and tests it"),
    pytest.mark.skipif(num_cores() < 2, reason="two workers on the CPU need two cores"),
]
SETTINGS = TrainSettings(lr=1e-2, eps=1e-5, dropout=0.1, seed=2)


def needs_ray(test):
    for mark in NEEDS_RAY:
        test = mark(test)
    return test


def train(network, batches, folder: Path, device: str) -> None:
    network = mapped(network, lambda tensor: tensor.to(device, copy=True))
    trainer = Trainer(network, Recipe.parse("pre_padding,flat_optimizer").parts, settings=SETTINGS)
    losses = [trainer.step(batch).loss for batch in batches]
    trainer.save(folder)
    rank = dist.get_rank() if dist.is_initialized() else "alone"
    torch.save({**trainer.parameters, "losses": torch.tensor(losses)}, folder / f"{rank}.pt")


def one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no more text")
    dist.barrier()


@needs_ray
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_workers_are_one_process(tmp_path, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed, one for each worker")
    network, batches = families.ours("gpt2").network, [language(), language()[:3], language()[:1]]
    launch_on_ray(train, 2, network, batches, tmp_path, device, device=device)
    train(network, batches, tmp_path, device)
    names = ("alone", 0, 1)
    alone, first, second = (torch.load(tmp_path / f"{name}.pt", map_location="cpu") for name in names)
    for name, tensor in alone.items():
        assert torch.equal(first[name], second[name]), name
        assert torch.allclose(first[name], tensor, rtol=2e-4, atol=2e-4), name
    assert (tmp_path / "trainer.pt").exists() and not ray_here.is_joined()


@needs_ray
def test_a_worker_that_fails_ends_all_and_too_many_are_told():
    with pytest.raises(TrainingError, match="Rank 1 failed, and all were ended: .*no more text"):
        launch_on_ray(one_fails, 2, device="cpu")
    with pytest.raises(SetupError, match=r"num_processes is 999, but each takes a CPU, and the cluster has \d+"):
        launch_on_ray(one_fails, 999, device="cpu")


@pytest.fixture
def played(monkeypatch) -> list[tuple]:
    """What Ray is asked for, in place of it: a machine of two CPUs, whose one worker is this process."""
    asked, failed = list[tuple](), type("TrainingFailedError", (Exception,), {})
    ray, train_of_ray, of_torch = (ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch"))

    class TorchTrainer:
        def __init__(self, work, **configs) -> None:
            self.work = work
            asked.append(tuple(configs.values()))

        def fit(self) -> None:
            try:
                self.work()
            except (ValueError, ConnectionError) as error:
                told = failed("Training failed")
                lost = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:5821")
                others = {1: error, 3: ValueError("another")} if isinstance(error, ValueError) else {}
                told.worker_failures = {0: lost, **others}
                raise told from error

    ray.init, ray.shutdown = lambda **how: asked.append(("init", how["address"])), lambda: asked.append(("shutdown",))
    ray.is_initialized, ray.cluster_resources = lambda: False, lambda: {"CPU": 2.0}
    train_of_ray.RunConfig, train_of_ray.ScalingConfig = (lambda storage_path: storage_path), (lambda **how: how)
    train_of_ray.TrainingFailedError, of_torch.TorchTrainer = failed, TorchTrainer
    for module in (ray, train_of_ray, of_torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(ray_here, "check_installed", lambda *_: None)
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name[:4] != "RAY_"})
    return asked


def lost() -> None:
    raise ConnectionError


def test_what_ray_is_asked_for(played, monkeypatch):
    """A cluster that was started is ended, whatever a worker does."""
    seen = []
    launch_on_ray(seen.append, 2, "given", device="cpu")
    begin, (scale, folder), end = played
    assert seen == ["given"] and begin == ("init", "local") and end == ("shutdown",)
    assert scale == {"num_workers": 2, "use_gpu": False} and not Path(folder).exists()
    with pytest.raises(TrainingError, match="Rank 1 failed, and all were ended: invalid literal for int"):
        launch_on_ray(int, 2, "no number", device="cpu")
    with pytest.raises(TrainingError, match=r"^A rank failed, and all were ended: .*Connection closed by peer"):
        launch_on_ray(lost, 2, device="cpu")
    with pytest.raises(SetupError, match="num_processes is 3, but each takes a CPU, and the cluster has 2"):
        launch_on_ray(int, 3, device="cpu")
    monkeypatch.delattr(sys.modules["ray.train"], "ScalingConfig")
    with pytest.raises(ImportError):
        launch_on_ray(int, 2, device="cpu")
    assert played.count(("init", "local")) == played.count(("shutdown",)) == 5


def test_ray_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # another test may have imported it
    with pytest.raises(SetupError, match=r"pyarrow is not installed, which workers of Ray Train need: .*\[ray\]"):
        launch_on_ray(train, 2)
    with pytest.raises(TrainingError, match="num_processes is 0"):
        launch_on_ray(train, 0)
