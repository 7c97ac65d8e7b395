"""Sources and the sampler, with a stand-in for NVML: it answers like a driver and can be made to fail."""

from __future__ import annotations

import json
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from eet_lab.errors import MonitorError
from eet_lab.monitor import PsutilSource, ReplaySource, Sample, Sampler, energy_joules, open_source, record
from eet_lab.monitor.nvml import NvmlSource, find_driver

UUID = "11111111-2222-3333-4444-555555555555"


class FakeNvml(ModuleType):
    """The calls that the package makes, for two GPUs; `broken` maps a call's name to what it raises."""

    class NVMLError(Exception):
        pass

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_FI_DEV_POWER_INSTANT = 0, 1, 0, 186
    nvmlMemory_v2 = 2

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.broken: dict[str, str] = {}
        self.calls: list[str] = []
        self.num_users = 0
        self.num_processes = 1
        self.throttle = 0x1
        self.energy_mj = 5_000
        self.power_return = 0
        self.uuids = ["GPU-00000000-0000-0000-0000-000000000000", f"GPU-{UUID}"]

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken or "all" in self.broken:
            raise self.NVMLError(self.broken.get(name) or self.broken["all"])

    def nvmlInit(self):
        self._call("init")
        self.num_users += 1

    def nvmlShutdown(self):
        self._call("shutdown")
        self.num_users -= 1

    def nvmlSystemGetCudaDriverVersion(self):
        return 13020

    def nvmlSystemGetDriverVersion(self):
        return "595.10"

    def nvmlDeviceGetCount(self):
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.uuids:
            raise self.NVMLError("Not Found")
        return self.uuids.index(uuid)

    def nvmlDeviceGetUUID(self, handle):
        return self.uuids[handle]

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA Fake"

    def nvmlDeviceGetMigMode(self, handle):
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return (9, 0)

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        self._call("memory_v2" if version else "memory_v1")
        return SimpleNamespace(used=100 + handle, total=1000, reserved=7)

    def nvmlDeviceGetClockInfo(self, handle, which):
        self._call("clock")
        return 1980

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._call("energy")
        return self.energy_mj

    def nvmlDeviceGetFieldValues(self, handle, fields):
        self._call("power_field")
        return [SimpleNamespace(nvmlReturn=self.power_return, value=SimpleNamespace(uiVal=312_500))]

    def nvmlDeviceGetPowerUsage(self, handle):
        self._call("power_mean")
        return 300_000

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._call("utilization")
        return SimpleNamespace(gpu=97, memory=55)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        self._call("temperature")
        return 61

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        self._call("throttle")
        return self.throttle

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self._call("processes")
        return [SimpleNamespace(pid=1)] * self.num_processes


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


class Counter:
    """A source that counts its own reads."""

    name, label = "counter", "counter"
    metrics = {"n": "1"}

    def __init__(self):
        self.missing, self.n, self.closed = {}, 0, 0

    def read(self):
        self.n += 1
        return {"n": float(self.n), "energy_j": 10.0 * self.n}

    def condition(self):
        return []

    def close(self):
        self.closed += 1


def wait_for(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


# --- NVML


def test_nvml_maps_the_device_by_uuid_and_names_it(nvml):
    source = NvmlSource(UUID)
    assert source.read()["memory_used_bytes"] == 101, "the second GPU has this UUID"
    assert (source.name, source.label) == ("nvml", "NVIDIA Fake (NVML)")
    assert source.missing == {}
    assert set(source.metrics) == {
        "memory_used_bytes", "memory_total_bytes", "memory_reserved_bytes", "energy_j", "sm_clock_mhz",
        "power_w", "utilization_percent", "memory_busy_percent", "throttle_bits", "temperature_c",
    }  # fmt: skip


def test_nvml_values_are_in_the_units_that_their_names_say(nvml):
    values = NvmlSource(UUID).read()
    assert values["power_w"] == 312.5
    assert values["energy_j"] == 5.0
    assert values["utilization_percent"] == 97
    assert values["memory_busy_percent"] == 55


def test_nvml_falls_back_to_older_calls(nvml):
    nvml.broken["memory_v2"] = "Function Not Found"
    nvml.power_return = 3
    values = NvmlSource(UUID).read()
    assert values["memory_used_bytes"] == 101
    assert "memory_reserved_bytes" not in values
    assert values["power_w"] == 300.0


def test_nvml_unsupported_metric_is_missing_with_its_reason(nvml):
    nvml.broken["energy"] = "Not Supported"
    source = NvmlSource(UUID)
    assert source.missing == {"energy_j": "NVML: Not Supported"}
    assert "energy_j" not in source.metrics
    assert "energy_j" not in source.read()


def test_nvml_slow_metrics_are_read_less_often(nvml):
    source = NvmlSource(UUID)
    nvml.calls.clear()
    for _ in range(20):
        source.read()
    assert nvml.calls.count("memory_v2") == 20
    assert nvml.calls.count("temperature") == 1


def test_nvml_going_away_turns_metrics_off_and_sampling_goes_on(nvml):
    with Sampler(NvmlSource(UUID), hz=500, probes={"mine": lambda: 1.0}) as sampler:
        wait_for(lambda: sampler.since()[1] > 3)
        nvml.broken["all"] = "GPU is lost"
        wait_for(lambda: "temperature_c" in sampler.missing, timeout_s=10)
        assert sampler.missing["memory_used_bytes"] == "NVML: GPU is lost"
        assert sampler.source.metrics == {}
        before = sampler.since()[1]
        wait_for(lambda: sampler.since()[1] > before + 3)
        assert sampler.since(before)[0][-1].values == {"mine": 1.0}
        assert sampler.condition() == []


def test_nvml_condition_names_sharing_and_throttling(nvml):
    source = NvmlSource(UUID)
    assert source.condition() == []
    nvml.num_processes, nvml.throttle = 3, 0x44
    assert source.condition() == [
        "the GPU is shared: 3 processes use it",
        "the clocks are held down: power cap, hardware thermal limit",
    ]


def test_nvml_mig_slice_opens_by_its_uuid_and_says_so(nvml):
    nvml.uuids[1] = f"MIG-{UUID}"
    nvml.broken["utilization"] = "Not Supported"
    source = NvmlSource(UUID)
    assert source.missing["utilization_percent"] == "not available under MIG (Not Supported)"
    assert any("MIG" in reason for reason in source.condition())


def test_nvml_failures_to_start_are_one_error(nvml):
    with pytest.raises(MonitorError, match="knows no device GPU-no-such"):
        NvmlSource("GPU-no-such")
    assert nvml.num_users == 0, "what was initialised is shut down"
    nvml.broken["init"] = "Driver Not Loaded"
    with pytest.raises(MonitorError, match="Driver Not Loaded"):
        NvmlSource(UUID)
    with pytest.raises(MonitorError, match="Driver Not Loaded"):
        find_driver()


def test_nvml_close_lets_go_once(nvml):
    source = NvmlSource(UUID)
    assert nvml.num_users == 1
    source.close()
    source.close()
    assert nvml.num_users == 0
    assert source.read() == {}


def test_find_driver_lists_gpus(nvml):
    driver = find_driver()
    assert (driver.version, driver.cuda) == ("595.10", (13, 2))
    assert [gpu.uuid for gpu in driver.gpus] == nvml.uuids
    assert driver.gpus[0].capability == (9, 0)
    assert not driver.gpus[0].mig
    assert nvml.num_users == 0


# --- other sources


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


# --- sampler


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


def test_sampler_ring_keeps_the_newest_and_its_numbering():
    sampler = Sampler(Counter(), hz=1000, capacity=4)
    wait_for(lambda: sampler.since()[1] >= 12)
    sampler.close()
    samples, index = sampler.since(0)
    assert [s.values["n"] for s in samples] == [float(index - 3 + i) for i in range(4)]
    assert sampler.since(index - 1)[0] == samples[-1:]
    assert sampler.since(index)[0] == []


def test_sampler_keeps_its_rate():
    with Sampler(Counter(), hz=50) as sampler:
        time.sleep(0.5)
        num_samples = sampler.since()[1]
    assert 10 <= num_samples <= 27


def test_sampler_pause_and_resume():
    with Sampler(Counter(), hz=500) as sampler:
        wait_for(lambda: sampler.since()[1] >= 3)
        sampler.pause()
        assert sampler.paused
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
        assert sampler.latest()["good"] == 3.0


def test_sampler_measures_energy_and_its_own_cost():
    with Sampler(Counter(), hz=200) as sampler:
        first = sampler.sample_now()
        wait_for(lambda: sampler.since()[1] >= 8)
        last = sampler.sample_now()
        used = last.values["energy_j"] - first.values["energy_j"]
        assert sampler.energy_joules((first.t, last.t)) == pytest.approx(used)
        assert sampler.cost_s > 0


@pytest.mark.parametrize("hz", [0, -1, 5000, float("nan")])
def test_sampler_refuses_a_rate_that_makes_no_sense(hz):
    with pytest.raises(ValueError, match="hz is"):
        Sampler(Counter(), hz=hz)


@pytest.mark.gpu
def test_nvml_on_a_real_gpu():
    import torch

    block = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    source = open_source("cuda")
    assert source.name == "nvml"
    with Sampler(source, hz=20) as sampler:
        first = sampler.sample_now()
        end = time.perf_counter() + 2
        a = torch.randn(4096, 4096, device="cuda")
        while time.perf_counter() < end:
            a = torch.nn.functional.normalize(a @ a)
            torch.cuda.synchronize()
        last = sampler.sample_now()
        latest = sampler.latest()
        joules = sampler.energy_joules((first.t, last.t))
    assert latest["memory_used_bytes"] > block.numel()
    assert joules is None or 20 < joules < 3000
    assert 1 < latest["power_w"] < 2000
    print(
        source.label,
        latest,
        sampler.missing,
        f"{joules} J, {sampler.cost_s / sampler.since()[1] * 1e3:.3f} ms a read",
    )
