"""Passes of an encoder that are on the device, and what they made on its way to the host.

N texts of a list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from eet_lab.engine.tasks import TextTask
from eet_lab.parts.passes import Group
from eet_lab.progress import Progress


@dataclass(frozen=True)
class Run:
    """What a task made of texts, in their order, and how long it took.

    `values` are a tensor [N,...] where the task makes one row of each text, else a tensor each. `num_tokens` are those
    of the texts, `computed_tokens` the same with pads. `activation_bytes` is the arena, or the most that were alive at
    once. `total_ms` is all but the reading of texts into tokens: checks, layout, passes, and the way back. For a list
    launched while another was still computing, the time starts when that other one was done.
    """

    values: Tensor | tuple[Tensor, ...]
    num_tokens: int
    computed_tokens: int
    num_passes: int
    activation_bytes: int
    total_ms: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_ms * 1e3 if self.total_ms else 0.0


class Arriving(NamedTuple):
    """What a pass made, on the host once the event is done; None: it is there."""

    values: Tensor
    sizes: tuple[int, ...]  # of each text, where the task makes a row for each of its tokens
    event: torch.cuda.Event | None

    @property
    def is_there(self) -> bool:
        """Whether nobody would have to wait for it."""
        return self.event is None or self.event.query()

    def received(self) -> Tensor:
        """What it made, once it is there."""
        if self.event is not None:
            self.event.synchronize()
        return self.values


class Results:
    """What passes made, in the order of the texts."""

    def __init__(self, num_texts: int, task: TextTask) -> None:
        self._num_texts, self._task = num_texts, task
        self._rows: Tensor | None = None
        self._each: dict[int, Tensor] = {}

    @torch.inference_mode(False)  # a reader may train something on them
    def put(self, numbers: Sequence[int], values: Tensor, sizes: Sequence[int]) -> None:
        """Take the values of a pass over the texts of these numbers. The pass may overwrite them afterwards."""
        if not self._task.one_each:
            self._each.update(zip(numbers, values.clone().split(sizes), strict=True))
            return
        if self._rows is None:
            self._rows = torch.empty(self._num_texts, *values.shape[1:])
        self._rows.numpy()[list(numbers)] = values.numpy()

    def ordered(self) -> Tensor | tuple[Tensor, ...]:
        """The values of all texts."""
        return tuple(self._each[number] for number in range(len(self._each))) if self._rows is None else self._rows


class _Reading:
    """Texts that are read, and what has come of them."""

    def __init__(self, num_texts: int, task: TextTask, begin: float) -> None:
        self.num_texts, self.begin, self.results = num_texts, begin, Results(num_texts, task)
        self.done = self.tokens = self.computed = self.passes = self.activations = 0


class InFlight:
    """The passes of several lists of texts, in the order of their launches."""

    def __init__(self, task: TextTask, on_read: Callable[[Run], object], progress: Progress | None) -> None:
        self._task, self._on_read, self._progress = task, on_read, progress
        self._lists = deque[_Reading]()
        self._passes = deque[tuple[_Reading, Group, Arriving]]()
        self._last_end = 0.0

    def begin(self, num_texts: int, begin: float) -> None:
        """The passes that are added from now on are those of a list of so many texts, begun at this time."""
        self._lists.append(_Reading(num_texts, self._task, begin))
        self._tell()

    def add(self, group: Group, arriving: Arriving, planned_bytes: int) -> None:
        """A pass that has been launched, in an arena of so many bytes."""
        reading = self._lists[-1]
        reading.activations = max(reading.activations, planned_bytes)
        self._passes.append((reading, group, arriving))

    def receive(self, most: int) -> None:
        """Take what is there, and wait until at most so many are in flight."""
        while self._passes and (len(self._passes) > most or self._passes[0][-1].is_there):
            reading, group, arriving = self._passes.popleft()
            reading.results.put(group.numbers, arriving.received(), arriving.sizes)
            reading.done += len(group.numbers)
            reading.passes += 1
            reading.tokens += group.num_tokens
            reading.computed += group.computed_tokens
            if self._progress is not None:
                self._progress(reading.done, reading.num_texts, "texts")
            self._tell()

    def receive_one(self) -> None:
        """Wait for the oldest."""
        self.receive(most=max(len(self._passes) - 1, 0))

    def rescue(self) -> None:
        """Take what still comes after an error."""
        with suppress(Exception):
            self.receive(most=0)
        self._passes.clear()

    def drop(self) -> None:
        """Wait for all passes, and tell nobody."""
        while self._passes:
            self._passes.popleft()[-1].received()

    def _tell(self) -> None:
        """Tell of each list that is there, the oldest first."""
        while self._lists and self._lists[0].done == self._lists[0].num_texts:
            done = self._lists.popleft()
            end = perf_counter()
            took_s, self._last_end = end - max(done.begin, self._last_end), end
            values = done.results.ordered()
            run = Run(values, done.tokens, done.computed, done.passes, done.activations, took_s * 1e3)
            with torch.inference_mode(False):
                self._on_read(run)
