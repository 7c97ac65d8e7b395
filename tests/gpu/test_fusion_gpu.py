"""Phases of a training step on a GPU: what torch's profiler and PyTorch's engine tell of them."""

from __future__ import annotations

from itertools import pairwise

import pytest

import eet_lab
from eet_lab.bench.timeline_steps import PHASES

pytestmark = pytest.mark.gpu
BATCH = "train:demo/b4/s16-64"


@pytest.fixture(scope="module")
def model():
    return eet_lab.load("demo", device="cuda", dtype="bfloat16")


def test_a_timeline_has_its_phases_on_both_lanes(model):
    for timeline in eet_lab.training_timelines(model, BATCH):
        for lane in ("host", "device"):
            phases = [span for span in timeline.spans if span.kind == "phase" and span.lane == lane]
            assert [*dict.fromkeys(span.name for span in phases)] == [*PHASES], timeline.recipe
            assert all(one.end_us <= two.start_us + 1 for one, two in pairwise(phases))
        assert timeline.num_launches > 50 and 0 < timeline.busy_share <= 1


def test_a_fusion_map_counts_kernels_and_bytes_in_each_phase(model):
    found = eet_lab.fusion_map(model, BATCH, repeats=2)
    for rung in found.rungs:
        for phase, work in rung.work.items():
            assert work.launches > 0 and work.num_bytes > 0 and work.ms > 0, (rung.name, phase, work)
    first, last = found.rungs[0], found.rungs[-1]
    assert sum(work.launches for work in last.work.values()) < sum(work.launches for work in first.work.values()) / 2
    weights = model.config.num_params
    assert last.work["update"].num_bytes > 20 * weights, "gradients, a master copy and moments"
    assert eet_lab.plot(found, "fusion").data
