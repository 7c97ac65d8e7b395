"""The kernels of norms and softmax on a GPU, however many rows they reduce at a time."""

from __future__ import annotations

import pytest
import torch
from every_shape import every_shape

from eet_lab.ops import cuda
from eet_lab.ops.cuda.launching import with_options
from eet_lab.ops.cuda.norm import INTERLEAVED
from eet_lab.ops.row_cases import ROW_CASES
from eet_lab.ops.types import fresh

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", INTERLEAVED)
@every_shape(ROW_CASES)
def test_within_the_budget(case, shape, dtype, rows):
    case.check(with_options(getattr(cuda, case.op), rows=rows), shape, "cuda", dtype)


@pytest.mark.parametrize("case", ROW_CASES, ids=lambda case: case.name)
def test_how_many_rows_at_a_time_changes_no_bit_where_teams_are_alike(case):
    inputs = case.bench[1].inputs("cuda", torch.float16, 1)  # rows of 768: a warp each
    op = getattr(cuda, case.op)
    first, *others = (op(*inputs, empty=fresh, rows=rows) for rows in INTERLEAVED)
    assert all(torch.equal(first, other) for other in others)


def test_a_dependent_launch_waits_for_what_it_reads():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    expected = cuda.softmax(cuda.softmax(x, empty=fresh), empty=fresh)
    for _ in range(20):
        assert torch.equal(cuda.softmax(cuda.softmax(x, empty=fresh), empty=fresh, dependent=True), expected)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_overflow_shows_as_in_torch(value):
    x = torch.randn(3, 100, device="cuda")
    x[1, 7] = value
    got = cuda.softmax(x, empty=fresh)
    assert torch.equal(got.isnan(), torch.softmax(x, -1).isnan())


def test_words_that_are_hidden_altogether_get_nothing():
    x = torch.randn(3, 100, device="cuda")
    x[:, 50:] = -torch.inf
    assert (cuda.softmax(x, empty=fresh)[:, 50:] == 0).all()
