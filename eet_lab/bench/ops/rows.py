"""Ops that reduce row by row: by PyTorch, and by our kernels with several rows at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from eet_lab.bench.ops.provider import Inputs, Prepared, Provider
from eet_lab.ops import cuda, native
from eet_lab.ops.cuda.norm import INTERLEAVED
from eet_lab.ops.row_cases import NormShape
from eet_lab.ops.types import fresh


def softmax(shape: Any, inputs: Inputs) -> Prepared:
    """Over the last dimension."""
    return Prepared(lambda: torch.softmax(inputs[0], -1))


def interleaved(rows: int, shape: Any, inputs: Inputs) -> Prepared:
    """Our kernel with so many rows at a time."""
    op: Any = cuda.norm if isinstance(shape, NormShape) else cuda.softmax
    native.prepare(op.kernels)
    return Prepared(lambda: op(*inputs, empty=fresh, rows=rows))


ROWS = (
    Provider("torch-softmax", ("softmax",), softmax),
    *(
        Provider(f"eet_lab-{rows}-rows", ("norm", "softmax"), partial(interleaved, rows), native.available)
        for rows in INTERLEAVED[1:]
    ),
)
