"""Traces: traffic that was recorded, one request a line, as CSV or JSONL."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eet_lab.errors import TrafficError
from eet_lab.files import regular_content
from eet_lab.scheduling.traffic import MOST_BYTES, MOST_REQUESTS, REMEDY, Traffic
from eet_lab.scheduling.whole import MOST
from eet_lab.words import told, too_many_digits, visible

FIELDS = ("time", "length", "new_tokens")
"""Seconds from any beginning, tokens of the prompt, and tokens that are asked for (1, where a trace does not say)."""

Fields = tuple[float, float, float]


def read_trace(path: str | Path) -> Traffic:
    """Traffic from a file; TrafficError, naming the line, where it is damaged.

    CSV has the columns time, length and, if need be, new_tokens, in this order or as its first line names them; JSONL
    has an object with these names in each line. Requests are put in the order of their times.
    """
    name = visible(str(path))
    content = regular_content(path, "a trace", MOST_BYTES, TrafficError, remedy=REMEDY)
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise TrafficError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line and not line.isspace()]
    is_json = bool(numbered) and numbered[0][1].lstrip()[0] == "{"
    order = _order(*numbered[0], name) if numbered and not is_json else None
    if order is not None:
        del numbered[0]
    if not numbered:
        raise TrafficError(f"{name} holds no request. A line is time,length,new_tokens, such as 0.25,128,64.")
    if len(numbered) > MOST_REQUESTS:
        raise TrafficError(f"{name} has {len(numbered):,} requests, but at most {MOST_REQUESTS:,} are read. {REMEDY}")
    values = array("d")
    for number, line in numbered:
        try:
            values.extend(_of_json(line) if is_json else _of_csv(line, order))
        except (ValueError, OverflowError, RecursionError) as error:
            raise TrafficError(f"{name}, line {number}: {_said(error, line)}.") from None
    found = np.array(values).reshape(-1, 3)
    _check(found, [number for number, _ in numbered], name)
    found = found[np.argsort(found[:, 0], kind="stable")]
    time, lengths, new_tokens = found.T
    return Traffic(time * 1e3, lengths.astype(np.int64), new_tokens.astype(np.int64), visible(Path(path).name))


def _order(number: int, line: str, name: str) -> list[int] | None:
    """The columns of `FIELDS`, by the line that names them; None for a line of numbers."""
    columns = [column.strip().lower() for column in line.split(",")]
    if any(map(_is_number, columns)):
        return None
    if sorted(columns) not in (sorted(FIELDS), sorted(FIELDS[:2])):
        raise TrafficError(
            f"{name}, line {number}: the columns are {told(visible(line))}, but they must be time, length and "
            "new_tokens, or the first two."
        )
    return [columns.index(field) for field in FIELDS if field in columns]


def _of_csv(line: str, order: Sequence[int] | None) -> Fields:
    values = line.split(",")
    if order is None:
        return _told([*map(float, values)])
    if len(values) != len(order):
        raise ValueError(f"are {len(values)} fields instead of {len(order)}")
    return _told([float(values[place]) for place in order])


def _of_json(line: str) -> Fields:
    found = json.loads(line)
    if not isinstance(found, dict) or not {"time", "length"} <= found.keys() <= set(FIELDS):
        raise ValueError('is no object with "time", "length" and, if need be, "new_tokens"')
    values = [found[field] for field in FIELDS if field in found]
    if any(type(value) not in (int, float) for value in values):
        raise ValueError("is a value that is no number")
    return _told(values)


def _told(values: Sequence[float]) -> Fields:
    if not 2 <= len(values) <= 3:
        raise ValueError(f"are {len(values)} fields instead of 2 or 3")
    return (*values, 1.0) if len(values) == 2 else tuple(values)  # type: ignore[return-value]


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def _said(error: Exception, line: str) -> str:
    if isinstance(error, ValueError) and (wrong := too_many_digits(error)):
        return wrong
    if isinstance(error, json.JSONDecodeError):
        wrong = "is no JSON"
    elif isinstance(error, OverflowError | RecursionError):
        wrong = "is a number or an object that is too large"
    else:
        wrong = "is no number" if str(error).startswith("could not convert") else str(error)
    return f"there {wrong} in {told(visible(line))}"


def _check(found: np.ndarray, numbers: Sequence[int], name: str) -> None:
    """TrafficError for the first request that cannot be."""
    whole = np.isfinite(found) & (found == np.floor(found))
    limits: Iterable[tuple[Any, str, str]] = (
        (~(np.isfinite(found[:, 0]) & (found[:, 0] >= 0) & (found[:, 0] <= 1e9)), "time", "0 to 1e9 seconds"),
        (~(whole[:, 1] & (found[:, 1] >= 1) & (found[:, 1] <= MOST)), "length", f"1 to {MOST:,}, whole"),
        (~(whole[:, 2] & (found[:, 2] >= 1) & (found[:, 2] <= MOST)), "new_tokens", f"1 to {MOST:,}, whole"),
    )
    for column, (wrong, field, limit) in enumerate(limits):
        if wrong.any():
            at = int(np.argmax(wrong))
            shown = _shown(found[at, column].item())
            raise TrafficError(f"{name}, line {numbers[at]}: {field} is {shown}, but it must be {limit}.")


def _shown(value: float) -> str:
    return told(int(value) if value.is_integer() and abs(value) < 1e15 else value)
