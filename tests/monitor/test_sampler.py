"""The sampler's thread: its rate, its ring, pausing, probes that fail, and its own cost."""

from __future__ import annotations

import threading
import time

import pytest

from eet_lab.monitor import Sampler
from eet_lab.monitor import sampler as sampler_module
from monitor.fakes import Counter, wait_for


def test_sampler_since_hands_out_each_sample_once():
    with Sampler(Counter(), hz=500) as sampler:
        wait_for(lambda: sampler.since()[1] >= 10)
        first, index = sampler.since()
        wait_for(lambda: sampler.since()[1] >= index + 5)
        more, _ = sampler.since(index)
    numbers = [s.values["n"] for s in first + more]
    assert numbers == [float(i + 1) for i in range(len(numbers))]
    times = [s.t for s in first + more]
    assert times == sorted(times)


def test_sampler_ring_keeps_the_newest_and_its_numbering(monkeypatch):
    monkeypatch.setattr(sampler_module, "MOST_SAMPLES", 4)
    sampler = Sampler(Counter(), hz=1000)
    wait_for(lambda: sampler.since()[1] >= 12)
    sampler.close()
    samples, index = sampler.since(0)
    assert [s.values["n"] for s in samples] == [float(index - 3 + i) for i in range(4)]
    assert sampler.since(index - 1)[0] == samples[-1:]
    assert sampler.since(index)[0] == []


def test_sampler_keeps_its_rate():
    def samples_a_second() -> float:
        with Sampler(Counter(), hz=50) as sampler:
            begun = time.perf_counter()
            time.sleep(0.5)
            return sampler.since()[1] / (time.perf_counter() - begun)

    assert any(40 <= samples_a_second() <= 54 for _ in range(5)), "the best of five: another test may have the cores"


def test_sampler_pause_and_resume():
    with Sampler(Counter(), hz=500) as sampler:
        wait_for(lambda: sampler.since()[1] >= 3)
        sampler.pause()
        time.sleep(0.02)
        before = sampler.since()[1]
        time.sleep(0.05)
        assert sampler.since()[1] == before
        extra = sampler.sample_now()
        assert sampler.since(before)[0] == [extra]
        sampler.resume()
        wait_for(lambda: sampler.since()[1] > before + 3)


def test_sampler_close_joins_also_while_paused():
    source = Counter()
    sampler = Sampler(source, hz=100)
    sampler.pause()
    sampler.close()
    assert source.closed == 1
    assert "eet-sampler" not in [thread.name for thread in threading.enumerate()]


def test_sampler_probe_that_raises_is_turned_off_with_its_reason():
    def bad():
        raise RuntimeError("no allocator here")

    with Sampler(Counter(), hz=500, probes={"bad": bad, "good": lambda: 3}) as sampler:
        wait_for(lambda: sampler.since()[1] >= 3)
        assert sampler.missing == {"bad": "RuntimeError: no allocator here"}
        assert sampler.since()[0][-1].values["good"] == 3.0


def test_sampler_measures_its_own_cost():
    with Sampler(Counter(), hz=200) as sampler:
        sampler.sample_now()
        assert sampler.cost_s > 0


@pytest.mark.parametrize("hz", [0, -1, 5000, float("nan")])
def test_sampler_refuses_a_rate_that_makes_no_sense(hz):
    with pytest.raises(ValueError, match="hz is"):
        Sampler(Counter(), hz=hz)
