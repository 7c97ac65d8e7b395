"""What a run gives back, and how it is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from eet_lab.engine.stream import StepTokens


class StepEvent(NamedTuple):
    """One finished step, for whoever watches: `tokens` holds (row, token id) for each row that generated one."""

    index: int  # type: ignore[assignment]  # not tuple.index
    num_steps: int
    t_ms: float
    step_ms: float
    tokens: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Generation:
    """The tokens and the timing of one run. All times are ms since the request came, without `setup_ms`.

    So they hold whatever recurs: the prompts are checked, laid out and sent, the plan is looked up (after another shape
    of batch: placed again), the cache is emptied. `setup_ms` is what does not: kernels were built, or a shape of batch
    was rehearsed, and placed for the first time. It is 0 when a shape comes again. What a first run does on the way,
    such as to allocate the KV cache and to capture steps, is in its times.
    `first_ms[b]` is None for a row that got no token (a run stopped early); `step_ms` holds every step's duration, the
    first being all until the prefill's end. `finish[b]` is "length", "stop" or "cancelled".
    """

    tokens: tuple[tuple[int, ...], ...]
    finish: tuple[str, ...]
    first_ms: tuple[float | None, ...]
    last_ms: tuple[float | None, ...]
    step_ms: tuple[float, ...]
    total_ms: float
    setup_ms: float

    @property
    def cancelled(self) -> bool:
        return "cancelled" in self.finish

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token: when the last row has its first one."""
        times = [t for t in self.first_ms if t is not None]
        return max(times) if len(times) == len(self.first_ms) else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token: the median over rows of (last - first) / (n - 1); None when no row has two."""
        rows = [
            (last - first) / (len(tokens) - 1)
            for tokens, first, last in zip(self.tokens, self.first_ms, self.last_ms, strict=True)
            if len(tokens) > 1 and first is not None and last is not None
        ]
        return median(rows) if rows else None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_ms * 1e3 if self.total_ms else 0.0


class Transcript:
    """Gathers a run's tokens from its steps, and trims what the device generated beyond a row's end."""

    def __init__(self, ends: list[int], first_column: int, limit: int, num_steps: int, stop: Sequence[int]) -> None:
        """Row b generates from column ends[b], at most `limit` tokens or up to one of `stop`.

        The first step writes `first_column`.
        """
        self._ends, self._column, self._limit, self._num_steps = ends, first_column, limit, num_steps
        self._stop = frozenset(stop)
        rows = len(ends)
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._finish: list[str | None] = [None] * rows
        self._first: list[float | None] = [None] * rows
        self._last: list[float | None] = [None] * rows
        self._step_ms: list[float] = []
        self._t_ms = 0.0

    @property
    def finished(self) -> bool:
        return None not in self._finish

    def read(self, step: StepTokens) -> StepEvent:
        """Take in the next step."""
        new = []
        for row, token in enumerate(step.ids):
            if self._finish[row] is not None or self._column < self._ends[row]:
                continue
            self._tokens[row].append(token)
            self._first[row] = step.t_ms if self._first[row] is None else self._first[row]
            self._last[row] = step.t_ms
            if token in self._stop or len(self._tokens[row]) == self._limit:
                self._finish[row] = "stop" if token in self._stop else "length"
            new.append((row, token))
        self._column += 1
        self._step_ms.append(step.t_ms - self._t_ms)
        self._t_ms = step.t_ms
        return StepEvent(len(self._step_ms) - 1, self._num_steps, step.t_ms, self._step_ms[-1], tuple(new))

    def result(self, setup_ms: float) -> Generation:
        """What has been read so far; a row that is not finished was cancelled."""
        return Generation(
            tokens=tuple(map(tuple, self._tokens)),
            finish=tuple(reason or "cancelled" for reason in self._finish),
            first_ms=tuple(self._first),
            last_ms=tuple(self._last),
            step_ms=tuple(self._step_ms),
            total_ms=max((t for t in self._last if t is not None), default=self._t_ms),
            setup_ms=setup_ms,
        )
