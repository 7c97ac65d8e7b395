"""Traffic: when requests come, how long they are, and how many tokens they ask for. N requests."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eet_lab.errors import TrafficError
from eet_lab.files import regular_content
from eet_lab.scheduling.whole import MOST, check_whole, is_real
from eet_lab.words import brief, counted, plain, told, visible

FIRST_TOKEN = 5
"""The first ordinary token id: lower ones are special in RoBERTa, and transformers counts positions from its pads."""
MOST_REQUESTS = 10_000_000
MOST_BYTES = 2**29
"""The largest file of lengths, or trace."""
REMEDY = "Cut it to fewer requests."
AT_ONCE = 1e6
"""A rate of requests that come all at once."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """Requests that come whatever has become of those before (open loop), in the order of their arrival.

    `arrival_ms` [N] are the times from the beginning, `lengths` [N] the tokens of each prompt or text, and
    `new_tokens` [N] those that are told; an encoder tells none, and does not look at them. Lists become arrays.
    Errors: TrafficError.
    """

    arrival_ms: np.ndarray
    lengths: np.ndarray
    new_tokens: np.ndarray
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("arrival_ms", "lengths", "new_tokens"):
            object.__setattr__(self, name, _as_numbers(name, getattr(self, name)))
        shapes = [np.shape(each) for each in (self.arrival_ms, self.lengths, self.new_tokens)]
        if len({*shapes}) != 1 or len(shapes[0]) != 1 or not shapes[0][0]:
            raise TrafficError(
                f"arrival_ms, lengths and new_tokens have the shapes {', '.join(map(str, shapes))}, but they must be "
                "of one length, with at least one request."
            )
        gaps = np.diff(self.arrival_ms, prepend=0.0)
        if (at := _first(~(np.isfinite(gaps) & (gaps >= 0)))) is not None:
            raise TrafficError(
                f"arrival_ms[{at}] is {told(self.arrival_ms[at].item())}, but arrivals must be finite milliseconds "
                "from 0 on, and in order. Sort requests by them."
            )
        for name in ("lengths", "new_tokens"):
            values = getattr(self, name)
            if (at := _first(~((values >= 1) & (values <= MOST) & (values == np.floor(values))))) is not None:
                raise TrafficError(
                    f"{name}[{at}] is {told(values[at].item())}, but it must be a whole number from 1 to {MOST:,}. "
                    "Leave out requests of no tokens."
                )
            object.__setattr__(self, name, values.astype(np.int64, copy=False))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def rate(self) -> float:
        """Requests a second, on average; infinite where all come together."""
        span_s = float(self.arrival_ms[-1] - self.arrival_ms[0]) / 1e3
        return (len(self) - 1) / span_s if span_s else math.inf


@dataclass(frozen=True)
class Gamma:
    """Gaps that are gamma-distributed: `rate` requests a second, whose gaps vary by `cv` times their mean.

    1 is a Poisson process, which has no memory; more comes in bursts, less more evenly, and 0 like clockwork.
    """

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _check_real("rate", self.rate, 1e-6, 1e9, " requests a second")
        _check_real("cv", self.cv, 0.0, 100.0, ", the gaps' standard deviation over their mean")

    def times(self, draw: np.random.Generator, num: int) -> np.ndarray:
        """Milliseconds at which each of so many comes, in order."""
        gaps = np.ones(num)
        if self.cv:
            gaps = draw.gamma(1 / self.cv**2, self.cv**2, num)
        return np.cumsum(gaps) * (1e3 / self.rate)

    def __str__(self) -> str:
        return f"{'Poisson' if self.cv == 1 else f'gamma (cv {brief(self.cv)})'}, {brief(self.rate)} a second"


@dataclass(frozen=True)
class Uniform:
    """Every length from `low` to `high` is as likely as another."""

    low: int
    high: int

    def __post_init__(self) -> None:
        check_whole(TrafficError, "the shortest length", self.low, 1, MOST)
        check_whole(TrafficError, "the longest length", self.high, self.low, MOST)

    def draw(self, draw: np.random.Generator, num: int) -> np.ndarray:
        return draw.integers(self.low, self.high, num, endpoint=True)

    def __str__(self) -> str:
        least = "" if self.low == self.high else f"{self.low:,} to "
        return f"{least}{counted(self.high, 'token')}{' (uniform)' if least else ''}"


@dataclass(frozen=True)
class LogNormal:
    """Many short ones and a few long ones: half are below `median`, and their logarithms deviate by `sigma`.

    What would be longer than `most` is cut to it.
    """

    median: float
    sigma: float
    most: int = MOST

    def __post_init__(self) -> None:
        _check_real("the median length", self.median, 1.0, MOST)
        _check_real("sigma", self.sigma, 0.0, 10.0)
        check_whole(TrafficError, "the longest length", self.most, 1, MOST)

    def draw(self, draw: np.random.Generator, num: int) -> np.ndarray:
        found = self.median * np.exp(self.sigma * draw.standard_normal(num))
        return np.clip(np.rint(found), 1, self.most).astype(np.int64)

    def __str__(self) -> str:
        return f"log-normal (median {brief(self.median)}, sigma {brief(self.sigma)})"


@dataclass(frozen=True)
class Drawn:
    """Lengths that were seen, from which each is drawn anew; `name` says where."""

    seen: tuple[int, ...]
    name: str = "drawn"

    def __post_init__(self) -> None:
        if not self.seen:
            raise TrafficError("There are no lengths to draw from. Give at least one.")
        for length in self.seen:
            check_whole(TrafficError, "a length", length, 1, MOST)

    def draw(self, draw: np.random.Generator, num: int) -> np.ndarray:
        return draw.choice(np.array(self.seen), num)

    def __str__(self) -> str:
        return self.name


Lengths = Uniform | LogNormal | Drawn
"""How long requests are: each draws so many whole numbers, 1 or more."""


def make_traffic(
    requests: int, arrivals: Gamma, lengths: Lengths, new_tokens: Lengths = Uniform(1, 1), seed: int = 0
) -> Traffic:
    """So many requests; the same for the same seed. Arrivals, lengths and answers are drawn from streams of their own.

    So another rate moves the same requests closer together. Errors: TrafficError.
    """
    check_whole(TrafficError, "requests", requests, 1, MOST_REQUESTS)
    check_whole(TrafficError, "seed", seed, 0, 2**63)
    when, read, answer = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    name = f"{counted(requests, 'request')}, {arrivals}, lengths {lengths}, answers {new_tokens}, seed {seed}"
    return Traffic(
        arrivals.times(when, requests), lengths.draw(read, requests), new_tokens.draw(answer, requests), name
    )


def read_lengths(words: str, most: int = MOST) -> Lengths:
    """Lengths from "128", "5-500", "lognormal:40:0.8" (median, sigma), or a file of whole numbers, one a line.

    Log-normal ones are cut to `most`. TrafficError for what is none of these.
    """
    kind, *numbers = words.split(":")
    if kind == "lognormal":
        try:
            median, sigma = map(float, numbers)
        except ValueError:
            raise TrafficError(
                f"{told(words)} is no distribution of lengths: write lognormal:MEDIAN:SIGMA, such as lognormal:40:0.8."
            ) from None
        return LogNormal(median, sigma, most)
    low, dash, high = words.partition("-")
    if low.isdecimal() and (high.isdecimal() or not dash):
        return Uniform(*(int(number[:20]) for number in (low, high or low)))
    if not os.path.exists(words):  # of Path it would be an error for a NUL byte
        raise TrafficError(
            f"{told(words)} is neither a length such as 128, nor a range such as 5-500, nor lognormal:MEDIAN:SIGMA, "
            "nor a file."
        )
    return Drawn(tuple(_lengths_of(Path(words))), visible(Path(words).name))


def _lengths_of(path: Path) -> Sequence[int]:
    lines = regular_content(path, "a file of lengths", MOST_BYTES, TrafficError, remedy=REMEDY).split()
    found = [int(line) if line.isdigit() and len(line) < 12 else 0 for line in lines]
    for number, length in enumerate(found, 1):
        if not 1 <= length <= MOST:
            shown = told(lines[number - 1].decode(errors="replace"))
            raise TrafficError(
                f"{visible(str(path))} has {shown} as number {number}, but each must be a whole number from 1 to "
                f"{MOST:,}."
            )
    return found


def _as_numbers(name: str, values: object) -> np.ndarray:
    try:
        found = np.asarray(values)
    except ValueError:  # lists within it have several lengths
        found = np.array(None)
    if found.dtype.kind not in "iuf":
        raise TrafficError(f"{name} is {told(values)}, but it must be an array of numbers, one for each request.")
    return found


def _first(are_wrong: np.ndarray) -> int | None:
    return int(are_wrong.argmax()) if are_wrong.any() else None


def _check_real(name: str, value: object, low: float, high: float, what: str = "") -> None:
    if not is_real(value) or not low <= value <= high:
        raise TrafficError(f"{name} is {told(value)}, but it must be from {plain(low)} to {plain(high, 10)}{what}.")
