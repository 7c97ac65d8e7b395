"""NVML as a source, with a stand-in that answers like a driver and can be made to fail."""

from __future__ import annotations

import time

import pytest

from eet_lab.errors import MonitorError
from eet_lab.monitor import Sampler, open_source
from eet_lab.monitor.nvml import NvmlSource, find_driver
from monitor.fakes import UUID, wait_for


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
        assert sampler.source.condition() == []


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
    assert [(gpu.name, gpu.capability) for gpu in driver.gpus] == [("NVIDIA Fake", (9, 0))] * 2
    assert nvml.num_users == 0


def test_a_gpu_that_shares_the_machines_memory_is_found(nvml):
    """NVML does not tell the memory of such a GPU, GB10 for example."""
    nvml.broken |= dict.fromkeys(("memory_v1", "memory_v2"), "Not Supported")
    assert len(find_driver().gpus) == 2
    source = NvmlSource(UUID)
    assert source.missing["memory_total_bytes"] == "NVML: Not Supported" and source.read()["power_w"] == 312.5


@pytest.mark.gpu
def test_nvml_on_a_real_gpu():
    import torch

    block = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    source = open_source("cuda")
    assert source.name == "nvml"
    with Sampler(source, hz=20) as sampler:
        end = time.perf_counter() + 2
        a = torch.randn(4096, 4096, device="cuda")
        while time.perf_counter() < end:
            a = torch.nn.functional.normalize(a @ a)
            torch.cuda.synchronize()
        samples, num_taken = sampler.since()
    values = {name: value for sample in samples for name, value in sample.values.items()}
    assert values["memory_used_bytes"] > block.numel()
    assert 1 < values["power_w"] < 2000
    joules = [sample.values["energy_j"] for sample in samples if "energy_j" in sample.values]
    assert not joules or 20 < joules[-1] - joules[0] < 3000
    print(source.label, values, sampler.missing, f"{sampler.cost_s / num_taken * 1e3:.3f} ms a read")
