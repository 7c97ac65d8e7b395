"""How far the host may be ahead of its device."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.scheduling.run_ahead import LEAD_MS, RunAhead


@pytest.mark.parametrize(
    ("pass_ms", "passes"), [(0.1, 8), (0.5, 8), (0.6, 7), (1.3, 4), (2.0, 2), (2.2, 2), (4.0, 1), (90.0, 1)]
)
def test_a_device_has_passes_of_four_milliseconds_to_do(pass_ms, passes):
    ahead = RunAhead(8)
    assert ahead.passes == 1, "of a pass that was never seen"
    for number in range(1, 4):
        ahead.read(number * pass_ms)
        assert ahead.passes == passes and (passes == 8 or (passes - 1) * pass_ms < LEAD_MS <= passes * pass_ms)


@given(st.integers(0, 64), st.lists(st.floats(0.0, 1e3), max_size=20), st.sampled_from([LEAD_MS, 1.0, inf]))
def test_it_is_never_without_one_where_there_is_a_device(most, passes, lead_ms):
    ahead, end_ms = RunAhead(most, lead_ms), 0.0
    for pass_ms in passes:
        assert min(most, 1) <= ahead.passes <= most
        assert ahead.passes == most or lead_ms < inf
        end_ms += pass_ms
        ahead.read(end_ms)
