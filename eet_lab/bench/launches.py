"""How much a decode step launches: counted by torch's profiler on a GPU, and by PyTorch's dispatcher on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings

CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
"""What the host hands to the GPU; names with a suffix such as cudaLaunchKernelExC count as well."""

STEPS = 8


class StepLaunches(NamedTuple):
    """What a step hands to the device (a graph is one launch), and what the device does for it, kernel by kernel.

    Copies and fills count as both; so do those that bring each token to the host.
    """

    launches: float
    kernels: float

    def per_step(self) -> StepLaunches | None:
        """The counts of one of the `STEPS` steps; None where launches or kernels cannot be seen."""
        return StepLaunches(self.launches / STEPS, self.kernels / STEPS) if all(self) else None


class Counter(Protocol):
    """Counts what is launched and run between `start` and `stop`."""

    def start(self) -> None:
        """Wait for what was launched before, then count."""

    def stop(self) -> StepLaunches:
        """What came since `start`, all of it: not yet divided by a number of steps."""
        ...


@contextmanager
def counting(device: str) -> Iterator[Counter]:
    """A counter that suits "cpu" or "cuda"; it ends with the block, whatever happened there."""
    counter = Calls() if device == "cpu" else Profile()
    try:
        yield counter
    finally:
        counter.end()


def is_work(function: Any) -> bool:
    """Whether a call of PyTorch is work for the device, and neither a view nor new memory."""
    return not (function.is_view or function.__name__.startswith(("empty", "new_empty", "detach")))


class Calls(TorchDispatchMode):
    """The counter for a CPU, where every call of PyTorch is launch and kernel in one."""

    def __init__(self) -> None:
        super().__init__()
        self._num, self._runs = 0, False

    def start(self) -> None:
        self._num, self._runs = 0, True
        self.__enter__()

    def stop(self) -> StepLaunches:
        self.end()
        return StepLaunches(self._num, self._num)

    def end(self) -> None:
        if self._runs:
            self.__exit__(None, None, None)
        self._runs = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._num += is_work(function)
        return function(*args, **(kwargs or {}))


class Profile:
    """The counter for a GPU, as far as torch's profiler may look."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profile, self._runs = torch.profiler.profile(activities=activities), False

    def start(self) -> None:
        torch.cuda.synchronize()
        self._runs = True
        self._profile.start()

    def stop(self) -> StepLaunches:
        torch.cuda.synchronize()
        self.end()
        events = self._profile.events() or []
        on_device = [e for e in events if e.device_type == torch.profiler.DeviceType.CUDA and not e.is_user_annotation]
        launches = sum(e.name.startswith(CALLS) for e in events if e.device_type == torch.profiler.DeviceType.CPU)
        return StepLaunches(launches, len(on_device))

    def end(self) -> None:
        if self._runs:
            self._profile.stop()
        self._runs = False


def launches_per_token(engine: Engine, num_rows: int) -> StepLaunches | None:
    """What one decode step launches: the difference of a run with 1 and one with 9 new tokens, over 8.

    Prompts have 1, 2, ... tokens, since some ops launch once for each length. None on the CPU, and where the profiler
    cannot see the GPU. The engine's slots are others afterwards.
    """
    if engine.model.device.type != "cuda":
        return None
    longest = engine.model.config.context - 1 - STEPS
    rows = [[1] * min(row + 1, longest) for row in range(num_rows)]
    few, many = (_counted(engine, rows, Settings(max_new_tokens=n)) for n in (1, 1 + STEPS))
    if not (all(few) and all(many)):
        return None
    return StepLaunches(*((more - less) / STEPS for less, more in zip(few, many, strict=True)))


def _counted(engine: Engine, rows: list[list[int]], settings: Settings) -> StepLaunches:
    engine.generate(rows, settings)  # allocate and capture
    with counting("cuda") as counter:
        counter.start()
        engine.generate(rows, settings)
        return counter.stop()
