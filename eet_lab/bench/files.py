"""load_result: a saved Comparison or Ladder, or a clear reason why not."""

from __future__ import annotations

import json
from pathlib import Path

from eet_lab.bench.codec import decode
from eet_lab.bench.measured import MEMORY_KEYS, Measurement
from eet_lab.bench.results import SCHEMA, Comparison, Ladder, Result
from eet_lab.errors import ResultError

KINDS: dict[str, type[Result]] = {"comparison": Comparison, "ladder": Ladder}


def load_result(path: str | Path) -> Comparison | Ladder:
    """A Comparison or Ladder from its file; ResultError, naming what is wrong, where it is damaged or foreign."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ResultError(f"{path} is not a saved result: it is not JSON ({error}). Save it again.") from error
    if not isinstance(content, dict) or "eet_lab_result" not in content:
        raise ResultError(f"{path} is JSON, but not a result of EET Lab; `result.save(path)` makes those.")
    if content["eet_lab_result"] != SCHEMA:
        raise ResultError(
            f"{path} has format {content['eet_lab_result']}, but this version of EET Lab reads format "
            f"{SCHEMA}; open it with the version that wrote it, or measure again."
        )
    if content.get("kind") not in KINDS:
        raise ResultError(f"{path} holds a {content.get('kind')!r}; known kinds are {', '.join(KINDS)}.")
    try:
        result = decode(KINDS[content["kind"]], content.get("result"))
        for where, m in measurements(result).items():
            _check(where, m, len(result.prompt_lengths))
    except ValueError as error:
        raise ResultError(f"{path} is damaged: {error}. Measure and save it again.") from error
    return result


def measurements(result: Comparison | Ladder) -> dict[str, Measurement]:
    """Every measurement that a result holds, by its place."""
    if isinstance(result, Comparison):
        named = {"baseline": result.baseline, "selection": result.selection, "watched": result.watched}
        return {name: m for name, m in named.items() if m is not None}
    rungs = {"rungs": result.rungs, "left_out": result.left_out}
    return {f"{name}[{i}]": rung.measurement for name, those in rungs.items() for i, rung in enumerate(those)}


def _check(where: str, m: Measurement, num_rows: int) -> None:
    """What the types do not tell, and tables, figures and the replay rely on."""
    if missing := [key for key in MEMORY_KEYS if key not in m.memory]:
        raise ValueError(f"result.{where}.memory has no {missing[0]}")
    if len(m.step_ms) != len(m.step_tokens):
        raise ValueError(f"result.{where} has {len(m.step_ms)} step_ms, but {len(m.step_tokens)} step_tokens")
    for name in ("tokens", "texts"):
        rows = len(getattr(m, name))
        if rows != num_rows:
            raise ValueError(f"result.{where}.{name} has {rows} rows, but there are {num_rows} prompts")


def _no_number(word: str) -> None:
    raise ValueError(f"it holds {word}")
