"""Processes for data parallel training, from a script or a notebook: of this machine, or of a Ray cluster."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from eet_lab import ray_here
from eet_lab.devices import checked_device, kind_of
from eet_lab.errors import SetupError, TrainingError
from eet_lab.scheduling.whole import check_whole
from eet_lab.words import told

MOST_PROCESSES = 1024


def launch(function: Callable[..., Any], num_processes: int, *args: Any) -> None:
    """Call `function(*args)` in processes of one machine that are a group, and wait; torchrun does so from a shell.

    Each has a GPU of its own if there are enough; otherwise all run on the CPU. Trainers that are made in them train
    one model. A function of a notebook's cell cannot be imported: its processes are forked, with a thread each, and
    only where there is no GPU. Where one raises, all are ended. Errors: TrainingError.
    """
    check_whole(TrainingError, "num_processes", num_processes, 1, MOST_PROCESSES)
    if not callable(function):
        raise TrainingError(f"function is {told(function)}, but it must be a function, which each process calls.")
    is_of_cell = function.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    if is_of_cell and torch.cuda.is_available():
        raise TrainingError(
            f"{function.__name__} is a function of a notebook's cell, and processes that are forked from a notebook "
            "cannot use its GPUs. Put the function into a file, and import it."
        )
    with TemporaryDirectory() as folder:
        given, method = (function, args, num_processes, folder, is_of_cell), "fork" if is_of_cell else "spawn"
        try:
            multiprocessing.start_processes(_rank, given, num_processes, start_method=method)
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            last = str(error).strip().splitlines()[-1]
            raise TrainingError(f"Rank {error.error_index} failed, and all were ended: {last}") from error
        except (pickle.PicklingError, AttributeError) as error:  # before any process was there
            name = getattr(function, "__qualname__", told(function))
            raise TrainingError(
                f"{name} cannot be sent to other processes ({error}). Give a function that stands by itself in a file, "
                "with arguments that can be pickled."
            ) from error


def launch_on_ray(function: Callable[..., Any], num_processes: int, *args: Any, device: str | None = None) -> None:
    """The same in workers of Ray Train, on as many machines as its cluster has (the extra `ray`).

    Each takes a GPU, or a CPU where `device` is "cpu" (default: what torch sees here). The cluster is the one that
    RAY_ADDRESS names or that this process is part of, and else one of this machine alone, which then ends. Every
    machine needs EET Lab, and a folder that `Trainer.save` writes to belongs to the first rank's. Errors: SetupError,
    TrainingError, with what a worker said that failed by itself, rather than by another that was gone.
    """
    check_whole(TrainingError, "num_processes", num_processes, 1, MOST_PROCESSES)
    ray_here.check_installed(("ray", "pyarrow", "tensorboardX"), "workers of Ray Train")
    kind, is_ours = kind_of(checked_device(device)), not ray_here.is_named()
    try:
        if is_ours:
            ray_here.start()
        else:
            ray_here.join()
        _fit(lambda: function(*args), num_processes, kind)
    finally:
        if is_ours:
            ray_here.stop()


def _fit(work: Callable[[], Any], num_processes: int, kind: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    try:
        what = {"cuda": "GPU", "cpu": "CPU"}[kind]
        if num_processes > (there := int(ray.cluster_resources().get(what, 0))):
            raise SetupError(
                f"num_processes is {num_processes:,}, but each takes a {what}, and the cluster has {there:,}. Ask for "
                "so many at most, or add machines to the cluster."
            )
        scale = ScalingConfig(num_workers=num_processes, use_gpu=kind == "cuda")
        with TemporaryDirectory() as folder:  # what Ray notes of the run, of which nothing is needed later
            TorchTrainer(work, scaling_config=scale, run_config=RunConfig(storage_path=folder)).fit()
    except TrainingFailedError as error:
        who, last = _first_to_fail(getattr(error, "worker_failures", {}), error)
        raise TrainingError(f"{who} failed, and all were ended: {last}") from error


LOST = re.compile(
    r"connection (closed|reset|refused|was lost)|broken pipe|timed out|network error|remote process|remote ?error"
    r"|actor ?died|actor .* died|died unexpectedly|heartbeat",
    re.IGNORECASE,
)
"""What ranks say, by gloo, NCCL or Ray, when another is gone."""
LOST_LINES = 4
"""Lines at the end that are looked at: NCCL tells a reason of its own last."""


def _first_to_fail(failures: Mapping[int, Exception], whole: Exception) -> tuple[str, str]:
    """Who failed, and the last line of what it said; others may have failed only since they lost that one."""
    told = {rank: (str(failure).strip() or repr(failure)).splitlines() for rank, failure in failures.items()}
    own = [rank for rank, lines in told.items() if not LOST.search("\n".join(lines[-LOST_LINES:]))]
    if own:
        return f"Rank {min(own)}", told[min(own)][-1]
    lines = next(iter(told.values()), (str(whole).strip() or repr(whole)).splitlines())
    return "A rank", lines[-1]


def _rank(
    rank: int, function: Callable[..., Any], args: tuple[Any, ...], num_processes: int, folder: str, is_forked: bool
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)}
    if torch.cuda.is_available() and num_processes <= torch.cuda.device_count():
        torch.cuda.set_device(rank)
    else:
        # OpenMP's threads are not there after a fork, and would be waited for.
        torch.set_num_threads(1 if is_forked else max(1, torch.get_num_threads() // num_processes))
    meet = (Path(folder) / "ranks").as_uri()
    dist.init_process_group(init_method=meet, rank=rank, world_size=num_processes)
    function(*args)
    dist.destroy_process_group()
