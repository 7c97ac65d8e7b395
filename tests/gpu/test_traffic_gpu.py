"""Kernels read what their cases declare, once: weights, keys and values from memory, by the device's own counters."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_decode_steps_kernels_read_their_bytes_once(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import traffic

    try:
        found = traffic.traffic()
    except traffic.NoCounters as problem:
        pytest.skip(str(problem))
    assert not [each for each in found if not each.is_as_declared]
