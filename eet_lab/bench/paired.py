"""paired: the change between two recipes that were timed in turn, and whether it can be told from noise.

Each round gives a pair of runs and the ratio of their times. The sign test turns the sorted ratios into an interval for
their median: of n pairs the k-th from either end, with k as large as `LEVEL` allows. It assumes nothing about how noise
is distributed. A drift affects both runs of a pair alike, and one slow run moves one ratio. Milliseconds and ratio
cannot disagree on a sign: a difference is above zero where the ratio is above one.

The interval says whether there is a change. Its size is the ratio of the two medians, so that it agrees with the
numbers of a table; if a drift has moved the medians, it is the median of the pairs' ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Literal

from eet_lab.words import LEAST_MIB, KiB, MiB, amounts, brief, counted, plain

Verdict = Literal["better", "worse", "cannot tell apart"]
Kind = Literal["good", "bad", "dim"]
KINDS: dict[Verdict, Kind] = {"better": "good", "worse": "bad", "cannot tell apart": "dim"}

LEAST_PAIRS = 6
"""Fewer cannot tell anything: all of five agree by chance once in 16 times, all of six once in 32."""

SURE_PAIRS = 8
"""Fewer pairs do not reach `LEVEL`: they tell an effect only if it is as far from none as the pairs are apart."""

LEVEL = 0.01
"""Chance that an interval misses the median, from eight pairs on. Of six it is the whole range, 3.1 %; of seven 1.6 %.

Stricter than 5 %, since a table has several intervals, and a ladder a dozen."""

LEAST_EFFECT = 0.03
"""What an interval is widened by: effects below are not a technique's.

Two engines of the same recipe differ by where their tensors lie in memory: by up to 2 % on a CPU, and by 1.7 % on an
H200, again and again in one process and the other way round in the next (LOG, 2026-11-23)."""

DETAILS = {"ttft_ms": "first token", "tpot_ms": "per token"}
"""Times that are told beside that of a whole run, which is judged at `LEVEL`; these share one more chance of that."""

WORDS = {"ttft_ms": ("sooner", "later"), "tokens_per_s": ("more", "less")}
"""The words for better and for worse; all other times are "faster" and "slower"."""


CUT_PAIRS = 12
"""So many pairs, or more, make an interval that leaves off the outermost; of fewer, one slow run widens it."""


@cache
def left_off(num_pairs: int, level: float = LEVEL) -> int:
    """How many values the interval for a median leaves off at either end: the sign test's, and never all."""
    tail, count = 0.0, 0
    while (tail := tail + math.comb(num_pairs, count) / 2**num_pairs) * 2 <= level:
        count += 1
    return max(count - 1, 0)


def median_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The range that misses the median of what `values` were drawn from with a chance of at most `level`.

    Of fewer than eight values, at the default level, it is their whole range, which misses it more often.
    """
    ordered, off = sorted(values), left_off(len(values), level)
    return ordered[off], ordered[len(ordered) - 1 - off]


NEAR = 0.1
"""How far the ratio of the medians may be from that of the pairs and still stand for it, as a share of the effect."""


@dataclass(frozen=True)
class Change:
    """One number of two recipes: the medians `before` and `after`, and the interval of the paired ratio after/before.

    `middle` is the median of the paired ratios; None where it is not known: then the ratio of the medians stands for
    it, and without pairs for `low` and `high` as well.
    ValueError for what no run gives, as a damaged file may hold.
    """

    before: float
    after: float
    low: float
    high: float
    num_pairs: int
    more_is_better: bool = False
    middle: float | None = None

    def __post_init__(self) -> None:
        numbers = (self.before, self.after, self.low, self.high)
        if not all(math.isfinite(number) and number > 0 for number in numbers) or self.num_pairs < 0:
            raise ValueError(f"a change is made of finite numbers above zero, not of {numbers}")
        ratio = self.after / self.before if self.middle is None else self.middle
        if not self.low <= ratio <= self.high:
            raise ValueError(f"a change of {ratio} lies outside of its interval, {self.low} to {self.high}")
        if (self.low > 1 and self.after <= self.before) or (self.high < 1 and self.after >= self.before):
            raise ValueError(f"an interval from {self.low} to {self.high} contradicts {self.before} to {self.after}")

    @classmethod
    def of(
        cls,
        befores: Sequence[float | None],
        afters: Sequence[float | None],
        more_is_better: bool = False,
        level: float = LEVEL,
    ) -> Change | None:
        """The change from what the runs of each round took, in the same order; None where one of them is missing."""
        known = [(a, b) for a, b in zip(befores, afters, strict=True) if a and b]
        if not known or len(known) < len(befores):
            return None
        before, after = (median(series) for series in zip(*known, strict=True))
        logs = [math.log(b / a) for a, b in known]
        low, high = (math.exp(log) for log in median_interval(logs, level))
        low, high = low / (1 + LEAST_EFFECT), high * (1 + LEAST_EFFECT)
        if (low > 1 and after <= before) or (high < 1 and after >= before):  # the machine changed its pace for long
            low, high = min(low, after / before), max(high, after / before)
        return cls(before, after, low, high, len(known), more_is_better, math.exp(median(logs)))

    @classmethod
    def unpaired(cls, before: float | None, after: float | None, more_is_better: bool = False) -> Change | None:
        """A change of two medians, without pairs and so without an interval."""
        if not before or not after:
            return None
        return cls(before, after, after / before, after / before, 0, more_is_better)

    @property
    def ratio(self) -> float:
        """After/before, of the medians; that of the pairs where a drift has moved the medians away from it."""
        return self.middle if self.middle is not None and self.is_of_pairs else self.after / self.before

    @property
    def is_of_pairs(self) -> bool:
        """Whether `ratio` is the median of the pairs.

        It is if the ratio of the medians is off by more than `NEAR` of the effect, or lies outside of the interval.
        """
        if self.middle is None:
            return False
        effect = math.log(self.middle)
        off = math.log(self.after) - math.log(self.before) - effect  # one by one: a file may hold the smallest number
        return abs(off) > NEAR * abs(effect) or not self.low <= self.after / self.before <= self.high

    @property
    def is_enough(self) -> bool:
        """Whether there are pairs enough to tell anything at all."""
        return self.num_pairs >= LEAST_PAIRS

    @property
    def verdict(self) -> Verdict:
        """The verdict of the interval; without pairs, whether the medians differ by more than noise usually does."""
        low, high = self.low, self.high
        if not self.num_pairs:
            low, high = low / (1 + LEAST_EFFECT), high * (1 + LEAST_EFFECT)
        elif not self.is_enough or self.is_doubtful:
            return "cannot tell apart"
        if low <= 1 <= high:
            return "cannot tell apart"
        return "better" if (low > 1) == self.more_is_better else "worse"

    @property
    def is_doubtful(self) -> bool:
        """Whether too few pairs tell an effect, narrowly.

        There are fewer than `SURE_PAIRS`, and the interval excludes 1, but its distance from 1 is less than its width.
        """
        return LEAST_PAIRS <= self.num_pairs < SURE_PAIRS and 0 < self._gap < self.width

    @property
    def needs_pairs(self) -> bool:
        """Whether more pairs could tell it: all of these bound the interval, and the medians differ by an effect."""
        few = LEAST_PAIRS <= self.num_pairs < CUT_PAIRS
        return few and self.verdict == "cannot tell apart" and abs(math.log(self.ratio)) > math.log(1 + LEAST_EFFECT)

    @property
    def is_told(self) -> bool:
        """Whether it is told as one of `DETAILS`: of enough pairs, or as far from 1 as they are apart."""
        sure = 2 / 2**self.num_pairs <= LEVEL / len(DETAILS) or self._gap >= self.width
        return self.is_enough and self.verdict != "cannot tell apart" and sure

    @property
    def _gap(self) -> float:
        """How far the interval is from 1, in logarithms; negative where it holds 1."""
        return max(math.log(self.low), -math.log(self.high))

    @property
    def width(self) -> float:
        """The interval's width in logarithms; for a narrow one about its share of the ratio."""
        return math.log(self.high / self.low)

    @property
    def kind(self) -> Kind:
        """The colour of a badge: "dim" where the two cannot be told apart, and without pairs."""
        return KINDS[self.verdict] if self.is_enough else "dim"

    @property
    def delta(self) -> tuple[float, float, float]:
        """The difference, after minus before, in their own unit: the interval's ends around that of the medians.

        The difference of the medians, unlike the middle of the pairs, adds up along a ladder. The interval contains it.
        """
        difference = self.after - self.before
        low, high = ((ratio - 1) * self.before for ratio in (self.low, self.high))
        return min(low, difference), difference, max(high, difference)

    def word(self, metric: str) -> str:
        """Which way it went, whether or not it can be told: `sooner`, `slower`."""
        gain, loss = WORDS.get(metric, ("faster", "slower"))
        return gain if (self.ratio > 1) == self.more_is_better else loss

    def short(self, metric: str) -> str:
        """`words` without the interval: `24.1 × sooner`."""
        return self.words(metric).partition(" (")[0]

    def words(self, metric: str) -> str:
        """The one notation: `24.1 × sooner (23.2 to 25.0)`, `cannot tell apart (0.98 to 1.03 × faster)`.

        All factors are in the direction of the word, which is that of the medians. `metric` is a name of `Measurement`,
        such as "ttft_ms".
        """
        word, is_untold = self.word(metric), self.verdict == "cannot tell apart"
        ends = (self.low, self.high) if self.ratio > 1 else (1 / self.high, 1 / self.low)
        if is_untold and self.is_enough:
            low, high = _factors(*ends)
            # The interval alone would tell them apart.
            why = f" in {self.num_pairs} pairs: wider than its gap to 1 ×" if self.is_doubtful else ""
            return f"cannot tell apart ({low} to {high} × {word}{why})"
        factor, *shown = _factors(max(self.ratio, 1 / self.ratio), *(ends if self.is_enough else ()))
        if not self.num_pairs:
            changed = "" if self.ratio == 1 else f" {word}"
            return f"about the same ({factor} ×{changed})" if is_untold else f"{factor} × {word}"
        if not self.is_enough:
            return f"{factor} × {word} in {counted(self.num_pairs, 'pair')}, too few to tell"
        return f"{factor} × {word} ({' to '.join(shown)})"


def memory_words(before: int, after: int) -> str:
    """A change in bytes, which are counted and so without noise: `143 MiB less`, `0.02 MiB more`.

    It is in the unit in which `amounts` writes both, except for the last bytes.
    """
    if before == after:
        return "the same"
    mib = abs(after - before) / MiB
    size = f"{mib:,.0f}" if mib >= 99.95 else f"{mib:.1f}" if mib >= 0.05 else plain(float(f"{mib:.1g}"))
    size = f"{size} MiB" if mib >= 0.001 else counted(abs(after - before), "byte")
    if max(before, after) < LEAST_MIB and abs(after - before) >= KiB:
        size = amounts(abs(after - before), before, after)[0]
    return f"{size} {'more' if after > before else 'less'}"


def _factors(*values: float) -> list[str]:
    """Three digits; more where one would read as 1.00 and is not."""
    decimals = 3 if any(0 < abs(value - 1) < 0.005 for value in values) else 2
    return [brief(v) if v >= 10 else f"{v:.{decimals}f}" if v >= 0.1 else plain(v) for v in values]
