"""Exercises of lesson 4: the floor of a step, the batch at which it moves, and the launches that it has time for."""

from __future__ import annotations

import math

from eet_lab.lessons import rungs
from eet_lab.lessons.exercise import formula
from eet_lab.lessons.roofline import H200_GB_PER_S, H200_TFLOPS

H200 = H200_GB_PER_S * 1e9, H200_TFLOPS * 1e12
LAUNCHING = round(rungs.H200.kernel_us, 1), rungs.H200.launch_us

CASES = {
    "GPT-2 XL, no context yet, H200": (1.556e9, 3.112e9, 0, *H200),
    "GPT-2 XL, 16 tokens, H200": (1.556e9, 3.112e9, 16 * 307_200, *H200),
    "GPT-2 XL, 192 tokens, H200": (1.556e9, 3.112e9, 192 * 307_200, *H200),
    "8 billion weights, 8 KV heads, 128 tokens, H200": (7.5e9, 15.0e9, 128 * 131_072, *H200),
    "the same weights in int8": (7.5e9, 7.5e9, 128 * 131_072, *H200),
}
"""Weights, their bytes, bytes of a row's keys and values, bytes a second, operations a second. In the third, each row
brings more bytes than operations: no batch is big enough.
"""


def floor_and_batch(
    num_weights: float, weight_bytes: float, row_kv_bytes: float, bytes_per_s: float, flops_per_s: float
) -> tuple[float, float]:
    """Two operations for each weight and row; weights are read once a step, keys and values once a row."""
    floor_ms = (weight_bytes + row_kv_bytes) / bytes_per_s * 1e3
    gained_s = 2 * num_weights / flops_per_s - row_kv_bytes / bytes_per_s
    batch = math.ceil(weight_bytes / bytes_per_s / gained_s) if gained_s > 0 else math.inf
    return floor_ms, batch


def _batch(weights: float, weight_bytes: float, kv: float, bytes_s: float, flops_s: float) -> int:
    """The batch if rows had no keys and values."""
    return math.ceil(weight_bytes / bytes_s / (2 * weights / flops_s))


floor = formula(
    floor_and_batch,
    CASES,
    {
        "That is in seconds; return milliseconds.": lambda *case: (floor_and_batch(*case)[0] / 1e3, None),
        "The row's keys and values must be read, too.": lambda n, w, kv, b, f: (w / b * 1e3, None),
        "That is the time of the arithmetic; the floor is that of the bytes.": lambda n, w, kv, b, f: (
            2 * n / f * 1e3,
            None,
        ),
        "Each weight is multiplied and added: 2 operations.": lambda n, *case: (None, _batch(n / 2, *case)),
        "Each further row has keys and values to read.": lambda *case: (None, _batch(*case)),
        "You are one off: the least whole number at which arithmetic takes at least as long as reading.": (
            lambda *case: (None, floor_and_batch(*case)[1] - 1)
        ),
        "You are one off: that is one row more than the least.": lambda *case: (None, floor_and_batch(*case)[1] + 1),
    },
    "Up to that batch a further row is nearly free: that is why servers batch. With more than a few dozen tokens per "
    "row, GPT-2 XL never reaches it; fewer KV heads or smaller weights change that.",
    names=("floor in ms", "batch"),
    otherwise="Floor: bytes over bandwidth, in ms. Batch: set the time of 2 x weights x batch operations equal to that "
    "of weight_bytes + batch x row_kv_bytes; where a row brings more bytes than operations, return math.inf.",
)


def most_launches(floor_ms: float, kernel_us: float, launch_us: float) -> int:
    """The host's time, launches x launch_us, is at most the device's, the floor and launches x kernel_us."""
    return math.floor(floor_ms * 1e3 / (launch_us - kernel_us))


launches = formula(
    most_launches,
    {
        "GPT-2 XL on an H200": (0.732, *LAUNCHING),
        "8 billion weights on an H200": (3.42, *LAUNCHING),
        "a small model": (0.004, *LAUNCHING),
    },
    {
        "The kernels' starts and ends are the device's time, and give the host more of it.": (
            lambda floor, kernel, launch: math.floor(floor * 1e3 / launch)
        ),
        "The floor is in milliseconds, the others in microseconds.": lambda floor, kernel, launch: math.floor(
            floor / (launch - kernel)
        ),
        "Host and device work at the same time: the slower one counts, not their sum.": (
            lambda floor, kernel, launch: math.floor(floor * 1e3 / (launch + kernel))
        ),
        "That is one too many: the host would take longer than the device.": lambda *case: most_launches(*case) + 1,
    },
    "In the table above, the baseline makes more than 1,100 launches for a step of GPT-2 XL with one row. Five kernels "
    "per layer are still 240. A CUDA graph needs one.",
    names=("launches",),
    otherwise="Set launches x launch_us equal to floor_ms x 1,000 + launches x kernel_us, and round down.",
)
