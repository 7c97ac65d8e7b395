"""The film of a stream: it tells what the pool did, and it is light enough for a notebook."""

from __future__ import annotations

import json

import plotly.graph_objects as go
import pytest
from turbo_workloads import bert_base

from eet_lab.figures.plans import MOST_FRAMES, film
from eet_lab.memory import POOLS
from eet_lab.memory.replays import Replay, replay
from eet_lab.memory.workloads import eet_sweep, turbo_artifact

MOST_BYTES = 1_500_000
MiB = 2**20


@pytest.fixture(scope="module")
def chunked() -> Replay:
    return replay(POOLS["chunked"](), turbo_artifact())


@pytest.fixture(scope="module")
def fig(chunked: Replay) -> go.Figure:
    return film(chunked, "chunks")


def test_each_frame_is_a_request(chunked: Replay, fig: go.Figure) -> None:
    assert [frame.name for frame in fig.frames] == [str(n) for n in range(1, 51)]
    for frame, served in zip(fig.frames, chunked.served, strict=True):
        tensors, held, new, gone, mark = frame.data
        assert [round(base * MiB / 1000) for base in tensors.base] == pytest.approx(
            [round(offset / 1000) for offset in served.plan.offsets], abs=2
        )
        drawn = sum(1 for x in (*held.x, *new.x) if x is None)
        assert drawn == len(served.plan.chunks) + (held.x == (None,)) + (new.x == (None,))
        assert sum(1 for x in new.x if x is None and len(new.x) > 1) == served.calls.allocations
        assert mark.y[0] == pytest.approx(served.plan.footprint_bytes / MiB, abs=0.001)
        assert len(gone.x) == 1 or served.calls.frees


def test_the_slider_has_a_step_for_each_frame_and_says_what_it_took(chunked: Replay, fig: go.Figure) -> None:
    [slider] = fig.layout.sliders
    assert [list(step.args[0]) for step in slider.steps] == [[frame.name] for frame in fig.frames]
    first = chunked.served[0]
    assert slider.steps[0].label.startswith(f"request 1, {first.length} tokens: ")
    assert slider.steps[0].label.endswith(f"{first.calls.allocations} allocated")


def test_frames_move_the_traces_that_move(fig: go.Figure) -> None:
    still = [i for i, trace in enumerate(fig.data) if trace.name in ("held", "alive at most")]
    [moving] = {frame.traces for frame in fig.frames}
    assert not set(still) & set(moving)
    assert [fig.data[i].type for i in moving] == [trace.type for trace in fig.frames[0].data]


@pytest.mark.parametrize("name", ["chunked", "eet_repaired"])
def test_a_long_stream_is_sampled_and_stays_light(name: str) -> None:
    requests = bert_base() if name == "chunked" else eet_sweep(range(8, 1025, 8))
    found = replay(POOLS[name](), requests)
    assert len(found.served) > MOST_FRAMES
    fig = film(found, name)
    names = [int(frame.name) for frame in fig.frames]
    assert len(names) == MOST_FRAMES and names[0] == 1 and names[-1] == len(found.served)
    assert len(json.dumps(fig.to_plotly_json(), default=list)) < MOST_BYTES


def test_it_needs_nothing_from_a_network(fig: go.Figure) -> None:
    assert "http" not in fig.to_json()
