"""What became of traffic: when each request was begun, told its first token and its last, and what each pass read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from eet_lab.scheduling.traffic import Traffic

PERCENTS = (50, 95, 99)


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """{"p50": ..., "p95": ..., "p99": ...}, interpolated; empty of nothing."""
    if not len(values):
        return {}
    return {f"p{percent}": float(at) for percent, at in zip(PERCENTS, np.percentile(values, PERCENTS), strict=True)}


@dataclass(frozen=True, eq=False)
class Passes:
    """Passes in their order, for drawing. P passes, each array is [P].

    `begin_ms` and `end_ms` are when; `rows` the requests that a pass reads; `prompt_tokens`, `decoded` and `pads` what
    it computes: tokens of prompts or texts, tokens that answers go on from, and pads.
    """

    begin_ms: np.ndarray
    end_ms: np.ndarray
    rows: np.ndarray
    prompt_tokens: np.ndarray
    decoded: np.ndarray
    pads: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


class Latencies:
    """How long requests took from their arrival. N requests, in the order of their arrival.

    `first_ms` [N] is when the first token of each was told, and `last_ms` when its last one was, both NaN where no
    answer came; `num_told` [N] counts its tokens.
    """

    traffic: Traffic
    first_ms: np.ndarray
    last_ms: np.ndarray

    @property
    def num_told(self) -> np.ndarray:
        """The tokens of each answer [N]: as many as were asked for."""
        return self.traffic.new_tokens

    @property
    def ttft_ms(self) -> np.ndarray:
        """The time from the arrival to the first token [N]."""
        return self.first_ms - self.traffic.arrival_ms

    @property
    def e2e_ms(self) -> np.ndarray:
        """The time from the arrival to the last token [N]."""
        return self.last_ms - self.traffic.arrival_ms

    @cached_property
    def tpot_ms(self) -> np.ndarray:
        """A token after the first one, of each request [N]; NaN where there is only one."""
        after = self.num_told - 1
        return np.divide(self.last_ms - self.first_ms, after, out=np.full(len(after), np.nan), where=after > 0)

    @cached_property
    def percentiles(self) -> dict[str, dict[str, float]]:
        """ttft_ms, tpot_ms and e2e_ms of the requests that have one, each as {"p50": ..., "p95": ..., "p99": ...}."""
        times = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}
        return {name: percentiles(each[np.isfinite(each)]) for name, each in times.items()}

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last token."""
        return float(np.nanmax(self.last_ms) - self.traffic.arrival_ms[0]) / 1e3

    @property
    def requests_per_s(self) -> float:
        """Throughput: requests that were answered."""
        return float(np.isfinite(self.last_ms).sum()) / self.span_s

    def goodput(self, e2e_ms: float | None = None, ttft_ms: float | None = None, tpot_ms: float | None = None) -> float:
        """Requests a second that were served within all limits that are given. One of a single token has no TPOT."""
        good = np.isfinite(self.last_ms)
        for limit, took in ((e2e_ms, self.e2e_ms), (ttft_ms, self.ttft_ms), (tpot_ms, self.tpot_ms)):
            if limit is not None:
                good = good & ~(took > limit)
        return float(good.sum()) / self.span_s


@dataclass(frozen=True, eq=False)
class Served(Latencies):
    """Traffic that was served by a policy. N requests, in the order of their arrival.

    `start_ms` [N] is when the first pass began that read something of a request; of a text, its first and its last
    token are the end of its pass.
    """

    traffic: Traffic
    policy: str
    source: str
    start_ms: np.ndarray
    first_ms: np.ndarray
    last_ms: np.ndarray
    passes: Passes
    preempted: int = 0

    @property
    def wait_ms(self) -> np.ndarray:
        """The time in the queue [N]."""
        return self.start_ms - self.traffic.arrival_ms

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts that were read, and that answers went on from, without pads."""
        return float(self.passes.prompt_tokens.sum() + self.passes.decoded.sum()) / self.span_s

    @property
    def waste(self) -> float:
        """The share of pads in what was computed."""
        read = self.passes.prompt_tokens.sum() + self.passes.decoded.sum()
        pads = self.passes.pads.sum()
        return float(pads / (read + pads))

    @property
    def busy(self) -> float:
        """The share of the time in which a pass runs: near 1, more traffic can only wait."""
        return float((self.passes.end_ms - self.passes.begin_ms).sum()) / 1e3 / self.span_s

    def queued(self, at_ms: np.ndarray) -> np.ndarray:
        """How many requests wait to be begun at each of these times, which the curve of the queue's length shows."""
        came = np.searchsorted(self.traffic.arrival_ms, at_ms, side="right")
        return came - np.searchsorted(np.sort(self.start_ms), at_ms, side="right")
