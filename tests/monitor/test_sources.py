"""The other sources: psutil, recordings, and which of them is opened."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from eet_lab.errors import MonitorError
from eet_lab.monitor import PsutilSource, ReplaySource, Sample, energy_joules, open_source, record
from monitor.fakes import UUID, Counter


def test_psutil_source_measures_this_process_and_says_so():
    source = PsutilSource()
    assert "no NVIDIA GPU found" in source.label
    values = source.read()
    assert values["process_rss_bytes"] > 1e6


def test_open_source_on_a_cpu_is_labelled():
    source = open_source("cpu")
    assert source.name == "psutil"
    assert "psutil" in source.label


def test_open_source_says_why_nvml_is_not_used(nvml, monkeypatch):
    import torch

    nvml.broken["init"] = "Driver/library version mismatch"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    source = open_source("cuda:0")
    assert source.name == "psutil"
    assert "version mismatch" in source.label
    assert "version mismatch" in source.missing["memory_used_bytes"]


def test_a_recording_replays_through_json():
    samples = [Sample(100.0 + i, {"n": float(i)}, "counter") for i in range(3)]
    source = ReplaySource(json.loads(json.dumps(record(Counter(), samples))))
    assert source.label == "counter (recorded)"
    assert source.times == [0.0, 1.0, 2.0]
    assert [source.read() for _ in range(4)] == [{"n": 0.0}, {"n": 1.0}, {"n": 2.0}, {}]
    assert source.done


@pytest.mark.parametrize("bad", [{}, {"label": "x", "metrics": {}, "missing": {}, "samples": [{"t": 0}]}])
def test_a_broken_recording_is_refused(bad):
    with pytest.raises(MonitorError, match="not a recording"):
        ReplaySource(bad)


def test_energy_is_interpolated_between_samples():
    samples = [Sample(float(t), {"energy_j": 100.0 * t}, "x") for t in range(4)]
    assert energy_joules(samples, (0.5, 2.25)) == pytest.approx(175.0)
    assert energy_joules(samples, (0.0, 3.0)) == pytest.approx(300.0)
    assert energy_joules(samples, (2.0, 3.5)) is None, "nothing is known after the last sample"
    assert energy_joules([], (0.0, 1.0)) is None
