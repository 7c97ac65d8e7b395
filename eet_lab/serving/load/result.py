"""What became of load: latencies of what was answered, and what was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from eet_lab.scheduling.served import Latencies, percentiles
from eet_lab.scheduling.traffic import Traffic
from eet_lab.serving.load.exchange import OUTCOMES, Exchange
from eet_lab.words import aligned, brief, counted, percent, visible

MOST_REASONS = 10
LATE_MS = 10.0
"""A generator whose requests leave later than this is a part of what it measures."""


@dataclass(frozen=True, eq=False, repr=False)
class Loaded(Latencies):
    """A server under load. N requests, in the order of their arrival; all times count from the first moment.

    `outcome` [N] is one of `OUTCOMES`, and `reason` [N] says why none was answered. `sent_ms` [N] is when the
    request was begun, after it was due where the generator could not keep up; `ended_ms` [N] when it was over,
    whatever became of it. `told` and `prompt_tokens` [N] count tokens, as the server did where it says so. `texts` are
    the answers where they were kept.
    """

    traffic: Traffic
    url: str
    first_ms: np.ndarray
    last_ms: np.ndarray
    sent_ms: np.ndarray
    ended_ms: np.ndarray
    told: np.ndarray
    prompt_tokens: np.ndarray
    outcome: tuple[str, ...]
    reason: tuple[str, ...]
    texts: tuple[str, ...] | None = None

    @classmethod
    def of(cls, traffic: Traffic, url: str, begin: float, exchanges: Sequence[Exchange], keep_text: bool) -> Self:
        """The result of exchanges on a clock of seconds that showed `begin` at first."""
        is_answered = [each.outcome == "answered" for each in exchanges]

        def ms(times: Sequence[float | None]) -> np.ndarray:
            return (np.array(times, float) - begin) * 1e3

        return cls(
            traffic,
            url,
            np.where(is_answered, ms([each.first_at for each in exchanges]), np.nan),
            np.where(is_answered, ms([each.last_at for each in exchanges]), np.nan),
            ms([each.sent_at for each in exchanges]),
            ms([each.ended_at for each in exchanges]),
            np.array([each.num_told for each in exchanges]),
            np.array([each.prompt_tokens for each in exchanges]),
            tuple(each.outcome for each in exchanges),
            tuple(each.reason for each in exchanges),
            tuple("".join(each.texts) for each in exchanges) if keep_text else None,
        )

    @property
    def num_told(self) -> np.ndarray:
        """The tokens of each answer [N], which may have ended before all that were asked for."""
        return self.told

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival until the last request was over, whatever became of it."""
        return float(self.ended_ms.max() - self.traffic.arrival_ms[0]) / 1e3

    @property
    def counts(self) -> dict[str, int]:
        """How many requests had each outcome."""
        return {name: self.outcome.count(name) for name in OUTCOMES}

    @property
    def reasons(self) -> dict[str, int]:
        """Why requests were not answered, the most frequent reason first."""
        return dict(Counter(reason for reason in self.reason if reason).most_common())

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers; none of an encoder."""
        return float(self.told[self._is("answered")].sum()) / self.span_s

    @property
    def prompt_tokens_per_s(self) -> float:
        """Tokens of prompts that were read, as the server counted them; 0 where it does not say."""
        return float(self.prompt_tokens[self._is("answered")].sum()) / self.span_s

    @property
    def refusal_ms(self) -> dict[str, float]:
        """Percentiles of the time from sending to a refusal, a new connection included; empty without any."""
        return percentiles((self.ended_ms - self.sent_ms)[self._is("refused")])

    @property
    def late_ms(self) -> dict[str, float]:
        """Percentiles of the time from which a request was due to which it was sent."""
        return percentiles(self.sent_ms - self.traffic.arrival_ms)

    def summary(self, e2e_ms: float | None = None, ttft_ms: float | None = None, tpot_ms: float | None = None) -> dict:
        """All numbers by name, for JSON; with limits, the requests a second that kept to them."""
        limits = {"e2e_ms": e2e_ms, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        found: dict[str, Any] = {"url": self.url, "traffic": self.traffic.name, "requests": len(self.traffic)}
        found |= {**self.counts, "reasons": self.reasons, "span_s": self.span_s}
        found |= {"requests_per_s": self.requests_per_s, "tokens_per_s": self.tokens_per_s}
        found |= {"prompt_tokens_per_s": self.prompt_tokens_per_s}
        found |= {"percentiles": self.percentiles, "refusal_ms": self.refusal_ms, "late_ms": self.late_ms}
        return found | ({"limits": given, "goodput_per_s": self.goodput(**given)} if given else {})

    def report(self, e2e_ms: float | None = None, ttft_ms: float | None = None, tpot_ms: float | None = None) -> str:
        """The same as text."""
        found = self.summary(e2e_ms, ttft_ms, tpot_ms)
        said = [f"{number:,} {name}" for name, number in self.counts.items() if number or name == "answered"]
        name = visible(self.traffic.name) or counted(len(self.traffic), "request")
        lines = [f"{name}, to {visible(self.url)}", ""]
        has_tokens = bool(self.told[self._is("answered")].any())  # vectors have none, and no first one
        waits = {"TTFT ms": "ttft_ms", "TPOT ms": "tpot_ms"} if has_tokens else {}
        waits["end to end ms"] = "e2e_ms"
        rows = {what: times for what, name in waits.items() if (times := self.percentiles[name])}
        rows |= {"refused after ms": self.refusal_ms} if self.refusal_ms else {}
        cells = [["", "p50", "p95", "p99"], *([what, *map(brief, times.values())] for what, times in rows.items())]
        lines += [*aligned(cells), ""] if rows else []
        lines += [f"{counted(len(self.traffic), 'request')} in {brief(self.span_s)} s: {', '.join(said)}."]
        told = f", {brief(self.tokens_per_s)} tokens/s generated" if has_tokens else ""
        read = f"{brief(self.prompt_tokens_per_s)} tokens/s of prompts read"
        lines += [f"Answered: {brief(self.requests_per_s)} requests/s; {read}{told}."]
        if limits := found.get("limits"):
            words = " and ".join(f"{name.removesuffix('_ms')} <= {brief(limit)} ms" for name, limit in limits.items())
            share = found["goodput_per_s"] * self.span_s / len(self.traffic)
            lines += [f"Goodput, with {words}: {brief(found['goodput_per_s'])} requests/s, {percent(share)} of all."]
        reasons = [*self.reasons.items()]
        lines += [f"{number:,} × {reason}" for reason, number in reasons[:MOST_REASONS]]
        if others := reasons[MOST_REASONS:]:  # messages may name what was wrong with each request
            lines += [f"{sum(number for _, number in others):,} more, for {counted(len(others), 'other reason')}"]
        if (late := self.late_ms["p99"]) > LATE_MS:
            lines += [f"Requests left up to {brief(late)} ms (p99) after they were due: the generator is too busy."]
        return "\n".join(lines)

    __repr__ = report

    def _is(self, outcome: str) -> np.ndarray:
        return np.array([each == outcome for each in self.outcome])
