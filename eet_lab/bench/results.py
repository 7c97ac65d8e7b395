"""What a run, a comparison and a ladder give back: frozen dataclasses that can be saved, loaded and shown.

`load_result` reads a saved one, or gives a clear reason why not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eet_lab.bench import tables
from eet_lab.bench.measured import (
    TIMES,
    Environment,
    Measurement,
    Metric,
    Parity,
    Recording,
    Spread,
    TimedTokens,
    p50,
    placed,
)
from eet_lab.bench.paired import DETAILS, LEVEL, Change
from eet_lab.bench.run_memory import MEMORY_KEYS
from eet_lab.codec import (
    Count,
    Many,
    Name,
    Real,
    Setting,
    SignedBytes,
    Some,
    Text,
    Unknown,
    content_of,
    decode,
    encode,
    parse,
    shown,
)
from eet_lab.errors import ResultError
from eet_lab.paths import write_whole
from eet_lab.words import visible

SCHEMA = 1
"""The version of the file format; raised when an older reader would misread a newer file."""


def written(path: str | Path, text: str, what: str) -> Path:
    """The path of a file that has this text now; ResultError where it cannot be written."""
    path = Path(path)
    try:
        write_whole(path, text)
    except OSError as error:
        raise ResultError(f"The {what} cannot be written to {path}: {error.strerror}. Choose another place.") from error
    return path


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
        return written(path, self.to_json(**beside), "result")

    def to_json(self, **beside: Any) -> str:
        """What `save` writes."""
        content = {"eet_lab_result": SCHEMA, "kind": type(self).__name__.lower(), "result": encode(self), **beside}
        try:
            return json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n"
        except ValueError as error:
            raise ResultError(
                f"The result holds a number that is not finite (NaN or infinity), which a JSON file cannot hold: "
                f"{error}. Measure again."
            ) from error

    @property
    def reads(self) -> bool:
        """Whether it is an encoder's: its tokens are those that it reads, and a run has one step."""
        return "batch_tokens" in self.settings

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

    @property
    def details(self) -> str:
        """What of the first token and of the time per token can be told: `first token 1.5 × sooner (1.4 to 1.6)`."""
        return ", ".join(f"{DETAILS[key]} {change.words(key)}" for key, change in self.told.items())

    @property
    def told(self) -> dict[str, Change]:
        """Those of `DETAILS` that can be told apart, whatever becomes of the whole run."""
        return {key: each for key in DETAILS if (each := self.changes.get(key)) and each.is_told}


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


def changes(
    befores: Sequence[TimedTokens], afters: Sequence[TimedTokens], *, details: Collection[str] = ()
) -> dict[str, Change]:
    """What the runs of each round say of every time, by its name in a `Measurement`; `details` share one `LEVEL`."""

    def change(metric: Metric) -> Change | None:
        level = LEVEL / len(details) if metric.key in details else LEVEL
        return Change.of([*map(metric.read, befores)], [*map(metric.read, afters)], metric.more_is_better, level)

    return _known(change)


def unpaired(before: Measurement, after: Measurement) -> dict[str, Change]:
    """What medians say, without an interval, of runs that were not paired."""
    return _known(
        lambda metric: Change.unpaired(p50(metric.read(before)), p50(metric.read(after)), metric.more_is_better)
    )


def _known(change: Callable[[Metric], Change | None]) -> dict[str, Change]:
    return {metric.key: found for metric in TIMES if (found := change(metric)) is not None}


KINDS: dict[str, type[Run | Comparison | Ladder]] = {"run": Run, "comparison": Comparison, "ladder": Ladder}

SHORTEST_MS = 1e-6
"""No clock tells less of a step that took any time; an axis of logarithms has to end somewhere."""


def load_result(path: str | Path) -> Run | Comparison | Ladder:
    """A Run, Comparison or Ladder from its file; ResultError, naming what is wrong, where it is damaged or foreign."""
    return read_result(content_of(path), str(path))[0]


def read_result(content: bytes, called: str) -> tuple[Run | Comparison | Ladder, dict[str, Any]]:
    """The result that a file's bytes hold, and what stands beside it; ResultError, which calls the file `called`.

    It is marked as recorded unless it was taken on this machine, whatever the file says of itself.
    Beside it, "monitor" is checked: a replay plays its samples. Whatever else there is has to be checked by its reader.
    """
    name = visible(called)
    try:
        whole = parse(content)
    except ValueError as error:
        raise ResultError(f"{name} is not a saved result: {error}. Save it again.") from error
    if not isinstance(whole, dict) or "eet_lab_result" not in whole:
        raise ResultError(f"{name} is JSON, but not a result of EET Lab; result.save(path) makes those.")
    version, kind = whole.pop("eet_lab_result"), whole.pop("kind", None)
    if version != SCHEMA or isinstance(version, bool):
        raise ResultError(
            f"{name} has format {shown(version)}, but this version of EET Lab reads format "
            f"{SCHEMA}; open it with the version that wrote it, or measure again."
        )
    if not isinstance(kind, str) or kind not in KINDS:
        raise ResultError(f"{name} holds a {shown(kind)}; known kinds are {', '.join(KINDS)}.")
    try:
        result = decode(KINDS[kind], renamed(whole.pop("result", None)))
        for problem in problems(result):
            raise ValueError(f"result.{problem}")
        decode(dict[Name, Recording], whole.get("monitor", {}), "monitor")
    except Unknown as error:
        raise ResultError(
            f"{name} is of a later version: {error}. Open it with the version that wrote it, or measure again."
        ) from error
    except ValueError as error:
        raise ResultError(f"{name} is damaged: {error}. Measure and save it again.") from error
    return replace(result, environment=placed(result.environment)), whole


OLD_NAMES = {"sameness": "parity"}
"""Fields of a result, or of a rung, by the names that they had in files of earlier versions."""


def renamed(data: Any) -> Any:
    """A result as it was read, with the names of today; what is no object is left to the checks."""
    if isinstance(data, list):
        return [renamed(each) for each in data]
    if not isinstance(data, dict):
        return data
    rungs = {name: renamed(data[name]) for name in ("rungs", "left_out") if name in data}
    return {OLD_NAMES.get(name, name): value for name, value in (data | rungs).items()}


def measurements(result: Run | Comparison | Ladder) -> dict[str, Measurement]:
    """Every measurement that a result holds, by its place."""
    if isinstance(result, Run):
        return {"measurement": result.measurement}
    if isinstance(result, Comparison):
        named = {"baseline": result.baseline, "selection": result.selection, "watched": result.watched}
        return {name: m for name, m in named.items() if m is not None}
    rungs = {"rungs": result.rungs, "left_out": result.left_out}
    return {f"{name}[{i}]": rung.measurement for name, those in rungs.items() for i, rung in enumerate(those)}


def problems(result: Run | Comparison | Ladder) -> Iterator[str]:
    """What the types do not tell, and tables, figures and the replay rely on."""
    num_rows = len(result.prompt_lengths)
    if len(result.prompts) != num_rows:
        yield f"prompts has {len(result.prompts)} texts, but there are {num_rows} prompts"
    if not isinstance(result.settings.get("stop", []), list):
        yield f"settings.stop is {shown(result.settings['stop'])}, but it must be a list of token ids"
    for where, m in measurements(result).items():
        yield from (f"{where}{problem}" for problem in _problems(m, num_rows, isinstance(result, Run)))
    if isinstance(result, Comparison):
        yield from (f"parity{problem}" for problem in _rows(result.parity, num_rows))
    if isinstance(result, Ladder):
        yield from _sums(result, num_rows)


def _problems(m: Measurement, num_rows: int, may_be_stopped: bool) -> Iterator[str]:
    yield from (f".memory has no {key}" for key in MEMORY_KEYS if key not in m.memory)
    if len(m.step_ms) != len(m.step_tokens):
        yield f" has {len(m.step_ms)} step_ms, but {len(m.step_tokens)} step_tokens"
    if not any(m.step_ms) and not may_be_stopped:
        yield f".step_ms is {shown(m.step_ms)}, but at least one step must take longer than 0 ms"
    if m.total_ms is None and not may_be_stopped:
        yield ".total_ms is null, but what was measured has a time end to end"
    for i, ms in enumerate(m.step_ms):
        if 0 < ms < SHORTEST_MS:
            yield f".step_ms[{i}] is {ms}, but it must be 0 or at least {SHORTEST_MS}"
    for name in ("tokens", "texts"):
        rows = len(getattr(m, name))
        if rows != num_rows:
            yield f".{name} has {rows} rows, but there are {num_rows} prompts"
    given, steps = sum(map(len, m.tokens)), sum(m.step_tokens)
    if given != steps:
        yield f".step_tokens sums up to {steps}, but there are {given} tokens"
    if not (may_be_stopped or all(m.tokens)):
        yield f".tokens[{list(map(len, m.tokens)).index(0)}] is [], but each prompt must have at least one token"
    for name in ("ttft_ms", "tpot_ms", "total_ms", "tokens_per_s"):
        times: Spread | None = getattr(m, name)
        if times is not None and times.p20 < SHORTEST_MS:
            yield f".{name}.p20 is {times.p20}, but it must be at least {SHORTEST_MS}"
        yield from (f".{name}{problem}" for problem in _order(times))
    if m.cost is not None and (m.cost.floor_ms is None) != (m.cost.ceiling_gb_per_s is None):
        yield ".cost has one of floor_ms and ceiling_gb_per_s, but it must have both or neither"


def _order(spread: Spread | None) -> Iterator[str]:
    if spread is not None and not spread.p20 <= spread.p50 <= spread.p80:
        yield f" is {spread.p20}, {spread.p50}, {spread.p80}, but p20, p50 and p80 must rise"


def _rows(parity: Parity, num_rows: int) -> Iterator[str]:
    for name in ("first_difference", "margins"):
        rows = len(getattr(parity, name))
        if rows != num_rows:
            yield f".{name} has {rows} rows, but there are {num_rows} prompts"


def _sums(ladder: Ladder, num_rows: int) -> Iterator[str]:
    """Each rung's own bytes are its peak less that of the rung it is compared with: they are counted, so they agree."""
    if ladder.left_out and not ladder.rungs:
        yield "left_out has rungs, but rungs has none that they could be compared with"
        return
    before = [*ladder.rungs[:1], *ladder.rungs[:-1]]
    for name, rungs, others in (
        ("rungs", ladder.rungs, before),
        ("left_out", ladder.left_out, [*ladder.rungs[-1:]] * len(ladder.left_out)),
    ):
        for i, (rung, other) in enumerate(zip(rungs, others, strict=True)):
            own = rung.measurement.memory["peak"] - other.measurement.memory["peak"]
            if rung.delta_bytes != own:
                yield f"{name}[{i}].delta_bytes is {rung.delta_bytes:,}, but the peaks differ by {own:,}"
            for each in ("delta_ms", "delta_ttft_ms", "delta_tpot_ms"):
                yield from (f"{name}[{i}].{each}{problem}" for problem in _order(getattr(rung, each)))
            yield from (f"{name}[{i}].parity{problem}" for problem in _rows(rung.parity, num_rows))
