"""Cost tables as JSON files: saved whole, and checked when they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eet_lab.codec import decode, encode, parse, shown
from eet_lab.errors import CostError, did_you_mean
from eet_lab.files import regular_content
from eet_lab.paths import write_whole
from eet_lab.scheduling.cost import CostTable, DecoderCost, EncoderCost
from eet_lab.words import visible

SCHEMA = 1
"""The version of the file format."""
MOST_BYTES = 32 * 2**20
KINDS: dict[str, type[EncoderCost | DecoderCost]] = {kind.kind: kind for kind in (EncoderCost, DecoderCost)}
EXAMPLES = Path(__file__).parent / "examples"
"""Tables that were measured once, for those who have nothing of their own; each says of what and where."""


def save_cost(table: CostTable, path: str | Path) -> Path:
    """Write JSON that `load_cost` reads, and return the path; CostError where it cannot be written."""
    content = {"eet_lab_cost": SCHEMA, "kind": table.kind, "table": encode(table)}
    try:
        write_whole(Path(path), json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n")
    except OSError as error:
        raise CostError(f"The table cannot be written to {path}: {error.strerror}. Choose another place.") from error
    return Path(path)


def load_cost(path: str | Path) -> CostTable:
    """A table from its file, or the example of that name; CostError, naming what is wrong, for what is none."""
    examples = {each.stem: each for each in sorted(EXAMPLES.glob("*.json"))}
    name = visible(str(path))
    if "/" not in str(path) and not str(path).endswith(".json"):
        if str(path) not in examples:
            hint = did_you_mean(str(path), examples)
            raise CostError(
                f"There is no example {name!r}; there are {', '.join(examples)}.{hint} Name a file by its .json."
            )
        path = examples[str(path)]
    content = regular_content(path, "a cost table", MOST_BYTES, CostError, remedy="Measure fewer sizes.")
    return read_cost(content, name)


def read_cost(content: bytes, called: str) -> CostTable:
    """The table that a file's bytes hold; CostError, which calls the file `called`."""
    try:
        whole = parse(content)
    except ValueError as error:
        raise CostError(f"{called} is no cost table: {error}. Measure it again.") from error
    if not isinstance(whole, dict) or "eet_lab_cost" not in whole:
        raise CostError(f"{called} is JSON, but no cost table of EET Lab; `eet_lab.serving.profile` measures those.")
    version: Any = whole["eet_lab_cost"]
    if version != SCHEMA or isinstance(version, bool):
        raise CostError(
            f"{called} has format {shown(version)}, but this version of EET Lab reads format {SCHEMA}; measure again."
        )
    kind = whole.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise CostError(f"{called} holds a table of {shown(kind)}; known kinds are {', '.join(KINDS)}.")
    try:
        return decode(KINDS[kind], whole.get("table"), "table")
    except ValueError as error:
        raise CostError(f"{called} is damaged: {error}. Measure and save it again.") from error
