"""The other source, psutil, which of them is opened, and recordings."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

from eet_lab.monitor import PsutilSource, Sample, open_source, record
from monitor.fakes import UUID, Counter


def test_psutil_source_measures_this_process_and_says_so():
    source = PsutilSource()
    assert "no NVIDIA GPU found" in source.label
    values = source.read()
    assert values["process_rss_bytes"] > 1e6


def test_a_load_is_of_some_time():
    """Of the time between two calls it would be thousands of percent: the system counts in ticks of 10 ms."""
    source = PsutilSource()
    assert "process_cpu_percent" in source.metrics and "process_cpu_percent" not in source.read()
    end = time.process_time() + 0.5
    while not (load := source.read().get("process_cpu_percent")):
        assert time.process_time() < end
    assert load < 400


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


def test_a_recording_goes_through_json():
    samples = [Sample(100.0 + i, {"n": float(i)}) for i in range(3)]
    recording = json.loads(json.dumps(record(Counter(), samples)))
    assert (recording["label"], recording["metrics"], recording["missing"]) == ("counter", {"n": "1"}, {})
    assert [(each["t"], each["values"]) for each in recording["samples"]] == [(t, {"n": t}) for t in (0.0, 1.0, 2.0)]
