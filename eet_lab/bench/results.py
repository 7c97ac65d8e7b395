"""What a comparison and a ladder give back: frozen dataclasses that can be saved, loaded, tabulated and shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eet_lab.bench import tables
from eet_lab.bench.codec import encode
from eet_lab.bench.measured import Environment, Measurement, Sameness, Spread
from eet_lab.errors import ResultError
from eet_lab.paths import write_whole

SCHEMA = 1
"""The version of the file format; raised when an older reader would misread a newer file."""


@dataclass(frozen=True, repr=False)
class Result:
    """What Comparison and Ladder share: what was measured where, files and tables.

    `workload` reads like `gpt2/b8/p16-512/n128`; `settings` are those of the generation.
    """

    environment: Environment
    workload: str
    prompts: tuple[str, ...]
    prompt_lengths: tuple[int, ...]
    settings: dict[str, Any]

    def save(self, path: str | Path, **beside: Any) -> Path:
        """Write JSON that `load_result` reads, and return the path; ResultError where it cannot be written.

        `beside` are entries to keep beside the result, such as what a monitor recorded.
        """
        path = Path(path)
        content = {"eet_lab_result": SCHEMA, "kind": type(self).__name__.lower(), "result": encode(self), **beside}
        try:
            write_whole(path, json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n")
        except OSError as error:
            raise ResultError(
                f"The result cannot be written to {path}: {error.strerror}. Choose another place."
            ) from error
        except ValueError as error:
            raise ResultError(f"The result holds a number that is not finite, which JSON cannot: {error}.") from error
        return path

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
class Comparison(Result):
    """A baseline and a selection on the same prompts.

    `watched` is a pass of the selection with a live view on, and `watching_cost_percent` what that added to its time.
    """

    baseline: Measurement
    selection: Measurement
    sameness: Sameness
    watched: Measurement | None = None
    watching_cost_percent: float | None = None

    def __repr__(self) -> str:
        return f"Comparison({self.workload!r}, {self.selection.recipe!r} against {self.baseline.recipe!r})"


@dataclass(frozen=True)
class Rung:
    """One technique more (or less, in `Ladder.left_out`) than the rung before (or than the full recipe).

    `technique` is empty for the baseline; `along` names what had to come, or go, with it. Deltas are this rung less
    the one it is compared with: negative is a gain on the way up.
    """

    technique: str
    title: str
    along: tuple[str, ...]
    measurement: Measurement
    sameness: Sameness
    delta_ms: Spread | None = None  # end to end
    delta_ttft_ms: Spread | None = None
    delta_tpot_ms: Spread | None = None
    delta_bytes: int = 0  # of the peak


@dataclass(frozen=True, repr=False)
class Ladder(Result):
    """Techniques added one by one from the baseline, then left out one by one from the full recipe.

    Only `rungs` make a waterfall: their deltas add up from the baseline to the full recipe. Those of `left_out` do
    not, since techniques help or hinder each other. `partial`: it was stopped, and holds what was measured until then.
    """

    recipe: str
    rungs: tuple[Rung, ...]
    left_out: tuple[Rung, ...] = ()
    partial: bool = False

    def __repr__(self) -> str:
        rungs = f"{len(self.rungs)} rungs, {len(self.left_out)} left out"
        return f"Ladder({self.workload!r}, {self.recipe!r}, {rungs})"
