"""What a run gives back, and how it is gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from eet_lab.engine.stream import PassTokens
from eet_lab.scheduling import Request, TokenLogprobs


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

    They include what every run does: checking and sending the prompts, finding the memory plan, emptying the cache.
    `setup_ms` is what only a first run does: building kernels, tracing and placing a new shape of batch. It is 0 when a
    shape comes again. Allocating the KV cache and capturing steps are in the times of the run that does so.
    `first_ms[b]` is None for a row that got no token (a run stopped early); `step_ms` holds every step's duration, the
    first being all until the prefill's end, and `step_tokens` how many tokens each gave. `finish[b]` is "length",
    "stop" or "cancelled". `logprobs[b]` has those of each token of a row whose settings asked for them, and is ()
    elsewhere.
    """

    tokens: tuple[tuple[int, ...], ...]
    finish: tuple[str, ...]
    first_ms: tuple[float | None, ...]
    last_ms: tuple[float | None, ...]
    step_ms: tuple[float, ...]
    step_tokens: tuple[int, ...]
    total_ms: float
    setup_ms: float
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()

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


class Record:
    """What came when, request by request, of those that begin together."""

    def __init__(self, requests: Sequence[Request], num_steps: int, on_step: Callable[[StepEvent], None]) -> None:
        self._requests, self._num_steps, self._on_step = requests, num_steps, on_step
        self._rows = {request: row for row, request in enumerate(requests)}
        self._times: list[list[float]] = [[] for _ in requests]
        self._step_ms: list[float] = []
        self._step_tokens: list[int] = []
        self._t_ms = 0.0

    @property
    def finished(self) -> bool:
        """Whether all that will ever come is here."""
        return all(request.done for request in self._requests)

    def read(self, passes: Sequence[PassTokens]) -> None:
        """Take in what passes have told; those that were launched beyond the last request's end tell nothing."""
        for t_ms, tokens in passes:
            if not tokens and self.finished:
                continue
            new = tuple((self._rows[request], token) for request, token in tokens)
            for row, _ in new:
                self._times[row].append(t_ms)
            self._step_ms.append(t_ms - self._t_ms)
            self._step_tokens.append(len(new))
            self._t_ms = t_ms
            num_steps = max(self._num_steps, len(self._step_ms))
            self._on_step(StepEvent(len(self._step_ms) - 1, num_steps, t_ms, self._step_ms[-1], new))

    def result(self, setup_ms: float) -> Generation:
        """All of it; a request that is not done was cancelled."""
        last_ms = tuple(times[-1] if times else None for times in self._times)
        return Generation(
            tokens=tuple(tuple(request.generated) for request in self._requests),
            finish=tuple(request.finish_reason or "cancelled" for request in self._requests),
            first_ms=tuple(times[0] if times else None for times in self._times),
            last_ms=last_ms,
            step_ms=tuple(self._step_ms),
            step_tokens=tuple(self._step_tokens),
            total_ms=max((t for t in last_ms if t is not None), default=self._t_ms),
            setup_ms=setup_ms,
            logprobs=tuple(tuple(request.logprobs) for request in self._requests),
        )
