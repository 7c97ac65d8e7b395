"""What an optimizer's state may hold that is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eet_lab.errors import TrainingError
from eet_lab.scheduling.whole import MOST
from eet_lab.words import told

DAMAGED = "it is damaged. Take an older checkpoint."


def is_dense(value: object) -> bool:
    """Whether it can be copied into weights or moments of the same shape."""
    if not isinstance(value, Tensor) or value.is_meta:
        return False
    return value.layout == torch.strided and value.is_floating_point()


def is_step(value: Any) -> bool:
    """Whether it can be a number of updates."""
    try:
        return 0 <= float(value) <= MOST
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last for tensors of more than a number
        return False


def check_values(kept: Iterable[tuple[str, str, Tensor]]) -> None:
    """TrainingError for moments with which no update makes sense, each with the names of what it is and of its weight.

    A pass that reads them once where they are, and one wait for each device.
    """
    on_device: dict[torch.device, list[tuple[str, str, Tensor]]] = {}
    for name, of, value in kept:
        on_device.setdefault(value.device, []).append((name, of, torch.stack(value.detach().aminmax()).double()))
    for found in on_device.values():
        ranges = torch.stack([ends for _, _, ends in found]).tolist()
        for (name, of, _), (low, high) in zip(found, ranges, strict=True):
            least = 0.0 if name.endswith("_sq") else -math.inf  # a mean of squares
            if bad := [end for end in (low, high) if not (math.isfinite(end) and end >= least)]:
                allowed = "finite" if least else "finite and at least 0"
                raise TrainingError(
                    f"The optimizer's {name} of {of} has the value {bad[0]}, but all must be {allowed}: {DAMAGED}"
                )


def read_state(state_dict: Any) -> tuple[Mapping[Any, Mapping[Any, Any]], list[int]]:
    """The states of tensors by their numbers, and how many each group has. Errors: TrainingError."""
    found = state_dict if isinstance(state_dict, Mapping) else {}
    states, groups = found.get("state"), found.get("param_groups")
    if not isinstance(states, Mapping) or not all(isinstance(each, Mapping) for each in states.values()):
        raise TrainingError(f"The optimizer's state has no state of each tensor, but {told(states)}: {DAMAGED}")
    listed: Sequence[Any] = groups if isinstance(groups, list | tuple) else [None]
    if not all(isinstance(each, Mapping) and isinstance(each.get("params"), list | tuple) for each in listed):
        raise TrainingError(f"The optimizer's state has no groups of tensors, but {told(groups)}: {DAMAGED}")
    return states, [len(each["params"]) for each in listed]
