"""Lesson 4's exercise: the floor, and the batch at which decode stops being bound by memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from eet_lab.panels.lessons.exercise import Exercise, Wrong, ask, named
from eet_lab.panels.lessons.show import table


class Sizes(NamedTuple):
    """A model, a context, and a GPU."""

    name: str
    num_weights: float
    weight_bytes: float
    row_kv_bytes: float
    bytes_per_s: float
    flops_per_s: float


CASES = (
    Sizes("GPT-2 XL, no context yet, H200", 1.556e9, 3.112e9, 0, 4.4e12, 989e12),
    Sizes("GPT-2 XL, 16 tokens, H200", 1.556e9, 3.112e9, 16 * 307_200, 4.4e12, 989e12),
    Sizes("GPT-2 XL, 192 tokens, H200", 1.556e9, 3.112e9, 192 * 307_200, 4.4e12, 989e12),
    Sizes("8 billion weights, 8 KV heads, 128 tokens, H200", 7.5e9, 15.0e9, 128 * 131_072, 4.4e12, 989e12),
    Sizes("the same weights in int8", 7.5e9, 7.5e9, 128 * 131_072, 4.4e12, 989e12),
)
"""In the third, each row brings more bytes than operations: no batch is big enough."""


def exercise() -> Exercise:
    """Compute the floor and the batch; a right answer is shown for some models."""
    return Exercise(_judge, floor_and_batch)


def floor_and_batch(
    num_weights: float, weight_bytes: float, row_kv_bytes: float, bytes_per_s: float, flops_per_s: float
) -> tuple[float, float]:
    """Two operations for each weight and row; weights are read once a step, keys and values once a row."""
    floor_ms = (weight_bytes + row_kv_bytes) / bytes_per_s * 1e3
    gained_s = 2 * num_weights / flops_per_s - row_kv_bytes / bytes_per_s
    batch = math.ceil(weight_bytes / bytes_per_s / gained_s) if gained_s > 0 else math.inf
    return floor_ms, batch


def _judge(answer: Callable) -> tuple[str, tuple[Any, ...]]:
    lines = []
    for case in CASES:
        floor_ms, batch = _both(ask(answer, *case[1:]))
        right_ms, right_batch = floor_and_batch(*case[1:])
        _judge_floor(case, floor_ms, right_ms)
        _judge_batch(case, batch, right_batch)
        often = "never" if math.isinf(batch) else f"{batch:.0f}"
        lines.append([case.name, f"{floor_ms:.3g} ms", often])
    message = (
        "A batch costs nothing but keys and values until there: that is why servers batch. Multi-head attention reads "
        "so many of them that GPT-2 XL never gets there beyond a few dozen tokens; few KV heads, or bytes saved on "
        "weights, change that."
    )
    return message, (table(["model", "floor of one row", "rows until arithmetic is the limit"], lines),)


def _both(value: Any) -> tuple[float, float]:
    try:
        floor_ms, batch = value
        return float(floor_ms), float(batch)
    except Exception as error:
        raise Wrong(f"return two numbers, floor_ms and batch; you returned {named(value)}.") from error


def _judge_floor(case: Sizes, floor_ms: float, right_ms: float) -> None:
    if _near(floor_ms, right_ms):
        return
    slips = {
        right_ms / 1e3: "that is in seconds; milliseconds are wanted.",
        case.weight_bytes / case.bytes_per_s * 1e3: "the row's keys and values must be read, too.",
        2 * case.num_weights / case.flops_per_s * 1e3: "that is the time of the arithmetic; the floor is the bytes'.",
    }
    why = next((words for slip, words in slips.items() if _near(floor_ms, slip)), "bytes over bandwidth, in ms.")
    raise Wrong(f"{case.name}: your floor is {floor_ms:.4g} ms, and it should be {right_ms:.4g}: {why}")


def _judge_batch(case: Sizes, batch: float, right: float) -> None:
    if batch == right:
        return
    once = case.weight_bytes / case.bytes_per_s
    slips = {
        math.ceil(2 * once / (2 * case.num_weights / case.flops_per_s)): "each weight is multiplied and added: 2.",
        math.ceil(once / (2 * case.num_weights / case.flops_per_s)): "every further row has keys and values to read.",
    }
    if math.isinf(right):
        why = "a row brings more bytes than operations, so no batch is enough: return math.inf."
    elif abs(batch - right) <= 1:
        why = "you are one off: the least whole number at which arithmetic takes at least as long as reading."
    else:
        why = next(
            (words for slip, words in slips.items() if batch == slip),
            "set the time of 2 x weights x batch operations equal to that of weight_bytes + batch x row_kv_bytes.",
        )
    raise Wrong(f"{case.name}: your batch is {batch:.6g}, and it should be {right:.6g}: {why}")


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-3)
