"""What every peer has: a warm-up whose memory is counted, a timed run, and a count of what a step launches."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from eet_lab.bench.launches import StepLaunches

Rows = Sequence[Sequence[int]]


class Timing(NamedTuple):
    """One run: time to the first token of all rows, per token after it (None for a single token), and end to end.

    It begins with the prompts as lists of token ids, as ours does, and ends with the tokens on the host.
    """

    ttft_ms: float
    tpot_ms: float | None
    total_ms: float
    tokens: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, marks_ms: Sequence[float], tokens: torch.Tensor) -> Timing:
        """The timing from the times of the first token, perhaps others, the last token and the end; tokens [B,N]."""
        first_ms, last_ms, total_ms, steps = marks_ms[0], marks_ms[-2], marks_ms[-1], tokens.shape[1] - 1
        tpot_ms = (last_ms - first_ms) / steps if steps else None
        return cls(first_ms, tpot_ms, total_ms, tuple(map(tuple, tokens.tolist())))


class Peer(ABC):
    """Another way to run the same weights on the same prompts. `weight_bytes` are those that it reads from."""

    name: str

    def __init__(self, device: torch.device, weight_bytes: int) -> None:
        self.peak_bytes: int | None = None
        self._device, self.weight_bytes = device, weight_bytes

    def prepare(self) -> Timing:
        """Compile, capture and warm up in the shapes that will be timed; count the memory. The last run's timing."""
        if self._device.type != "cuda":
            return self._warm_up()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - self.weight_bytes
        timing = self._warm_up()
        self.peak_bytes = int(torch.cuda.max_memory_allocated() - others)
        return timing

    @abstractmethod
    def time(self) -> Timing:
        """One run."""

    @abstractmethod
    def launches(self) -> StepLaunches | None:
        """What one step launches; None where it cannot be counted."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds beside the weights."""

    @abstractmethod
    def _warm_up(self) -> Timing: ...


def left_padded(rows: Rows, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B,S] and attention mask [B,S]. Timed with every run, so laid out as quickly as our own prompts are."""
    lengths = np.array([len(row) for row in rows])
    longest = lengths.max()
    ids = np.zeros((len(rows), longest), np.int64)
    for to, row in zip(ids, rows, strict=True):
        to[longest - len(row) :] = row
    attended = np.arange(longest) >= longest - lengths[:, None]
    return torch.from_numpy(ids).to(device), torch.from_numpy(attended.astype(np.int64)).to(device)
