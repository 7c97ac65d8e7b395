"""How far the host is ahead of its device: the rule, the ring that waits by it, and the simulator, which has it too."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf

import numpy as np
import pytest
import torch
from cost_tables import decoder_cost
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.engine import slots, stream
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import load
from eet_lab.ops.types import TokenBuffer
from eet_lab.scheduling import LEAD_MS, ContinuousBatching, Traffic, simulate_traffic
from eet_lab.scheduling.run_ahead import RunAhead
from eet_lab.serving.profile import profile
from eet_lab.technique import Recipe

JOINING = "pre_padding,mask_removal,memory_reuse,packed_prefill,continuous_batching:rows=4:budget=64:chunk=64"


@pytest.mark.parametrize(
    ("pass_ms", "passes"), [(0.1, 8), (0.5, 8), (0.6, 7), (1.3, 4), (2.0, 2), (2.2, 2), (4.0, 1), (90.0, 1)]
)
def test_a_device_has_passes_of_four_milliseconds_to_do(pass_ms, passes):
    ahead = RunAhead(8)
    assert ahead.passes(is_full=False) == 1, "of a pass that was never seen"
    ahead.read(pass_ms)
    assert ahead.passes(is_full=False) == passes and ahead.passes(is_full=True) == 8
    assert passes == 8 or (passes - 1) * pass_ms < LEAD_MS <= passes * pass_ms


@given(st.integers(0, 64), st.lists(st.floats(0.0, 1e3), max_size=20), st.sampled_from([LEAD_MS, 1.0, inf]))
def test_it_is_never_without_one_where_there_is_a_device(most, passes, lead_ms):
    ahead = RunAhead(most, lead_ms)
    for pass_ms in passes:
        assert min(most, 1) <= ahead.passes(is_full=False) <= ahead.passes(is_full=True) == most
        assert ahead.passes(is_full=False) == most or lead_ms < inf
        ahead.read(pass_ms)


class PlayedGpu:
    """A host and a GPU with a clock of their own: a pass takes the time that it is told to, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = self.end_ms = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing=False):
                self.at_ms = None

            def record(self, stream=None):
                self.at_ms = max(gpu.end_ms, gpu.now_ms)

            def query(self):
                return self.at_ms <= gpu.now_ms

            def synchronize(self):
                gpu.now_ms = max(gpu.now_ms, self.at_ms)

            def elapsed_time(self, other):
                assert other.query(), "an event is read once it is there"
                return float(np.float32(other.at_ms - self.at_ms))

        class Stream:
            cuda_stream = 7

            def __init__(self, device=None):
                pass

            def wait_event(self, event):
                assert event.at_ms is not None

        class Clock:
            setup_ms = 0.0

            def since_ms(self):
                return 0.0

        empty = torch.empty
        for name, fake in (("Event", Event), ("current_stream", Stream), ("set_stream", lambda stream: None)):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
        monkeypatch.setattr(stream, "_copy_stream", lambda index: Stream())
        monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **how: empty(*shape, **how))
        self._clock, self._num_passes = Clock(), 0
        self._buffer = TokenBuffer(*[torch.zeros(0)] * 8)._replace(log=torch.zeros(16, 1, dtype=torch.long))

    def open(self, lead_ms: float) -> stream.TokenStream:
        self._num_passes = 0
        return stream.open_stream(self._clock, torch.device("cuda", 0), 1, lead_ms)

    def run(
        self, ring: stream.TokenStream, host_ms: float, pass_ms: float, is_full: bool = False
    ) -> list[stream.StepTokens]:
        """The next pass, whose token is its number; what the host reads then."""
        self._buffer.log[self._num_passes % 16] = self._num_passes
        self._num_passes += 1
        self.now_ms += host_ms
        self.end_ms = max(self.end_ms, self.now_ms) + pass_ms
        return ring.push(self._buffer, None, is_full)


@pytest.fixture
def gpu(monkeypatch) -> PlayedGpu:
    return PlayedGpu(monkeypatch)


@pytest.mark.parametrize("lead_ms", [LEAD_MS, 1.0, inf])
def test_a_ring_tells_all_in_order_however_far_the_host_is_ahead(gpu, lead_ms):
    for seed in range(40):
        draw, ring, told, num = random.Random(seed), gpu.open(lead_ms), [], 0
        for num in range(1, draw.randrange(2, 120)):
            took = draw.choice([0.05, 0.1, 1, 6]), draw.choice([0.1, 0.5, 1, 2, 5, 30])
            told += gpu.run(ring, *took, is_full=draw.random() < 0.2)
            if draw.random() < 0.03:
                told += ring.drain()
                assert len(told) == num
            assert num - len(told) <= stream.AHEAD
        told += ring.drain()
        assert [step.ids for step in told] == [[number] for number in range(num)]
        assert all(one.t_ms <= other.t_ms for one, other in pairwise(told))


def test_the_host_waits_until_no_more_passes_are_left_to_do(gpu):
    """Of the lead's time; where nobody comes, or could be let in, all that the ring holds."""
    each = ((LEAD_MS, 2.2, False, 2), (LEAD_MS, 10.0, False, 1), (LEAD_MS, 0.3, False, 8), (inf, 10.0, False, 8))
    for lead_ms, pass_ms, is_full, left in (*each, (LEAD_MS, 10.0, True, 8)):
        ring = gpu.open(lead_ms)
        unread = [1 - len(gpu.run(ring, 0.01, pass_ms, is_full))]
        for _ in range(60):
            unread.append(unread[-1] + 1 - len(gpu.run(ring, 0.01, pass_ms, is_full)))
        assert max(unread) == unread[-1] == left, (lead_ms, pass_ms)
        ring.drain()


def test_days_of_passes_are_timed_as_well_as_the_first(gpu):
    """CUDA tells times as float32, which has steps of 4 ms after ten hours."""
    ring = gpu.open(LEAD_MS)
    told = gpu.run(ring, 0.1, 3.6e7)
    for _ in range(40):
        told += gpu.run(ring, 0.1, 2.2)
    told += ring.drain()
    apart = np.diff([step.t_ms for step in told[1:]])
    assert apart == pytest.approx(2.2, abs=1e-3)


@pytest.mark.parametrize("num_slots", [4, 1])
@pytest.mark.parametrize(("host_ms", "pass_ms"), [(0.1, 2.2), (0.1, 0.5), (3.0, 2.2), (0.3, 5.0), (0.2, 1.0)])
def test_the_simulator_is_as_far_ahead_as_an_engine(gpu, host_ms, pass_ms, num_slots):
    """One request and its 40 passes: when the device begins each, and the first is read, whether or not all is full."""
    times = decoder_cost(lambda extra, rows, kv: pass_ms)
    table = type(times)(
        times.extras, times.rows, times.kv, times.times, times.source, stream.AHEAD,
        decoder_cost(lambda extra, rows, kv: host_ms).times,
    )  # fmt: skip
    arrival, one, many = np.zeros(1), np.array([4]), np.array([40])
    policy = ContinuousBatching(max_rows=num_slots, budget=64, chunk=64)
    served = simulate_traffic(Traffic(arrival, one, many), policy, table)
    ring, ends, read = gpu.open(LEAD_MS), [], []
    for number in range(40):
        told = gpu.run(ring, host_ms, pass_ms, is_full=num_slots == 1 and number < 39)
        read += [gpu.now_ms] * len(told)
        ends.append(gpu.end_ms)
    assert np.diff(served.passes.end_ms) == pytest.approx(np.diff(ends), abs=1e-9)
    read += [max(gpu.now_ms, ends[-1])] * len(ring.drain())
    later = ends[0] - served.passes.end_ms[0]  # here the device begins once the first pass is launched
    assert read[-1] - later == pytest.approx(served.last_ms[0], abs=1e-9)
    assert host_ms > pass_ms or read[0] - later == pytest.approx(served.first_ms[0], abs=host_ms)


def test_the_host_is_less_ahead_where_requests_can_join_and_nowhere_else(monkeypatch):
    asked, real = [], stream.open_stream
    monkeypatch.setattr(slots, "open_stream", lambda *how: asked.append(how[-1]) or real(*how))
    model = load("demo")
    engine = Engine(model.decoder, Recipe.parse(JOINING, "cpu").parts)
    engine.generate([[1, 2], [3]], Settings(2))
    assert asked == [inf]
    request = engine.add([1, 2], Settings(2))
    while not request.done:
        engine.step()
    assert asked == [inf, LEAD_MS]
    asked.clear()
    profile(model, JOINING, axes=((0, 1), (1,), (8,)), repeats=1, fresh=True)
    assert set(asked) == {inf}, "all passes that are timed together are launched before the first is done"
