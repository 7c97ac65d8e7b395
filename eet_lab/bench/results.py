"""What a measurement gives back: frozen dataclasses that can be saved, loaded, tabulated and shown.

Times are ms, sizes are bytes. Whatever is None could not be measured here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal

from eet_lab.bench import tables
from eet_lab.bench.codec import encode
from eet_lab.errors import ResultError
from eet_lab.paths import write_whole

SCHEMA = 1
"""The version of the file format; raised when an older reader would misread a newer file."""

Verdict = Literal["identical", "within rounding", "lossy", "different"]


@dataclass(frozen=True)
class Spread:
    """The median of some repeats, and the range that holds the middle 60 % of them."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """The spread of `values`, interpolated; None where one of them is missing or there are none."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        fifths = quantiles(known, n=10, method="inclusive") if len(known) > 1 else known * 9
        return cls(*(round(fifths[i], 4) for i in (1, 4, 7)))

    def minus(self, other: Spread) -> Spread:
        """The difference of the medians, so that a row of them adds up; the range is the widest that both allow."""
        ends = self.p20 - other.p80, self.p50 - other.p50, self.p80 - other.p20
        return Spread(*(round(end, 4) for end in ends))


@dataclass(frozen=True)
class Environment:
    """Where a result was taken. `device` is a name, `device_kind` "cpu" or "cuda".

    `recorded`: it came with the package or from a file, and is no measurement of this machine.
    """

    device: str
    device_kind: str
    driver: str | None
    torch: str
    transformers: str
    eet_lab: str
    commit: str | None
    date: str  # ISO 8601, UTC
    dtype: str
    model: str
    model_label: str
    recorded: bool = False


@dataclass(frozen=True)
class Cost:
    """What the hardware asks for one decode step at its middle length, beside what was measured.

    `floor_ms` is `step_bytes` at `ceiling_gb_per_s`, the rate that a streaming read reached on this device in this
    process.
    """

    weight_bytes: int  # each weight that a step reads, the LM head included
    kv_bytes: int  # keys and values of all rows
    ceiling_gb_per_s: float | None
    floor_ms: float | None
    gb_per_s: float | None  # achieved: step_bytes over the measured time per token
    launches_per_token: float | None

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True)
class Perplexity:
    """How well a text is predicted: `nats` is the mean surprise of a token, and e to that the perplexity.

    `nats` is None where it would say nothing, and `why_not` tells why.
    """

    nats: float | None
    num_tokens: int  # that were predicted
    text: str  # which one
    why_not: str = ""

    @property
    def value(self) -> float | None:
        """Among how many tokens, equally likely, the next one would be as hard to guess."""
        return None if self.nats is None else math.exp(self.nats)


@dataclass(frozen=True)
class Measurement:
    """One recipe on one workload.

    `step_ms` traces every step of the median repeat, the prefill first; `step_tokens[i]` says how many tokens
    step i generated (0 while a prompt is still being read). `memory` has the keys of `MEMORY_KEYS` in bytes;
    `memory_source` says how the peak was found: "measured" by torch's counters on a GPU, "planned" from lifetimes
    on the CPU. `prepare_s` is building kernels, capturing and the first warm-up. `tokens` and `texts` are what was
    generated. `perplexity` is known where a recipe is lossy, or compared with one that is.
    """

    recipe: str
    title: str
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    total_ms: Spread | None
    tokens_per_s: Spread | None
    step_ms: tuple[float, ...]
    step_tokens: tuple[int, ...]
    memory: dict[str, int]
    memory_source: Literal["measured", "planned"]
    prepare_s: float
    captures: int
    joules_per_token: float | None
    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    repeats: int
    warnings: tuple[str, ...] = ()
    cost: Cost | None = None
    perplexity: Perplexity | None = None


MEMORY_KEYS = ("weights", "kv", "kv_growth", "activations", "workspace", "peak")
"""Of `Measurement.memory`: the final KV cache, the copy beside a growing one, activations, what libraries and graphs
keep for themselves, and the most at once."""


@dataclass(frozen=True)
class Sameness:
    """Whether a recipe computes what the baseline computes.

    `max_error` is the largest difference of its teacher-forced logits from a reference in higher precision, and
    `budget` what rounding explains; None and 0 where the baseline's own logits overflow. `first_difference[b]` is the
    first generated token in which row b parts from the baseline, `margins[b]` how far its choice lies below the
    reference's there (a near-tie if small); None for rows that never part. "lossy": the recipe changes the weights, and
    `budget` holds what it states as well.
    """

    same_tokens: bool
    first_difference: tuple[int | None, ...]
    margins: tuple[float | None, ...]
    max_error: float | None
    budget: float
    verdict: Verdict
    explanation: str


class Result:
    """What Comparison and Ladder share: files and tables."""

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

    `workload` reads like `gpt2/b8/p16-512/n128`; `settings` are those of the generation. `watched` is a pass of the
    selection with a live view on, and `watching_cost_percent` what that added to its time.
    """

    environment: Environment
    workload: str
    prompts: tuple[str, ...]
    prompt_lengths: tuple[int, ...]
    settings: dict[str, Any]
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

    environment: Environment
    workload: str
    prompts: tuple[str, ...]
    prompt_lengths: tuple[int, ...]
    settings: dict[str, Any]
    recipe: str
    rungs: tuple[Rung, ...]
    left_out: tuple[Rung, ...] = field(default=())
    partial: bool = False

    def __repr__(self) -> str:
        rungs = f"{len(self.rungs)} rungs, {len(self.left_out)} left out"
        return f"Ladder({self.workload!r}, {self.recipe!r}, {rungs})"
