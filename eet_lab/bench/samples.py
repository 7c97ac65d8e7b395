"""What a monitor saw of a run, as it stands in a file beside the result: `eet_lab.monitor.record` writes it."""

from __future__ import annotations

from dataclasses import dataclass

from eet_lab.bench.ranges import Amount, Many, Name, Real


@dataclass(frozen=True)
class Sampled:
    """One sample; `t` is in seconds since the run began."""

    t: Amount
    values: dict[Name, Real]


@dataclass(frozen=True)
class Recording:
    """One watched run: the source, its metrics' units, why others are missing, and the samples."""

    label: Name
    metrics: dict[Name, Name]
    missing: dict[Name, Name]
    samples: Many[Sampled]
