"""Devices by name: "cpu", "cuda" (the GPU that torch takes at present) or "cuda:1"; and which GPU torch takes.

A device's kind, "cpu" or "cuda", is what techniques, results and tables ask for. Which GPU it is counts where work is
launched: there the GPU is made torch's present one, so that "cuda" means it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from eet_lab.errors import ModelError
from eet_lab.words import counted

KINDS = ("cpu", "cuda", "meta")
"""What techniques are told to run on; "meta" is shapes without data."""
NAMES = "'cuda', 'cuda:1' (a GPU by its number) or 'cpu'"

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def default_device() -> str:
    """ "cuda" where torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def checked_device(device: str | torch.device | None) -> str:
    """A device's name as it is written everywhere: "cuda:0" of an only GPU is "cuda". ModelError where it is not there.

    None is `default_device`.
    """
    if device is None or device == "":
        return default_device()
    found = re.fullmatch(r"(cpu|cuda)(?::([0-9]{1,4}))?", str(device))
    if found is None or not isinstance(device, (str, torch.device)):
        raise ModelError(f"device is {device!r:.60}, but it must be {NAMES}.")
    kind, number = found[1], found[2]
    if kind == "cpu":
        if int(number or 0):
            raise ModelError(f"device is {str(device)!r}, but all cores are one device; write 'cpu'.")
        return kind
    if not torch.cuda.is_available():
        raise ModelError(
            f"device is {str(device)!r}, but torch sees no NVIDIA GPU here; use device='cpu', and see `eet-lab doctor`."
        )
    count = torch.cuda.device_count()
    if number is not None and int(number) >= count:
        gpus = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise ModelError(
            f"device is {str(device)!r}, but torch sees {counted(count, 'GPU')} here: {gpus}. Choose one of them."
        )
    return kind if number is None or count == 1 else f"cuda:{int(number)}"


def choices() -> list[str]:
    """What can be chosen here: each GPU, then the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [*(["cuda"] if count == 1 else [f"cuda:{i}" for i in range(count)]), "cpu"]


def chosen(device: str | torch.device | None) -> str:
    """One of `choices`: "cuda" among several GPUs is torch's present one. Errors: those of `checked_device`."""
    name = checked_device(device)
    return f"cuda:{torch.cuda.current_device()}" if name == "cuda" and name not in choices() else name


def kind_of(device: str) -> str:
    """ "cpu" or "cuda"."""
    return device.partition(":")[0]


def present(device: str | torch.device) -> AbstractContextManager[object]:
    """A block in which torch takes this GPU: its streams, events, counters, and what "cuda" means.

    No effect of a CPU, or of "cuda" without a number.
    """
    there = torch.device(device)
    return torch.cuda.device(there) if there.type == "cuda" and there.index is not None else nullcontext()


def once_per_device(work: Callable[Concatenate[str, Given], Answer]) -> Callable[Concatenate[str, Given], Answer]:
    """A decorator for functions of a device's kind that are slow: they are asked once, for each GPU, of each thing."""
    known: dict[tuple[Any, ...], Answer] = {}

    @wraps(work)
    def remembered(device: str, *of: Given.args, **named: Given.kwargs) -> Answer:
        key = device, torch.cuda.current_device() if device == "cuda" else 0, of, *sorted(named.items())
        if key not in known:
            known[key] = work(device, *of, **named)
        return known[key]

    return remembered
