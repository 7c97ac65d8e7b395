"""Where a result says that it was taken."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import torch
from test_bench_results import HERE, comparison

from eet_lab.bench import compare, load_result, measured
from eet_lab.bench.measured import describe, is_here, machine_id, moment, placed
from eet_lab.errors import ResultError
from eet_lab.workbench.history import SHIPPED, History

OWN, UNKNOWN = HERE, replace(HERE, machine=None)


def test_a_machine_has_one_id_in_every_process_and_none_for_what_it_lacks():
    code = "from eet_lab.bench.measured import machine_id; print(machine_id('cpu'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == machine_id("cpu")
    assert len(machine_id("cpu")) == 16
    assert machine_id("no such device") is None


def test_the_id_tells_nothing_and_differs_between_hosts(monkeypatch):
    before = machine_id("cpu")
    measured.machine_id.cache_clear()
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert machine_id("cpu") != before
    measured.machine_id.cache_clear()


def test_each_gpu_has_an_id_and_all_that_are_seen_are_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: SimpleNamespace(uuid=f"gpu {at}"))
    measured.machine_id.cache_clear()
    first, second = (machine_id(f"cuda:{at}") for at in range(2))
    assert first == machine_id("cuda") != second
    assert all(is_here(replace(HERE, device_kind="cuda", machine=each)) for each in (first, second))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not is_here(replace(HERE, device_kind="cuda", machine=second))
    measured.machine_id.cache_clear()


@pytest.mark.parametrize(
    ("environment", "recorded"),
    [
        (OWN, False),
        (UNKNOWN, True),
        (replace(HERE, machine="0123456789abcdef"), True),
        (replace(OWN, recorded=True), False),
    ],
    ids=["taken here", "of before ids were kept", "elsewhere", "what a file says of itself does not count"],
)
def test_a_file_is_recorded_unless_it_was_taken_here(environment, recorded):
    assert is_here(environment) is not recorded
    assert placed(environment).recorded is recorded
    words = describe(placed(environment))
    assert ("not measured on this machine" in words) is recorded
    assert ("Measured on this machine" in words) is not recorded


def test_what_is_measured_now_knows_its_machine(tiny, tmp_path):
    result = compare(tiny, [[5, 6, 7]], "memory_reuse", repeats=1, max_new_tokens=2)
    assert result.environment.machine == machine_id("cpu")
    history = History(tmp_path)
    opened, _ = history.open(history.add(result, {}).id)
    loaded = load_result(result.save(tmp_path / "r.json"))
    for each in (opened, loaded):
        assert not each.environment.recorded
        assert describe(each.environment).startswith("Measured on this machine at ")


def test_a_file_of_another_machine_is_recorded_however_it_is_loaded(tiny, tmp_path, monkeypatch):
    result = compare(tiny, [[5, 6, 7]], "memory_reuse", repeats=1, max_new_tokens=2)
    path = result.save(tmp_path / "r.json")
    monkeypatch.setattr(measured, "machine_id", lambda device: "another")
    found = load_result(path)
    assert found.environment.recorded and "Recorded on" in found.to_text()


def test_recordings_that_come_along_were_taken_elsewhere(tmp_path):
    history = History(tmp_path)
    for path in SHIPPED.glob("*.json"):
        environment = history.open(f"recorded:{path.stem}")[0].environment
        assert environment.recorded
        assert describe(environment) == f"Recorded on {environment.origin}; not measured on this machine."


def test_the_moment_is_told_in_local_time():
    now = datetime(2026, 11, 24, 18, 0, tzinfo=UTC)
    then = datetime(2026, 11, 24, 14, 2, tzinfo=UTC).astimezone()
    assert moment("2026-11-24T14:02:00+00:00", now) == f"at {then:%H:%M}"
    earlier = datetime(2026, 10, 1, 14, 2, tzinfo=UTC).astimezone()
    assert moment("2026-10-01T14:02:00+00:00", now) == f"on 2026-10-01 at {earlier:%H:%M}"
    assert moment("0001-01-01T00:00:00+14:00", now) == "on 0001-01-01", "before the first day there is"
    assert moment("2026-13-01T00:00:00", now) == "on 2026-13-01"


def test_damaged_samples_are_refused_with_their_place(tmp_path):
    path = comparison().save(tmp_path / "r.json", monitor={"baseline": {"label": "x", "metrics": {}, "missing": {}}})
    samples = [{"t": 0.5, "values": {"power_w": 5}}, {"t": 1, "values": {"power_w": "high"}}]
    for change, says in (
        ({}, "monitor.baseline has no samples"),
        ({"samples": samples}, r"monitor.baseline.samples\[1\].values.power_w is 'high', but it must be float"),
        ({"samples": [{"t": -1, "values": {}}]}, r"samples\[0\].t is -1, but it must be float >= 0"),
        ({"samples": [], "label": 5}, "monitor.baseline.label is 5"),
    ):
        content = json.loads(path.read_text())
        content["monitor"]["baseline"] |= change
        with pytest.raises(ResultError, match=says):
            History(tmp_path / "kept").take("mine.json", json.dumps(content).encode())
