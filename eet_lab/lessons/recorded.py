"""What an H200 took: rows, ladders and samples that come with the package, for readers without that GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from statistics import mean
from typing import Any, TypeVar

from eet_lab.bench import Comparison, Ladder, Rung, Workload, load_result
from eet_lab.bench.measured import origin
from eet_lab.bench.rows import TRAIN, Row, newest, read
from eet_lab.labels import short_form
from eet_lab.models.config import PRESETS, Config
from eet_lab.models.loading import SHAPES
from eet_lab.paths import PACKAGE, benchmarks_dir
from eet_lab.technique import Recipe

MODEL = "gpt2-xl"
CONFIG: Config = PRESETS[MODEL]
ONE_ROW = f"{MODEL}/b1/p128/n128"
OURS = "eet_lab"
FOLDER = PACKAGE / "recorded"
R = TypeVar("R", Ladder, Comparison)


@cache
def rows() -> tuple[Row, ...]:
    """The newest rows of the H200, fp16."""
    return tuple(row for row in all_newest() if row.dtype == "float16")


def all_newest() -> tuple[Row, ...]:
    """The same of every dtype."""
    return tuple(newest(_all_rows()))


@cache
def _all_rows() -> list[Row]:
    return read(benchmarks_dir() / "h200.jsonl")


def masked_and_not(workload: str) -> tuple[Row, Row]:
    """Our attention kernel with a mask and without one, of the same commit; "{}" stands where "masked_" may."""
    own = [row for row in _all_rows() if row.provider == OURS and row.dtype == "float16"]
    masked = [row for row in own if row.workload == "op:" + workload.format("masked_")][-1]
    [bounded] = [row for row in own if row.workload == "op:" + workload.format("") and row.commit == masked.commit]
    return masked, bounded


@cache
def ladder() -> Ladder:
    """GPT-2 XL, one row, technique by technique."""
    return _load(Ladder, f"h200-ladder-{MODEL}-one-row")


@cache
def batch() -> Ladder:
    """GPT-2 XL, eight rows of 16 to 128 tokens and 64 new ones, technique by technique."""
    return _load(Ladder, f"h200-ladder-{MODEL}")


def rung(technique: str) -> Rung:
    """A rung of `batch` on its way up; "" is the baseline."""
    [found] = [each for each in batch().rungs if each.technique == technique]
    return found


@cache
def watched() -> tuple[Comparison, list[dict[str, Any]]]:
    """GPT-2 XL compared, and the monitor's samples while the baseline ran: {"t": seconds, "values": by counter}."""
    name = f"h200-compare-{MODEL}"
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return _load(Comparison, name), content["monitor"]["baseline"]["samples"]


def kept(name: str) -> dict[str, Any]:
    """What a part of `benchmarks/run_h200.py` found, as it wrote it; each has a form of its own."""
    found: dict[str, Any] = json.loads((benchmarks_dir() / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _load(kind: type[R], name: str) -> R:
    result = load_result(FOLDER / f"{name}.json")
    assert isinstance(result, kind)  # the file says so, and its name
    return result


def label(used: Sequence[Row] | Ladder | Comparison) -> str:
    """Where, with what and when it was measured, to stand on everything that is recorded."""
    if isinstance(used, (Ladder, Comparison)):
        return f"recorded on an {used.environment.origin}"
    taken = sorted((row for row in used if row.run != "recorded"), key=lambda row: row.date)
    first, last = taken[0], taken[-1]
    days, commits = _span(first.date[:10], last.date[:10]), _span(first.commit, last.commit)
    return f"recorded on an {origin(last.gpu, last.driver, last.torch, last.transformers, days, commits)}"


def _span(first: str | None, last: str | None) -> str:
    """From the first to the last, or the one that both are."""
    return " to ".join(dict.fromkeys(end for end in (first, last) if end))


def ceiling_gb_per_s() -> float:
    """The rate at which a streaming read got its bytes on that GPU."""
    [rate] = {rung.measurement.cost.ceiling_gb_per_s for rung in ladder().rungs if rung.measurement.cost}
    assert rate is not None  # it was measured: the ladder is a GPU's
    return rate


def steps_of() -> tuple[Row, ...]:
    """Rows of the model whose time per token was measured, of batches alone."""
    return tuple(row for row in rows() if row.is_batch and row.tpot_ms and Workload.parse(row.workload).model == MODEL)


def one_row() -> tuple[Row, ...]:
    """Who was measured on one row of 128 tokens and 128 new ones, the slowest first."""
    own = [row for row in rows() if row.workload == ONE_ROW and row.tpot_ms]
    return tuple(sorted(own, key=lambda row: -row.tpot_ms.p50 if row.tpot_ms else 0.0))


def fastest(without: str = "") -> Row:
    """Our fastest recipe on one row, among those that compute the same as the baseline, `without` a technique."""
    recipes = {row: Recipe.parse(row.recipe, "cuda") for row in one_row() if row.provider == OURS}
    return [row for row, recipe in recipes.items() if not recipe.lossy and without not in recipe.names][-1]


def op(name: str) -> Row:
    """Our row of a single op, by its workload without "op:"."""
    [found] = [row for row in rows() if row.workload == f"op:{name}" and row.provider == OURS and not row.recipe]
    return found


def context(workload: Workload) -> float:
    """Columns that a row reads half-way through its new tokens, on average."""
    return mean(workload.lengths) + workload.new_tokens / 2


def who(row: Row) -> str:
    """Who ran, in words."""
    if row.provider == OURS:
        return f"EET Lab: {short_form(row.recipe, 'cuda', _trained(row))}"
    name = row.provider.removeprefix("recorded:")
    return name if name == row.provider else f"{name} (in a run of its own)"


def _trained(row: Row) -> Config | None:
    """The shape of the model that a row of training is of."""
    model = row.workload.removeprefix(TRAIN).partition("/")[0]
    shape = next((shapes[model] for shapes in SHAPES if model in shapes), None)
    return shape.in_training if shape and row.workload.startswith(TRAIN) else None
