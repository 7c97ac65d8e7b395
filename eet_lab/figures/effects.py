"""What a rung of a ladder changed, and how sure that is: for the figures, and for the list of techniques."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import copysign, sqrt

from eet_lab.bench import Ladder, Measurement, Rung
from eet_lab.bench.measured import p50
from eet_lab.bench.paired import KINDS, Kind, Verdict
from eet_lab.figures import theme
from eet_lab.words import brief, ms_words, signed, times

COLORS: dict[Verdict, str] = {"better": theme.GAIN, "worse": theme.LOSS, "cannot tell apart": theme.UNSURE}
OPPOSITE: dict[Verdict, Verdict] = {"better": "worse", "worse": "better"}
LEAST_SHARE = 0.04
"""The shortest bar, as a share of the longest: what there is can be seen."""


@dataclass(frozen=True)
class OwnTime:
    """A rung's time, end to end, against that of another: `ms` more, leading to between `low_level` and `high_level`.

    The interval is that of `num_pairs` paired runs. Without any it is the range that two blocks of repeats allow, which
    is no guard against a machine that drifts between them.
    """

    ms: float
    low_level: float
    high_level: float
    verdict: Verdict
    words: str
    num_pairs: int

    @classmethod
    def of(cls, rung: Rung, before: Measurement) -> OwnTime:
        """How a rung differs from the measurement that it is compared with."""
        was, delta = before.total_ms, rung.delta_ms
        level, ms = was.p50 if was else 0.0, delta.p50 if delta else 0.0
        change = rung.change
        if change is not None and change.num_pairs:  # else two medians stand alone
            low, _, high = change.delta
            return cls(ms, level + low, level + high, change.verdict, change.words("total_ms"), change.num_pairs)
        low, high = (level + delta.p20, level + delta.p80) if delta else (level, level)
        verdict: Verdict = "cannot tell apart" if low <= level <= high else "better" if ms < 0 else "worse"
        return cls(ms, low, high, verdict, _words(verdict, level, ms, low, high), num_pairs=0)

    @property
    def color(self) -> str:
        return COLORS[self.verdict]

    @property
    def opposite(self) -> str:
        """The colour where a technique is taken away: what becomes slower without it was worth it."""
        return COLORS[OPPOSITE.get(self.verdict, self.verdict)]


def _words(verdict: Verdict, level: float, ms: float, low: float, high: float) -> str:
    between = f"from {signed(low - level, 3)} to {signed(high - level, 3)} ms, not paired"
    if verdict == "cannot tell apart" or not level or level + ms <= 0:
        return f"cannot tell apart ({between})"
    ratio = level / (level + ms) if ms < 0 else (level + ms) / level
    return f"{times(ratio)} {'faster' if ms < 0 else 'slower'} ({between})"


@dataclass(frozen=True)
class Effect:
    """What a technique brought in a ladder, for one row of a list.

    `share` of the row's bar, from -1 (saves time) to 1 (costs time): square roots, since the largest effect is
    thousands of times the smallest.
    """

    text: str
    kind: Kind
    share: float
    tip: str


def effects(ladder: Ladder) -> dict[str, Effect]:
    """Each technique's own share of the way from the baseline to the full recipe, by its name.

    What came along with another technique has no rung of its own, and says so.
    """
    found: dict[str, Effect] = {}
    steps = [(rung, OwnTime.of(rung, before.measurement), before) for before, rung in pairwise(ladder.rungs)]
    most = max((abs(step.ms) for _, step, _ in steps), default=0.0)
    for rung, step, before in steps:
        kind = KINDS[step.verdict]
        text = "cannot tell apart" if kind == "dim" else f"{signed(step.ms, 3)} ms"
        size = max(sqrt(abs(step.ms) / most), LEAST_SHARE) if most and kind != "dim" else 0.0
        found[rung.technique] = Effect(text, kind, round(copysign(size, step.ms), 3), _tip(rung, step, before))
        for name in rung.along:
            found[name] = Effect(f"with {rung.title}", "dim", 0.0, f"Added together with {rung.title}, which needs it.")
    return found


def _tip(rung: Rung, step: OwnTime, before: Rung) -> str:
    was, now = (p50(each.measurement.total_ms) or 0.0 for each in (before, rung))
    return f"end to end: {brief(was)} → {ms_words(now)}; {step.words}"
