"""Going through what cases are to be tested on."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from eet_lab.ops.cases import Case


def every_shape(cases: Iterable[Case], most_bytes: float = math.inf) -> pytest.MarkDecorator:
    """Run a test with `case` and `shape`, for each shape of each case that reads at most so many bytes in fp32."""
    pairs = [(case, shape) for case in cases for shape in case.shapes if shape.read_bytes(4) <= most_bytes]
    return pytest.mark.parametrize(("case", "shape"), pairs, ids=[f"{case.name}/{shape}" for case, shape in pairs])
