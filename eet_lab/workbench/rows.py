"""What the list of kept runs tells of each: a summary of its result, and the user's own words on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from eet_lab.bench import Comparison, Ladder, Measurement, Run
from eet_lab.bench.environment import describe, moment, placed
from eet_lab.codec import Bytes, Ms, Name
from eet_lab.labels import short_form
from eet_lab.models.loading import DEMO_LABEL
from eet_lab.words import amount, counted, ms_words, visible

Result = Comparison | Ladder | Run
KINDS: dict[type, str] = {Comparison: "compare", Ladder: "ladder", Run: "run"}
Stamp = tuple[int, int]
"""A file's time of change in ns, and its size: while both stay, so does what it holds."""


@dataclass(frozen=True)
class Summary:
    """What follows from a run's file. Times are ms; what is not known is None. `problem`: why it cannot be opened."""

    kind: Name = ""
    name: Name = ""
    model: Name = ""
    device: Name = ""
    recipe: Name = ""
    recipe_text: Name = ""
    ttft_ms: Ms | None = None
    tpot_ms: Ms | None = None
    peak_bytes: Bytes | None = None
    same: Name = ""
    date: Name = ""
    origin: Name = ""
    recorded: bool = False
    problem: Name = ""

    @classmethod
    def of(cls, result: Result) -> Summary:
        """What the list tells of a result."""
        environment = placed(result.environment)
        m, device = end(result), environment.device_kind
        done = m.recipe if m is not None else result.recipe if isinstance(result, Ladder) else ""
        against = short_form(result.baseline.recipe, device) if isinstance(result, Comparison) else "baseline"
        label = short_form(done, device)
        model = "demo" if environment.model_label == DEMO_LABEL else environment.model
        where = [_short_device(environment.device)] if environment.recorded else []
        return cls(
            kind=KINDS[type(result)],
            name=", ".join([visible(model), counted(len(result.prompts), "prompt"), *where]),
            model=visible(model),
            device=visible(environment.device),
            recipe=visible(label if against == "baseline" else f"{label} against {against}"),
            recipe_text=done,
            ttft_ms=m.ttft_ms.p50 if m and m.ttft_ms else None,
            tpot_ms=m.tpot_ms.p50 if m and m.tpot_ms else None,
            peak_bytes=m.memory["peak"] if m else None,
            same=_same(result),
            date=environment.date,
            origin=visible(describe(environment)),
            recorded=environment.recorded,
        )


@dataclass(frozen=True, kw_only=True)
class KeptRun(Summary):
    """One kept run. `stamp` is that of the file which the summary was read from; `number` counts runs of its kind.

    `subject` is what was measured: `demo, 4 prompts`.
    """

    id: str
    note: str = ""
    pinned: bool = False
    writable: bool = True
    stamp: Stamp = (0, 0)
    number: int = 0
    subject: str = ""

    @property
    def when(self) -> str:
        """The moment of the measurement, in words."""
        return moment(self.date).removeprefix("on ").removeprefix("at ") if self.date else ""

    @property
    def short_when(self) -> str:
        """The moment where there is little room: `14:32` of today, else the date."""
        return self.when.split(" at ")[0]

    @property
    def label(self) -> str:
        """What tells it from others of its name: `Compare 3, 14:32:05`."""
        return f"{self.name}, {when}" if (when := to_the_second(self.date)) else self.name


def to_the_second(date: str) -> str:
    """`14:32:05` of today, else `2026-11-23 14:32:05`: local time, of an ISO date; "" of what is none."""
    try:
        then = datetime.fromisoformat(date).astimezone()
    except (ValueError, OverflowError):
        return ""
    return f"{then:%H:%M:%S}" if then.date() == datetime.now().astimezone().date() else f"{then:%Y-%m-%d %H:%M:%S}"


def end(result: Result) -> Measurement | None:
    """What a row tells: of the selection, the full recipe, the run; None of a ladder stopped before its first rung."""
    if isinstance(result, Comparison):
        return result.selection
    if isinstance(result, Run):
        return result.measurement
    return result.rungs[-1].measurement if result.rungs else None


def facts(m: Measurement) -> dict[str, str]:
    """What two runs are held side by side by."""
    return {name: "–" if (text := read(m)) is None else text for name, read in MEASURED}


MEASURED: tuple[tuple[str, Callable[[Measurement], str | None]], ...] = (
    ("time to first token", lambda m: ms_words(m.ttft_ms.p50) if m.ttft_ms else None),
    ("time per token", lambda m: ms_words(m.tpot_ms.p50) if m.tpot_ms else None),
    ("end to end", lambda m: ms_words(m.total_ms.p50) if m.total_ms else None),
    ("peak memory", lambda m: amount(m.memory["peak"])),
)


def _same(result: Result) -> str:
    if isinstance(result, Comparison):
        return result.parity.verdict
    return result.rungs[-1].parity.verdict if isinstance(result, Ladder) and result.rungs else ""


def _short_device(device: str) -> str:
    """ "NVIDIA H200" is "H200"."""
    return visible(device.removeprefix("NVIDIA ").split(" (")[0])
