"""load_result: a saved Comparison or Ladder, or a clear reason why not."""

from __future__ import annotations

import json
from pathlib import Path

from eet_lab.bench.codec import decode
from eet_lab.bench.results import SCHEMA, Comparison, Ladder, Result
from eet_lab.errors import ResultError

KINDS: dict[str, type[Result]] = {"comparison": Comparison, "ladder": Ladder}


def load_result(path: str | Path) -> Comparison | Ladder:
    """A Comparison or Ladder from its file; ResultError, naming what is wrong, where it is damaged or foreign."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
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
        return decode(KINDS[content["kind"]], content.get("result"))
    except ValueError as error:
        raise ResultError(f"{path} is damaged: {error}. Measure and save it again.") from error
