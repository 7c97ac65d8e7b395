"""What a run, a comparison and a ladder give back: frozen dataclasses that can be saved, loaded and shown."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eet_lab.bench import tables
from eet_lab.bench.measured import TIMES, Environment, Measurement, Parity, Spread
from eet_lab.bench.paired import Change
from eet_lab.codec import Count, Many, Name, Real, Setting, SignedBytes, Some, Text, encode
from eet_lab.errors import ResultError
from eet_lab.paths import write_whole

SCHEMA = 1
"""The version of the file format; raised when an older reader would misread a newer file."""


@dataclass(frozen=True, repr=False)
class Result:
    """What Run, Comparison and Ladder share: what was measured where, files and tables.

    `workload` reads like `gpt2/b8/p16-512/n128`; `settings` are those of the generation.
    """

    environment: Environment
    workload: Name
    prompts: Some[Text]
    prompt_lengths: Some[Count]
    settings: dict[Name, Setting]

    def save(self, path: str | Path, **beside: Any) -> Path:
        """Write JSON that `load_result` reads, and return the path; ResultError where it cannot be written.

        `beside` are entries to keep beside the result, such as what a monitor recorded.
        """
        path = Path(path)
        try:
            write_whole(path, self.to_json(**beside))
        except OSError as error:
            raise ResultError(
                f"The result cannot be written to {path}: {error.strerror}. Choose another place."
            ) from error
        return path

    def to_json(self, **beside: Any) -> str:
        """What `save` writes."""
        content = {"eet_lab_result": SCHEMA, "kind": type(self).__name__.lower(), "result": encode(self), **beside}
        try:
            return json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n"
        except ValueError as error:
            raise ResultError(f"The result holds a number that is not finite, which JSON cannot: {error}.") from error

    def to_frame(self) -> Any:
        """A pandas DataFrame with numbers: one row per measurement."""
        return tables.frame(self)

    def to_text(self) -> str:
        """The table as plain text, for a terminal."""
        return tables.text(self)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return tables.html(self)


@dataclass(frozen=True, repr=False)
class Run(Result):
    """One recipe, run once while it was watched: text and timing as they went by, which no check and no repeat backs.

    `stopped`: the user ended it, so rows may lack tokens, and times that need all of them are None.
    """

    measurement: Measurement
    stopped: bool = False

    @property
    def recipe(self) -> str:
        return self.measurement.recipe

    @property
    def texts(self) -> tuple[str, ...]:
        return self.measurement.texts

    def __repr__(self) -> str:
        return f"Run({self.workload!r}, {self.recipe!r})"


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """A baseline and a selection on the same prompts.

    `watched` is a pass of the selection with a live view on, and `watching_cost_percent` what that added to its time.
    `changes` goes by a time's name in a `Measurement`, and holds what the pairs of runs say; a file of before they were
    kept has none, and `all_changes` then goes by the medians.
    """

    baseline: Measurement
    selection: Measurement
    parity: Parity
    watched: Measurement | None = None
    watching_cost_percent: Real | None = None
    changes: dict[str, Change] = field(default_factory=dict)

    @property
    def all_changes(self) -> dict[str, Change]:
        """`changes`, or those of the medians alone."""
        return self.changes or unpaired(self.baseline, self.selection)

    def __repr__(self) -> str:
        return f"Comparison({self.workload!r}, {self.selection.recipe!r} against {self.baseline.recipe!r})"


@dataclass(frozen=True)
class Rung:
    """One technique more (or less, in `Ladder.left_out`) than the rung before (or than the full recipe).

    `technique` is empty for the baseline; `along` names what had to come, or go, with it. Deltas are this rung less
    the one it is compared with: negative is a gain on the way up. The middle of a delta is the difference of the
    medians, so that they add up; its range is the interval of `changes`, of the runs of each round (a file of before
    those were kept has none, and the range that both spreads allow).
    """

    technique: Name
    title: Name
    along: Many[Name]
    measurement: Measurement
    parity: Parity
    delta_ms: Spread | None = None  # end to end
    delta_ttft_ms: Spread | None = None
    delta_tpot_ms: Spread | None = None
    delta_bytes: SignedBytes = 0  # of the peak
    changes: dict[str, Change] = field(default_factory=dict)

    @property
    def change(self) -> Change | None:
        """The change of the time end to end; None for the baseline, and where a file does not have it."""
        return self.changes.get("total_ms")


@dataclass(frozen=True, repr=False)
class Ladder(Result):
    """Techniques added one by one from the baseline, then left out one by one from the full recipe.

    Only `rungs` make a waterfall: their deltas add up from the baseline to the full recipe. Those of `left_out` do
    not, since techniques help or hinder each other. `partial`: it was stopped, and holds what was measured until then.
    `changes` are those from the baseline to the full recipe.
    """

    recipe: Name
    rungs: Many[Rung]
    left_out: Many[Rung] = ()
    partial: bool = False
    changes: dict[str, Change] = field(default_factory=dict)

    @property
    def all_changes(self) -> dict[str, Change]:
        """`changes`, or those of the medians alone."""
        if self.changes or not self.rungs:
            return self.changes
        return unpaired(self.rungs[0].measurement, self.rungs[-1].measurement)

    def __repr__(self) -> str:
        rungs = f"{len(self.rungs)} rungs, {len(self.left_out)} left out"
        return f"Ladder({self.workload!r}, {self.recipe!r}, {rungs})"


def unpaired(before: Measurement, after: Measurement) -> dict[str, Change]:
    """What medians say, without an interval, of runs that were not paired."""
    found = {}
    for metric in TIMES:
        a, b = metric.read(before), metric.read(after)
        found[metric.key] = Change.unpaired(a and a.p50, b and b.p50, metric.more_is_better)
    return {key: change for key, change in found.items() if change is not None}
